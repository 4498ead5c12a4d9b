// How operations reach the kernels of GPUs. An operation that has one asks gpu_stream() after its checks; the
// others throw NotAvailable there (as_cpu).
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <type_traits>
#include <vector>

#include "device/cuda/cuda_device.h"
#include "device/cuda/cuda_table.h"
#include "tensor/tensor.h"

namespace polyreme {

// The stream as one of a GPU; null if it is of the CPU.
inline CudaStream* gpu_stream(Stream& stream) { return dynamic_cast<CudaStream*>(&stream); }

// As kernels name it: base/dtype.h.
inline int32_t dtype_code(const Tensor& tensor) { return static_cast<int32_t>(tensor.dtype()); }

// A kernel of the table.
template <typename Args>
using Kernel = PolyremeCudaStatus (*PolyremeCudaTable::*)(const Args* args, void* stream);

// Enqueues what `issue` enqueues on the handle that it gets, and that touches `buffers` alone. Throws
// DeviceError if CUDA refuses.
void launch(CudaStream& stream, const char* op, std::vector<std::shared_ptr<Buffer>> buffers,
            const std::function<PolyremeCudaStatus(const PolyremeCudaTable& table, void* stream)>& issue);

// Enqueues a kernel that touches `tensors`; undefined ones are none.
template <typename Args>
void launch(CudaStream& stream, const char* op, std::initializer_list<Tensor> tensors, Kernel<Args> kernel,
            const std::type_identity_t<Args>& args) {
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (const Tensor& tensor : tensors)
    if (tensor.defined()) buffers.push_back(tensor.buffer());
  launch(stream, op, std::move(buffers),
         [&](const PolyremeCudaTable& table, void* handle) { return (table.*kernel)(&args, handle); });
}

// What kernels that check ids (kernels/ids.cuh) write: the index of the first bad one, and that id.
inline Tensor make_bad_id(CudaStream& stream) { return empty(stream.device(), DType::kI32, {2}, "bad id"); }
// Calls `refuse`, which throws, from a later synchronize() of the stream if what was enqueued has found a bad
// id.
void refuse_bad_id(CudaStream& stream, const Tensor& bad,
                   std::function<void(int64_t index, int32_t id)> refuse);

}  // namespace polyreme
