#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "device/device.h"

namespace polyreme {

// Memory of the immediate executor: freed blocks are kept and reused, since the pages of a fresh
// block cost more than most operations on it. Thread-safe; buffers keep it alive.
class CpuAllocator : public std::enable_shared_from_this<CpuAllocator> {
 public:
  CpuAllocator() = default;
  ~CpuAllocator();
  CpuAllocator(const CpuAllocator&) = delete;
  CpuAllocator& operator=(const CpuAllocator&) = delete;

  std::shared_ptr<Buffer> allocate(size_t size_bytes, const char* label);
  // Memory that somebody else has taken, or given back.
  void count(int64_t bytes);
  MemoryStats stats() const;
  void reset_peak();
  void release(void* address, size_t block_bytes) noexcept;

 private:
  void* take_cached(size_t block_bytes, size_t* actual_bytes);
  void drop_cache() noexcept;

  mutable std::mutex mutex_;
  std::multimap<size_t, void*> free_blocks_;
  MemoryStats stats_;
};

}  // namespace polyreme
