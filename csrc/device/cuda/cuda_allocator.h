#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "device/device.h"

struct PolyremeCudaTable;

namespace polyreme {

// Memory of one GPU. Freed blocks are kept and reused, since cudaMalloc and cudaFree wait for the device. A
// block is free when no operation that touches it is in flight: streams own the buffers of theirs. Any
// thread; buffers keep it alive.
class CudaAllocator : public std::enable_shared_from_this<CudaAllocator> {
 public:
  CudaAllocator(const PolyremeCudaTable& table, int index) : table_(table), index_(index) {}
  ~CudaAllocator();
  CudaAllocator(const CudaAllocator&) = delete;
  CudaAllocator& operator=(const CudaAllocator&) = delete;

  // From the cache alone; null if nothing in it fits.
  std::shared_ptr<Buffer> try_cached(size_t size_bytes, const char* label);
  // Throws OutOfMemory, with the labels that hold most.
  std::shared_ptr<Buffer> allocate(size_t size_bytes, const char* label);
  MemoryStats stats() const;
  void reset_peak();
  void release(void* address, size_t block_bytes) noexcept;

 private:
  std::shared_ptr<Buffer> hand_out(void* address, size_t size_bytes, size_t block_bytes, const char* label);
  void drop_cache() noexcept;
  std::string largest_holders() const;

  const PolyremeCudaTable& table_;
  const int index_;
  mutable std::mutex mutex_;
  std::multimap<size_t, void*> free_blocks_;
  struct Holder {
    const char* label;
    size_t bytes;
  };
  std::map<const void*, Holder> holders_;  // blocks that are in use
  MemoryStats stats_;
};

}  // namespace polyreme
