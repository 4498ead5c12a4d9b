#include "comm/staged.h"

#include "base/error.h"
#include "device/cuda/cuda_table.h"

namespace polyreme {
namespace {

class PinnedBuffer final : public Buffer {
 public:
  PinnedBuffer(std::shared_ptr<void> memory, size_t size_bytes)
      : Buffer(memory.get(), size_bytes), memory_(std::move(memory)) {}

 private:
  void map_host() override {}
  void unmap_host() noexcept override {}
  std::shared_ptr<void> memory_;
};

void enqueue_copy(CudaStream& stream, std::vector<std::shared_ptr<Buffer>> buffers, void* to,
                  const void* from, int64_t size_bytes) {
  if (size_bytes == 0) return;
  const CudaDevice& device = as_cuda(stream.device());
  stream.enqueue(std::move(buffers), [&](void* handle) {
    const PolyremeCudaStatus status =
        device.table().copy(to, from, static_cast<uint64_t>(size_bytes), handle);
    require<DeviceError>(status.code == 0, "cuda:", device.index(), ": cudaMemcpyAsync of ", size_bytes,
                         " bytes failed: ", status.text);
  });
}

}  // namespace

StagedCall::StagedCall(CudaStream& stream, CallMemory memory, std::span<const StagedTensor> tensors)
    : stream_(stream), memory_(std::move(memory)), tensors_(tensors.begin(), tensors.end()) {
  CudaDevice& device = as_cuda(stream.device());
  for (const auto& [tensor, written] : tensors_) {
    const auto size_bytes = static_cast<size_t>(tensor.size_bytes());
    copies_.push_back(
        std::make_shared<PinnedBuffer>(allocate_pinned(device, std::max<size_t>(size_bytes, 1)), size_bytes));
    enqueue_copy(stream, {tensor.buffer(), copies_.back()}, copies_.back()->address(), tensor.raw_address(),
                 tensor.size_bytes());
  }
  stream.synchronize();
  for (size_t i = 0; i < memory_.parts.size(); ++i) memory_.parts[i].data = copies_[i]->address();
  if (!memory_.parts.empty() || copies_.empty()) return;
  memory_.input = copies_.front()->address();
  memory_.output = copies_.back()->address();
}

void StagedCall::copy_back() {
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (const auto& [tensor, written] = tensors_[i]; written)
      enqueue_copy(stream_, {tensor.buffer(), copies_[i]}, tensor.raw_address(), copies_[i]->address(),
                   tensor.size_bytes());
}

void enqueue_alone(CudaStream& stream, std::span<const StagedTensor> tensors) {
  if (tensors.size() != 2 || tensors[0].tensor.raw_address() == tensors[1].tensor.raw_address()) return;
  const Tensor &input = tensors[0].tensor, &output = tensors[1].tensor;
  enqueue_copy(stream, {input.buffer(), output.buffer()}, output.raw_address(), input.raw_address(),
               output.size_bytes());
}

}  // namespace polyreme
