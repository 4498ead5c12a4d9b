#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/shared_memory/process.h"
#include "comm/transport.h"

// What lies where in the memory that the ranks of a group share:
//
//   GroupBlock | RankBlock of each rank | staging of each rank, slot 0 then 1 | results, likewise
//
// Everything is written by one rank, or atomic. "Plain" fields are ordered by the meetings of the
// group (see SharedGroup).

namespace polyreme {

inline constexpr uint64_t kSegmentMagic = 0x504f4c5952454d45;  // "POLYREME"
inline constexpr uint32_t kSegmentVersion = 1;
inline constexpr size_t kNoteBytes = 512;
inline constexpr int kNumSlots = 2;

// Two cache lines apart: the adjacent-line prefetcher pairs them.
inline constexpr size_t kLineBytes = 128;

struct GroupBlock {
  uint64_t magic;
  uint32_t version;
  int32_t size;
  int64_t chunk_bytes;
  int64_t segment_bytes;

  // Arrivals of all ranks at all meetings. Its low half is the futex that sleepers wait on.
  alignas(kLineBytes) std::atomic<uint64_t> arrivals;
  alignas(kLineBytes) std::atomic<uint32_t> sleepers;
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

  // Read by others only when something is wrong.
  alignas(kLineBytes) std::atomic<uint64_t> arrived;  // meetings this rank has come to
  CallLedger ledger;
  std::atomic<uint32_t> departed;  // 1: see departure_text
  char departure_text[256];

  // Plain, by slot.
  alignas(kLineBytes) CollectiveCall call[kNumSlots];
  alignas(kLineBytes) char note[kNumSlots][kNoteBytes];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// Addresses inside the segment of a group of `size` ranks.
class SegmentLayout {
 public:
  SegmentLayout() = default;
  // chunk_bytes: of one staging slot, a multiple of 64 * size (0 in a group of one).
  SegmentLayout(int size, int64_t chunk_bytes) : size_(size), chunk_bytes_(chunk_bytes) {}

  int64_t chunk_bytes() const { return chunk_bytes_; }
  int64_t segment_bytes() const { return results_begin() + int64_t{size_} * kNumSlots * result_bytes(); }
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

 private:
  static constexpr int64_t kPage = 4096;
  static constexpr int64_t kRanksBegin = kPage;
  static constexpr int64_t whole_pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  int64_t slot_bytes() const { return whole_pages(chunk_bytes_); }
  int64_t result_bytes() const { return whole_pages(size_ == 0 ? 0 : chunk_bytes_ / size_); }
  int64_t staging_begin() const {
    return whole_pages(kRanksBegin + int64_t{size_} * static_cast<int64_t>(sizeof(RankBlock)));
  }
  int64_t results_begin() const { return staging_begin() + int64_t{size_} * kNumSlots * slot_bytes(); }

  int size_ = 0;
  int64_t chunk_bytes_ = 0;
};

static_assert(sizeof(GroupBlock) <= 4096);

}  // namespace polyreme
