// Dropout and normal numbers by Philox 4x32-10 (csrc/base/philox.h): the numbers, and the bits, are the
// CPU's.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// y[i] = x[i] * (word of element first_element + i >= threshold ? keep_scale : 0); its own backward. y may be
// x. cudaErrorInvalidValue for other dtypes than fp32, bf16 and fp16 and for negative numbers.
cudaError_t launch_dropout(const PolyremeDropout& args, cudaStream_t stream);
// out[i]: normal of mean 0, element first_element + i (Box-Muller 1958).
cudaError_t launch_fill_normal(const PolyremeFillNormal& args, cudaStream_t stream);
// y[i] = x[i], rounded up or down at random so that the mean is exact; element first_element + i.
cudaError_t launch_round_stochastic(const PolyremeRoundStochastic& args, cudaStream_t stream);

}  // namespace polyreme::kernels
