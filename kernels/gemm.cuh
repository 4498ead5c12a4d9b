// A GEMM whose bits do not depend on how it is cut, for what cuBLASLt cannot promise: the CPU's bits
// (csrc/ops/ops.h), no claim to speed.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// c = (accumulate ? c : 0) + a x b, then + bias where there is one: one fp32 chain of fused multiply-adds
// over ascending k per element. a, b, c and bias may each be fp32, bf16 or fp16, strides are in elements; a
// narrow c is rounded once and cannot be accumulated into (cudaErrorInvalidValue).
cudaError_t launch_ordered_gemm(const PolyremeGemm& args, cudaStream_t stream);

}  // namespace polyreme::kernels
