// Sums whose bits do not depend on any order: squared norms, exact sums, and the factor that clips gradients.
// Limbs are those of ExactSum (csrc/base/exact_sum.h), int64 [ExactSum::kLimbs]; sums are added to what they
// hold, and they are canonical afterwards, so they equal the CPU's limb by limb.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// In one pass over `grad`, as asked for: grad *= scale[0]; overflow[0] = 1 if a number (after that) is
// infinite or NaN, untouched otherwise; limbs += the squares, summed in fp64 over blocks of kNormBlock
// (csrc/ops/ops.h) in the order of the CPU's exact_sum_squares, blocks exactly. grad must begin at a multiple
// of kNormBlock elements of the whole parameter, or blocks differ.
cudaError_t launch_gradient_norm(const PolyremeGradientNorm& args, cudaStream_t stream);
// limbs += every x. count below 2^30.
cudaError_t launch_exact_sum(const PolyremeExactSum& args, cudaStream_t stream);
// scale[0] as clip_scale of csrc/ops/update.h for p = 2.
cudaError_t launch_clip_scale(const PolyremeClipScale& args, cudaStream_t stream);

}  // namespace polyreme::kernels
