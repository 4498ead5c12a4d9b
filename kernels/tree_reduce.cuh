// Reduces terms in the balanced binary tree of csrc/comm/tree.h, element by element: the local step of
// ordered collectives on GPUs.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/cuda_table.h"

namespace polyreme::kernels {

// Terms of more ranks do not fit the registers that hold the open subtrees.
inline constexpr int kMaxTreeTerms = 4096;

// out[i] = the tree over the terms' elements i; sum and average, product, max, min. All dtypes; float16 and
// bfloat16 are reduced in float32 and rounded once; integers wrap around; of two zeros of different sign, max
// and min take the later term; a NaN is passed on, its payload may differ from the CPU's. bool: sum and max
// are "any", product and min "all". `out` may be one of the terms.
// cudaErrorInvalidValue for anything else: an average of integers or bool, no terms, or more than
// kMaxTreeTerms.
cudaError_t launch_tree_reduce(const PolyremeTreeReduce& reduction, cudaStream_t stream);

}  // namespace polyreme::kernels
