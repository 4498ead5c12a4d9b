#pragma once

#include <cstring>

#include "device/cuda/cuda_device.h"
#include "tensor/tensor.h"

namespace polyreme::conformance {

// Where the host cannot map the memory of the device (GPUs), the stream in which this thread copies.
inline thread_local Stream* copy_stream = nullptr;

// All of a contiguous tensor. On CPUs nothing may be in flight that touches it; on GPUs what the copy stream
// does not wait for.
inline void write_bytes(const Tensor& tensor, const void* from) {
  if (tensor.numel() == 0) return;
  if (copy_stream != nullptr) {
    copy_from_host(tensor.buffer(), tensor.begin_byte(), from, tensor.size_bytes(), *copy_stream);
    return copy_stream->synchronize();
  }
  const HostMapping mapping(tensor.buffer());
  std::memcpy(tensor.raw_address(), from, static_cast<size_t>(tensor.size_bytes()));
}
inline void read_bytes(const Tensor& tensor, void* to) {
  if (tensor.numel() == 0) return;
  if (copy_stream != nullptr) {
    copy_to_host(to, tensor.buffer(), tensor.begin_byte(), tensor.size_bytes(), *copy_stream);
    return copy_stream->synchronize();
  }
  const HostMapping mapping(tensor.buffer());
  std::memcpy(to, tensor.raw_address(), static_cast<size_t>(tensor.size_bytes()));
}

}  // namespace polyreme::conformance
