#pragma once

#include <vector>

#include "comm/shared_memory/group.h"

namespace polyreme {

// The data movement of a call in which the ranks read each other's memory (see PeerMemory): no staging, one
// copy instead of two. The bits are those of the staged algorithms.
//
// The first meeting tells everybody where the memory of all is, and whether it can be read; if some of it
// cannot, all ranks go on with staging. Nobody writes what another rank still reads: a rank reads of its
// peers' memory nothing but its own slice, until the meeting after which the slices of all are done; and the
// last meeting of a call shows that nobody reads any more. A rank that fails waits for the same
// (SharedGroup).
class DirectCall {
 public:
  // Publishes what the others shall read of this rank, and meets them.
  DirectCall(SharedGroup& group, const void* memory, int64_t bytes);
  // Below this staging is as fast: one meeting less, in the cache.
  static constexpr int64_t kSmallestBytes = 16 << 10;
  static bool pays(const SharedGroup& group, int64_t bytes) {
    return group.size() > 1 && group.peer_memory() != nullptr && bytes >= kSmallestBytes;
  }

  bool everywhere() const { return everywhere_; }
  // The published memory of a rank.
  const char* of(int rank) const { return memory_[static_cast<size_t>(rank)]; }

  void all_reduce(const CollectiveCall& call, char* data, int64_t bytes);
  void reduce_scatter(const CollectiveCall& call, char* output, int64_t bytes);
  // Copies from a rank's memory at `offset`; before `end`. total_bytes: of all that this call reads.
  void read(void* to, int rank, int64_t offset, int64_t bytes, int64_t total_bytes);
  // Nobody reads this rank's memory after it.
  void end() { group_.meet(); }

 private:
  void reduce(const CollectiveCall& call, int64_t offset, int64_t bytes, void* out);

  SharedGroup& group_;
  std::vector<const char*> memory_;
  bool everywhere_ = true;
};

}  // namespace polyreme
