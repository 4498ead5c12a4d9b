#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/shared_memory/layout.h"
#include "comm/shared_memory/memory.h"
#include "comm/shared_memory/peer_memory.h"

namespace polyreme {

// Who a rank is.
struct RankIdentity {
  ProcessIdentity process;
  std::string host;
  CpuMask cpus{};
  int job_rank = 0;  // in the group that all others were split from
};
RankIdentity this_rank(int job_rank);

// What a rank waits for.
class Awaited {
 public:
  enum class Outcome { kNothing, kProgress, kDone };
  virtual ~Awaited() = default;
  // Looks, and does what can be done. Called again and again, and whenever the bell has rung.
  virtual Outcome poll() = 0;
  // The ranks that must act next. Called when it takes long, once more before they are blamed.
  virtual std::vector<int> missing() = 0;
};

// One rank's side of a group over shared memory: the meetings, and everything that can go wrong.
//
// A *call* is a sequence of *meetings*. At a meeting every rank waits for all others; what a rank
// has written before is then visible to all. Meetings alternate between two *slots* of staging,
// results, notes and call records: what is written into `slot()` before a meeting may be read by
// the others after it, until their next one. So one meeting per chunk is enough: the slot is
// written again two meetings later, and the one in between shows that everybody has read it.
//
// The first meeting of a call compares the calls of all ranks. User memory may be written only
// after it.
//
// An exchange has no meetings: see Channel in layout.h, and exchange.h.
//
// Every function but `fail` and `leave` belongs to one thread at a time.
class SharedGroup {
 public:
  struct Options {
    std::string name;
    std::chrono::milliseconds timeout;
    bool oversubscribed = false;                    // known from outside: more processes than CPUs
    std::shared_ptr<const PeerMemory> peer_memory;  // null: everything is staged
    int job_rank = -1;                              // of this process; negative: its rank in this group
  };
  // Bytes of a segment, and its preparation by whoever created the memory. chunk_bytes is rounded up.
  static int64_t segment_bytes(int size, int64_t chunk_bytes);
  static void format(SharedMemory& memory, int size, int64_t chunk_bytes);
  // Puts a rank's process on record, so that its death is noticed; before it attaches where known.
  static void introduce(SharedMemory& memory, int rank, const RankIdentity& identity);

  // Throws CommError if the memory is not a segment of this version, size and chunk_bytes; tells the
  // others then.
  SharedGroup(std::shared_ptr<SharedMemory> memory, int rank, int size, int64_t chunk_bytes, Options options);
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const Options& options() const { return options_; }
  bool oversubscribed() const { return oversubscribed_; }
  // Looks at the CPUs of all ranks, which must have introduced themselves, to choose how to wait.
  void choose_waiting();

  // Begins a call. A silent wait ends after `limit`.
  void begin(const CollectiveCall& call, std::chrono::milliseconds limit);
  // Throws PeerLost, Timeout or CollectiveMismatch; the group is broken for all ranks then.
  void meet();

  // Memory that the ranks read of each other; null if they do not. It may be given once, by all ranks at
  // once.
  const PeerMemory* peer_memory() const { return options_.peer_memory.get(); }
  void set_peer_memory(std::shared_ptr<const PeerMemory> memory) { options_.peer_memory = std::move(memory); }
  // Before a meeting: memory of this rank for the others to read after it.
  void publish(const void* address, int64_t bytes);
  // After it: whether the rank has published readable memory, and where it is.
  bool has_published(int rank, int slot) const { return block(rank).published[slot].handle != 0; }
  const char* published(int rank, int slot) const;
  // While a rank reads its peers' memory. Throws the failure of the group, if any, and then nobody is read.
  class Reading {
   public:
    explicit Reading(SharedGroup& group);
    ~Reading() { reads_.store(0, std::memory_order_release); }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

   private:
    std::atomic<uint32_t>& reads_;
  };
  // Of a rank that fails: returns when its memory is not read any more.
  void wait_for_readers() const noexcept;

