// Fused updates of flat buffers by AdamW, SGD and Lion: rules, order of operations and bits are those of
// csrc/ops/cpu/kernels/optimizer.h.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// In place; all arrays have update.count elements and share no byte. The 16-bit weight is the new parameter,
// rounded once; nothing is written where the scale is NaN. cudaErrorInvalidValue for another weight dtype
// than fp32, bf16 and fp16.
cudaError_t launch_adamw(const PolyremeAdamW& args, cudaStream_t stream);
cudaError_t launch_sgd(const PolyremeSgd& args, cudaStream_t stream);
cudaError_t launch_lion(const PolyremeLion& args, cudaStream_t stream);

}  // namespace polyreme::kernels
