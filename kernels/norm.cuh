// LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019) over rows of any length. Statistics are
// fp32, with the bits of the CPU's LayerNorm (csrc/ops/cpu/kernels/layer_norm.h). Weight gradients: rows.cuh.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// LayerNorm: y = (x - mean) * rstd * gamma + beta, mean and rstd [rows] are written. RMSNorm (mean and beta
// null): y = x * rstd * gamma with rstd = 1 / sqrt(mean(x^2) + eps). y may be x. gamma and beta are fp32 or
// of x's dtype; anything else is cudaErrorInvalidValue.
cudaError_t launch_norm_forward(const PolyremeNormForward& args, cudaStream_t stream);
// dx from dy and the saved statistics; it may be dy or x.
cudaError_t launch_norm_backward_input(const PolyremeNormBackwardInput& args, cudaStream_t stream);

}  // namespace polyreme::kernels
