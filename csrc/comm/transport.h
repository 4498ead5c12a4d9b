#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/collective.h"
#include "comm/failure.h"

namespace polyreme {

// What a rank has called and completed in a group. Atomic, so that others may look when something is wrong.
struct CallLedger {
  // Marks are sequence * 256 + CollectiveOp; 0: none yet.
  struct Line {
    std::atomic<uint64_t> posted;
    std::atomic<uint64_t> completed;
    bool owes() const { return sequence_of(posted) > sequence_of(completed); }
  };
  Line collectives;
  Line exchanges;  // numbered apart: not all ranks take part

  Line& of(CollectiveOp op) { return op == CollectiveOp::kExchange ? exchanges : collectives; }
  bool owes() const { return collectives.owes() || exchanges.owes(); }
  static uint64_t mark_of(const CollectiveCall& call) {
    return call.sequence << 8 | static_cast<uint64_t>(call.op);
  }
  static uint64_t sequence_of(const std::atomic<uint64_t>& mark) {
    return mark.load(std::memory_order_relaxed) >> 8;
  }
};
// "all_reduce (sequence 7)", "nothing"
std::string mark_text(const std::atomic<uint64_t>& mark);

// The user memory of a call, as run() needs it. Counts and the dtype of the rest are in the call.
struct CallMemory {
  const void* input = nullptr;  // equal to `output` where the call is in place
  void* output = nullptr;
  // Elements by rank: of an uneven all_gather `receive_counts`, of an uneven all_to_all both; else empty.
  std::vector<int64_t> send_counts, receive_counts;

  struct Part {  // of an exchange
    Transfer::Kind kind;
    int peer;
    void* data;
    int64_t count;
    DType dtype;
  };
  std::vector<Part> parts;
};

// One rank's side of a group, blocking: what a transport implements, and CpuCommunicator drives from its
// streams. `fail`, `abort` and `leave` come from any thread, everything else from one thread at a time.
class Transport {
 public:
  // Leaves the group.
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  // How long a collective waits without progress; of the call that runs, see run().
  virtual std::chrono::milliseconds timeout() const = 0;
  // This rank's own; written by CpuCommunicator.
  virtual CallLedger& ledger() = 0;

  // Runs a call to its end: compares it between the ranks, then moves the data. Of kAttach and kBarrier there
  // is nothing to move. Throws PeerLost, Timeout or CollectiveMismatch; the group is broken then.
  virtual void run(const CollectiveCall& call, const CallMemory& memory, std::chrono::milliseconds limit) = 0;
  // Runs a kSplit; null without a color. The new group's ranks call kAttach on it next. Throws OutOfMemory on
  // all ranks if the group cannot be had; this group stays usable then.
  virtual std::unique_ptr<Transport> split(const CollectiveCall& call, int color, int key,
                                           const std::string& name) = 0;

  // Memory that the ranks read of each other in place, aligned to 64 bytes; null if there is none.
  virtual std::shared_ptr<void> allocate(size_t) { return nullptr; }

  // Throws the failure that broke the group, if any.
  virtual void throw_if_failed() const = 0;
  // Breaks the group for all ranks that can be reached, unless it is broken already.
  virtual void fail(FailureKind kind, const std::string& text) noexcept = 0;
  // The same for this group and those that were split from it.
  virtual void abort(const std::string& text) noexcept = 0;
  // Takes this rank out; the others fail when they need it, at once if it owes them a call. Once.
  virtual void leave(const std::string& why) noexcept = 0;
  // "rank 2 (host a, pid 123)"
  virtual std::string who(int rank) const = 0;
};

}  // namespace polyreme
