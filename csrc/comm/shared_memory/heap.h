#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/shared_memory/memory.h"
#include "comm/shared_memory/peer_memory.h"

namespace polyreme {

// One rank's part of the heaps of a world of processes: an arena per rank, which all others map read-only. A
// handle is an offset in the arena of its rank. Memory is taken and given back by each rank alone; what was
// given back reads as zeros, also to a peer that comes late, so nobody crashes over it. Thread-safe.
class SharedHeap final : public PeerMemory, public std::enable_shared_from_this<SharedHeap> {
 public:
  // arenas[r]: of rank r, as this rank has mapped it; `own` is this rank's.
  SharedHeap(std::shared_ptr<SharedArena> own, std::vector<std::shared_ptr<SharedMemory>> arenas);

  uint64_t publish(const void* address, int64_t bytes) const override;
  const char* find(int rank, uint64_t handle, int64_t bytes) const override;
  std::shared_ptr<void> allocate(size_t size_bytes) const override;
  bool outlives_its_rank() const override { return true; }

 private:
  void release(size_t offset, size_t size_bytes) const noexcept;

  std::shared_ptr<SharedArena> own_;
  std::vector<std::shared_ptr<SharedMemory>> arenas_;
  mutable std::mutex mutex_;
  mutable std::map<size_t, size_t> free_;  // offset: bytes; no two touch
};

}  // namespace polyreme
