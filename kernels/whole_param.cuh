// Updates of an element that depend on its whole parameter, LAMB and Muon: rules, order of operations and
// bits are those of csrc/ops/update.h and csrc/ops/cpu/kernels/optimizer.h. What is multiplied with matrices
// goes through gemm.cuh.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// m and v as AdamW has them; sums += the squares of the parameter and of LAMB's direction. Nothing is written
// where the scale is NaN.
cudaError_t launch_lamb_moments(const PolyremeLamb& args, cudaStream_t stream);
// param -= lr * (|param| / |direction|) * direction, with the norms from `sums`; the ratio is 1 where one of
// them is 0.
cudaError_t launch_lamb_apply(const PolyremeLamb& args, cudaStream_t stream);
// m += new_m * (g - m); out = g + momentum * (m - g); out = 0 and m as it was where the scale is NaN.
cudaError_t launch_muon_momentum(const PolyremeMomentum& args, cudaStream_t stream);
// out = a x + b y.
cudaError_t launch_weighted_sum(const PolyremeWeightedSum& args, cudaStream_t stream);

}  // namespace polyreme::kernels
