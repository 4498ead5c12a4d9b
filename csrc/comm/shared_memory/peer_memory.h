#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace polyreme {

// Memory that the ranks of a group can read of each other, without a copy in between.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  // Under which handle the others find `bytes` bytes of this rank; 0 if they cannot read them all.
  virtual uint64_t publish(const void* address, int64_t bytes) const = 0;
  // What `rank` has published. Null for a handle that it cannot have published.
  virtual const char* find(int rank, uint64_t handle, int64_t bytes) const = 0;
  // Memory that can be published, aligned to 64 bytes; null if there is none (left).
  virtual std::shared_ptr<void> allocate(size_t size_bytes) const = 0;
  // Whether memory that its rank gives up can still be read, as something undefined.
  virtual bool outlives_its_rank() const = 0;
};

// Ranks that are threads: all memory, by its address.
std::shared_ptr<const PeerMemory> make_thread_memory();

// The same memory in a group of which rank r is rank members[r] of the memory's.
std::shared_ptr<const PeerMemory> select_peers(std::shared_ptr<const PeerMemory> memory,
                                               std::vector<int> members);

}  // namespace polyreme
