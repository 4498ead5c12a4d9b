#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/transport.h"
#include "device/cuda/cuda_device.h"
#include "tensor/tensor.h"

namespace polyreme {

// A tensor of a GPU in a call of a transport of the CPU.
struct StagedTensor {
  Tensor tensor;
  bool written = false;
};

// A call on tensors of a GPU, for a transport that works on memory of the host: several ranks may share a GPU
// then, which NCCL refuses. For tests: the host waits for the stream, and everything crosses the bus twice.
class StagedCall {
 public:
  // Copies the tensors to page-locked memory and waits for it. `memory` has their addresses: one tensor is
  // input and output, two are input and output, or they are the parts of an exchange in that order.
  StagedCall(CudaStream& stream, CallMemory memory, std::span<const StagedTensor> tensors);
  // The same call on the copies.
  const CallMemory& memory() const { return memory_; }
  // Enqueues the way back.
  void copy_back();

 private:
  CudaStream& stream_;
  CallMemory memory_;
  std::vector<StagedTensor> tensors_;
  std::vector<std::shared_ptr<Buffer>> copies_;  // of tensors_
};

// The call of a group of one rank, which moves at most its input to its output.
void enqueue_alone(CudaStream& stream, std::span<const StagedTensor> tensors);

}  // namespace polyreme