  // Waits for what happens in this rank's channels. Throws as meet does.
  void await_channels(Awaited& awaited) { await(awaited, mine().channels); }
  // Tells a rank that one of its channels has changed.
  void ring(int rank) { ring(block(rank).channels); }

  CallLedger& ledger() const { return mine().ledger; }

  // Room for the addresses of a reduction, one for each rank, so that small calls need no memory.
  std::vector<const void*>& terms() { return terms_; }

  // Of the next meeting.
  int slot() const { return static_cast<int>(meetings_ % kNumSlots); }
  int64_t chunk_bytes() const { return layout_.chunk_bytes(); }
  char* staging(int rank, int slot) const { return layout_.staging(base(), rank, slot); }
  // Where a rank stages `bytes` bytes, of a call that stages no more.
  char* staging(int rank, int slot, int64_t bytes) const {
    return bytes <= Mail::kSmallBytes ? block(rank).mail[slot].small : staging(rank, slot);
  }
  char* result(int rank, int slot) const { return layout_.result(base(), rank, slot); }
  char* note(int rank, int slot) const { return block(rank).note[slot]; }
  Channel& channel(int from, int to) const { return layout_.channel(base(), from, to); }
  int64_t piece_bytes() const { return layout_.piece_bytes(); }
  char* lane(int rank, int lane, int slot) const { return layout_.lane(base(), rank, lane, slot); }
  RankIdentity identity(int rank) const;

  // Breaks the group for all ranks unless it is broken already. From any thread.
  void fail(FailureKind kind, const std::string& text) noexcept;
  // The same for this group and those that were split from it.
  void abort(const std::string& text) noexcept;
  void add_subgroup(const std::shared_ptr<SharedGroup>& subgroup);
  void throw_if_failed() const;
  [[noreturn]] void fail_and_throw(FailureKind kind, const std::string& text);
  // Takes this rank out; the others fail when they need it, at once if it owes them a call. Once.
  void leave(const std::string& why) noexcept;
  // "rank 2 (host a, pid 123)"
  std::string who(int rank) const;
  // "group 'world', rank 0, all_reduce float32[4] sum, sequence 7"
  std::string where() const;

 private:
  void* base() const { return memory_->address(); }
  GroupBlock& group() const { return SegmentLayout::group(base()); }
  RankBlock& block(int rank) const { return SegmentLayout::rank_block(base(), rank); }
  RankBlock& mine() const { return block(rank_); }

  void await(Awaited& awaited, Bell& bell);
  static void ring(Bell& bell);
  static void ring_if_asleep(Bell& bell);
  void wake_all() noexcept;
  void look_for_departed(Awaited& awaited);
  void look_for_dead(Awaited& awaited);
  void time_out(Awaited& awaited);
  void let_end(int rank) const;
  std::vector<int> dead_among(const std::vector<int>& ranks) const;
  [[noreturn]] void throw_failure() const;
  void compare_calls(int slot);
  // "barrier (sequence 4) and exchange (sequence 2)"
  std::string completed_text(int rank) const;
  // "rank 2 (host a, pid 123), which last completed barrier (sequence 4) and ..."; of several, joined.
  std::string progress_text(const std::vector<int>& ranks) const;

  std::shared_ptr<SharedMemory> memory_;
  int rank_;
  int size_;
  Options options_;
  SegmentLayout layout_;
  ProcessIdentity self_;
  bool oversubscribed_ = false;
  std::atomic<bool> left_{false};
  std::mutex subgroups_mutex_;
  std::vector<std::weak_ptr<SharedGroup>> subgroups_;

  std::vector<const void*> terms_;
  int waits_without_yields_ = 0;
  uint64_t meetings_ = 0;
  PackedCall call_{};
  CurrentCall current_call_;  // the same: where() comes from the thread that issues, too
  std::chrono::milliseconds limit_{0};
  bool opening_ = false;  // the next meeting is the first one of the call
};

}  // namespace polyreme
