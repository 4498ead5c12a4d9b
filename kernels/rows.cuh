// Sums over rows as chains: out[c] = ((out[c] + x[0, c]) + x[1, c]) + ..., so that cutting the rows into
// micro-batches changes no bit; the bits are the CPU's (csrc/ops/ops.h).
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// out [cols] += rows of x [rows, cols]. Bias gradients.
cudaError_t launch_accumulate_rows(const PolyremeAccumulateRows& args, cudaStream_t stream);
// out[r] = x[r] + table[r % period], rounded once; out may be x.
cudaError_t launch_add_rows(const PolyremeAddRows& args, cudaStream_t stream);
// dgamma += dy * xhat, dbeta += dy with xhat = (x - mean) * rstd; RMSNorm: mean and dbeta null.
cudaError_t launch_norm_backward_weight(const PolyremeNormBackwardWeight& args, cudaStream_t stream);

}  // namespace polyreme::kernels
