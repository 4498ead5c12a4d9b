#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/shared_memory/current_call.h"
#include "comm/shared_memory/process.h"
#include "comm/transport.h"

// What lies where in the memory that the ranks of a group share:
//
//   GroupBlock | RankBlock of each rank | Channel of each pair, by sender
//   | staging of each rank, slot 0 then 1 | results, likewise | lanes of each rank, likewise
//
// Everything is written by one rank, or atomic. "Plain" fields are ordered by the meetings of the
// group (see SharedGroup), or as Channel says.
//
// Staging, results and lanes grow with the number of ranks, channels with its square: 1 MiB at 64 ranks.

namespace polyreme {

inline constexpr uint64_t kSegmentMagic = 0x504f4c5952454d45;  // "POLYREME"
inline constexpr uint32_t kSegmentVersion = 4;
inline constexpr size_t kNoteBytes = 512;
inline constexpr int kNumSlots = 2;
// Messages that a rank stages at once in an exchange; more take turns.
inline constexpr int kNumLanes = 4;

// Two cache lines apart: the adjacent-line prefetcher pairs them.
inline constexpr size_t kLineBytes = 128;

// What a rank brings to a meeting: all that a small call needs, next to the word that the others look at, so
// that one cache miss fetches both (64 bytes of it; two fetch the rest). `arrived` is stored last.
struct alignas(kLineBytes) Mail {
  static constexpr int64_t kSmallBytes = 96;
  std::atomic<uint64_t> arrived;  // the number of the meeting, of those in this slot
  PackedCall call;
  char small[kSmallBytes];  // data of the call, instead of staging
};
static_assert(sizeof(Mail) == kLineBytes);

// What ranks sleep on; the low half of the count is the futex. Whoever waits for long counts as a sleeper.
struct Bell {
  alignas(kLineBytes) std::atomic<uint64_t> count;
  alignas(kLineBytes) std::atomic<uint32_t> sleepers;
};

struct GroupBlock {
  uint64_t magic;
  uint32_t version;
  int32_t size;
  int64_t chunk_bytes;
  int64_t segment_bytes;

  Bell arrivals;  // rung at a meeting while somebody sleeps
  std::atomic<uint32_t> departures;
  // The first failure wins: 0 none, 1 being written, 2 readable.
  std::atomic<uint32_t> failure_state;
  FailureKind failure_kind;
  char failure_text[2048];
};

struct alignas(kLineBytes) RankBlock {
  // Who it is. pid is stored last and 0 before.
  std::atomic<int64_t> pid;
  uint64_t start_ticks;
  uint64_t pid_namespace;
  char host[64];
  CpuMask cpus;
  int32_t job_rank;

  // Read by others only when something is wrong.
  alignas(kLineBytes) CallLedger ledger;
  std::atomic<int32_t> waits_for;  // a rank, plus 1; 0: none, or not for long yet
  std::atomic<uint32_t> reads;     // 1: while it reads memory of its peers
  std::atomic<uint32_t> departed;  // 1: see departure_text
  char departure_text[256];

  // Plain, by slot.
  Mail mail[kNumSlots];
  struct Published {
    uint64_t handle;  // of PeerMemory
    int64_t bytes;
  };
  alignas(kLineBytes) Published published[kNumSlots];
  alignas(kLineBytes) char note[kNumSlots][kNoteBytes];

  Bell channels;  // rung when a peer has changed a channel of this rank in an exchange
};

// The messages from one rank to another, one after the other, numbered from 1. Both sides announce theirs and
// compare; then the sender fills the slots of one of its lanes by turns, and the receiver drains them. Each
// side writes its own line. Records are by the parity of the number: a side comes to message n + 2 after
// the other one has come to n + 1, and so has read what was announced of n.
struct Channel {
  struct Record {
    int64_t count;
    DType dtype;
    uint64_t handle;  // of the sender's memory, if the receiver can read it (see PeerMemory)
  };
  struct alignas(kLineBytes) Side {
    std::atomic<uint64_t> announced;  // the number of the latest message
    std::atomic<uint64_t> pieces;     // filled, or drained, over all messages
    std::atomic<int32_t> lane;        // of the sender, for the message that it fills
    Record record[2];
  };
  Side sender, receiver;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// Addresses inside the segment of a group of `size` ranks.
class SegmentLayout {
 public:
  SegmentLayout() = default;
  // chunk_bytes: of one staging slot, a multiple of 64 * size (0 in a group of one).
  SegmentLayout(int size, int64_t chunk_bytes) : size_(size), chunk_bytes_(chunk_bytes) {}

  int64_t chunk_bytes() const { return chunk_bytes_; }
  // Of one slot of a lane.
  int64_t piece_bytes() const { return (chunk_bytes_ / 8 + 63) / 64 * 64; }
  int64_t segment_bytes() const { return lanes_begin() + int64_t{size_} * lane_bytes(); }
  static GroupBlock& group(void* base) { return *static_cast<GroupBlock*>(base); }
  static RankBlock& rank_block(void* base, int rank) {
    return reinterpret_cast<RankBlock*>(static_cast<char*>(base) + kRanksBegin)[rank];
  }
  // The slots of a rank are apart by whole pages.
  char* staging(void* base, int rank, int slot) const {
    return static_cast<char*>(base) + staging_begin() + (int64_t{rank} * kNumSlots + slot) * slot_bytes();
  }
  char* result(void* base, int rank, int slot) const {
    return static_cast<char*>(base) + results_begin() + (int64_t{rank} * kNumSlots + slot) * result_bytes();
  }
  Channel& channel(void* base, int from, int to) const {
    return reinterpret_cast<Channel*>(static_cast<char*>(base) +
                                      channels_begin())[int64_t{from} * size_ + to];
  }
  char* lane(void* base, int rank, int lane, int slot) const {
    return static_cast<char*>(base) + lanes_begin() + rank * lane_bytes() +
           (lane * kNumSlots + slot) * piece_bytes();
  }

 private:
  static constexpr int64_t kPage = 4096;
  static constexpr int64_t kRanksBegin = kPage;
  static constexpr int64_t whole_pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  int64_t slot_bytes() const { return whole_pages(chunk_bytes_); }
  int64_t result_bytes() const { return whole_pages(size_ == 0 ? 0 : chunk_bytes_ / size_); }
  int64_t channels_begin() const {
    return whole_pages(kRanksBegin + int64_t{size_} * static_cast<int64_t>(sizeof(RankBlock)));
  }
  int64_t staging_begin() const {
    return whole_pages(channels_begin() + int64_t{size_} * size_ * static_cast<int64_t>(sizeof(Channel)));
  }
  int64_t results_begin() const { return staging_begin() + int64_t{size_} * kNumSlots * slot_bytes(); }
  int64_t lanes_begin() const { return results_begin() + int64_t{size_} * kNumSlots * result_bytes(); }
  int64_t lane_bytes() const { return whole_pages(kNumLanes * kNumSlots * piece_bytes()); }

  int size_ = 0;
  int64_t chunk_bytes_ = 0;
};

static_assert(sizeof(GroupBlock) <= 4096);

}  // namespace polyreme
