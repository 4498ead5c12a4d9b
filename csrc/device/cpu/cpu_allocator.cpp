#include "device/cpu/cpu_allocator.h"

#include <sys/mman.h>

#include <cstdlib>

#include "base/error.h"
#include "base/math.h"

namespace polyreme {
namespace {

constexpr size_t kSmallAlignment = 64;
constexpr size_t kPage = 4096;
// Large blocks start at a huge page, so that one TLB entry covers 2 MiB of a matrix.
constexpr size_t kHugePage = size_t{2} << 20;

class CachedBuffer final : public Buffer {
 public:
  CachedBuffer(std::shared_ptr<CpuAllocator> allocator, void* address, size_t size_bytes, size_t block_bytes)
      : Buffer(address, size_bytes), allocator_(std::move(allocator)), block_bytes_(block_bytes) {}
  ~CachedBuffer() override { allocator_->release(address(), block_bytes_); }

 private:
  void map_host() override {}
  void unmap_host() noexcept override {}

  std::shared_ptr<CpuAllocator> allocator_;
  size_t block_bytes_;
};

size_t block_size(size_t size_bytes) {
  const size_t alignment = size_bytes >= kHugePage ? kPage : kSmallAlignment;
  return static_cast<size_t>(
      round_up(static_cast<int64_t>(std::max<size_t>(size_bytes, 1)), static_cast<int64_t>(alignment)));
}

// Null if the memory cannot be had.
void* fresh_block(size_t block_bytes) {
  const bool is_large = block_bytes >= kHugePage;
  void* address = nullptr;
  if (posix_memalign(&address, is_large ? kHugePage : kSmallAlignment, block_bytes) != 0) return nullptr;
  if (is_large) madvise(address, block_bytes, MADV_HUGEPAGE);
  return address;
}

}  // namespace

CpuAllocator::~CpuAllocator() { drop_cache(); }

void* CpuAllocator::take_cached(size_t block_bytes, size_t* actual_bytes) {
  const auto it = free_blocks_.lower_bound(block_bytes);
  // A step asks for the same sizes as the one before, so a near fit is enough to reuse everything, and what
  // stays for long wastes at most a part in 64.
  if (it == free_blocks_.end() || it->first > block_bytes + block_bytes / 64) return nullptr;
  void* address = it->second;
  *actual_bytes = it->first;
  free_blocks_.erase(it);
  return address;
}

std::shared_ptr<Buffer> CpuAllocator::allocate(size_t size_bytes, const char* label) {
  size_t block_bytes = block_size(size_bytes);
  const std::lock_guard lock(mutex_);
  void* address = take_cached(block_bytes, &block_bytes);
  if (address == nullptr) {
    address = fresh_block(block_bytes);
    if (address == nullptr) {
      drop_cache();
      address = fresh_block(block_bytes);
    }
    require<OutOfMemory>(address != nullptr, "out of memory: ", size_bytes, " bytes for '", label, "' with ",
                         stats_.in_use_bytes, " bytes in use (peak ", stats_.peak_bytes,
                         "); use a smaller micro-batch, recompute, or a smaller model");
    stats_.reserved_bytes += static_cast<int64_t>(block_bytes);
  }
  stats_.in_use_bytes += static_cast<int64_t>(block_bytes);
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.in_use_bytes);
  return std::make_shared<CachedBuffer>(shared_from_this(), address, size_bytes, block_bytes);
}

void CpuAllocator::count(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  stats_.in_use_bytes += bytes;
  stats_.reserved_bytes += bytes;
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.in_use_bytes);
}

void CpuAllocator::release(void* address, size_t block_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  stats_.in_use_bytes -= static_cast<int64_t>(block_bytes);
  free_blocks_.emplace(block_bytes, address);
}

void CpuAllocator::drop_cache() noexcept {
  for (const auto& [bytes, address] : free_blocks_) {
    stats_.reserved_bytes -= static_cast<int64_t>(bytes);
    std::free(address);
  }
  free_blocks_.clear();
}

MemoryStats CpuAllocator::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void CpuAllocator::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak_bytes = stats_.in_use_bytes;
}

}  // namespace polyreme
