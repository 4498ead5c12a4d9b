#include "device/cuda/cuda_allocator.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/math.h"
#include "device/cuda/cuda_device.h"
#include "device/cuda/cuda_table.h"

namespace polyreme {
namespace {

// cudaMalloc aligns to 256 bytes and takes 2 MiB from the driver at a time.
constexpr int64_t kSmallAlignment = 512;
constexpr int64_t kLarge = int64_t{1} << 20;

size_t block_size(size_t size_bytes) {
  const auto bytes = static_cast<int64_t>(std::max<size_t>(size_bytes, 1));
  return static_cast<size_t>(round_up(bytes, bytes >= kLarge ? kLarge : kSmallAlignment));
}

class CudaBuffer final : public Buffer {
 public:
  CudaBuffer(std::shared_ptr<CudaAllocator> allocator, int index, void* address, size_t size_bytes,
             size_t block_bytes)
      : Buffer(address, size_bytes),
        allocator_(std::move(allocator)),
        index_(index),
        block_bytes_(block_bytes) {}
  ~CudaBuffer() override { allocator_->release(address(), block_bytes_); }

 private:
  void map_host() override {
    throw DeviceError(concat("memory of cuda:", index_,
                             " is not visible to the host; copy it with copy_to_host or copy_from_host"));
  }
  void unmap_host() noexcept override {}

  std::shared_ptr<CudaAllocator> allocator_;
  int index_;
  size_t block_bytes_;
};

}  // namespace

CudaAllocator::~CudaAllocator() { drop_cache(); }

std::shared_ptr<Buffer> CudaAllocator::hand_out(void* address, size_t size_bytes, size_t block_bytes,
                                                const char* label) {
  holders_[address] = {label, block_bytes};
  stats_.in_use_bytes += static_cast<int64_t>(block_bytes);
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.in_use_bytes);
  return std::make_shared<CudaBuffer>(shared_from_this(), index_, address, size_bytes, block_bytes);
}

std::shared_ptr<Buffer> CudaAllocator::try_cached(size_t size_bytes, const char* label) {
  const size_t wanted = block_size(size_bytes);
  const std::lock_guard lock(mutex_);
  const auto it = free_blocks_.lower_bound(wanted);
  // As CpuAllocator: a near fit reuses everything that a step frees, and wastes at most a part in 64.
  if (it == free_blocks_.end() || it->first > wanted + wanted / 64) return nullptr;
  const auto [block_bytes, address] = *it;
  free_blocks_.erase(it);
  return hand_out(address, size_bytes, block_bytes, label);
}

// "'weights' 40 bytes in 2 buffers, ...": the four labels that hold most.
std::string CudaAllocator::largest_holders() const {
  struct Share {
    size_t bytes = 0;
    int64_t count = 0;
  };
  std::map<std::string, Share> by_label;
  for (const auto& [address, holder] : holders_) {
    Share& share = by_label[holder.label];
    share.bytes += holder.bytes;
    ++share.count;
  }
  std::vector<std::pair<std::string, Share>> shares(by_label.begin(), by_label.end());
  std::stable_sort(shares.begin(), shares.end(),
                   [](const auto& a, const auto& b) { return a.second.bytes > b.second.bytes; });
  if (shares.size() > 4) shares.resize(4);
  std::string text;
  for (const auto& [label, share] : shares)
    text += concat(text.empty() ? "" : ", ", "'", label, "' ", share.bytes, " bytes in ", share.count,
                   share.count == 1 ? " buffer" : " buffers");
  return text.empty() ? "none of this process" : text;
}

std::shared_ptr<Buffer> CudaAllocator::allocate(size_t size_bytes, const char* label) {
  const size_t block_bytes = block_size(size_bytes);
  const std::lock_guard lock(mutex_);
  const CudaDeviceScope scope(table_, index_);
  void* address = nullptr;
  PolyremeCudaStatus status = table_.allocate(block_bytes, &address);
  if (status.code != 0 && !free_blocks_.empty()) {
    drop_cache();
    status = table_.allocate(block_bytes, &address);
  }
  require<OutOfMemory>(
      status.code == 0, "out of memory on cuda:", index_, ": ", size_bytes, " bytes for '", label, "' with ",
      stats_.in_use_bytes, " bytes in use (peak ", stats_.peak_bytes, "), most of it by ", largest_holders(),
      "; use a smaller micro-batch, recompute, or a smaller model [cudaMalloc: ", status.text, "]");
  stats_.reserved_bytes += static_cast<int64_t>(block_bytes);
  return hand_out(address, size_bytes, block_bytes, label);
}

void CudaAllocator::release(void* address, size_t block_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  stats_.in_use_bytes -= static_cast<int64_t>(block_bytes);
  holders_.erase(address);
  free_blocks_.emplace(block_bytes, address);
}

void CudaAllocator::drop_cache() noexcept {
  for (const auto& [bytes, address] : free_blocks_) {
    stats_.reserved_bytes -= static_cast<int64_t>(bytes);
    table_.release(address);  // fails only where the device is lost, and its memory with it
  }
  free_blocks_.clear();
}

MemoryStats CudaAllocator::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void CudaAllocator::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak_bytes = stats_.in_use_bytes;
}

}  // namespace polyreme
