// The sums of squares of blocks of kNormBlock elements, in the CPU's order
// (csrc/ops/cpu/kernels/square_sum.h): four threads hold the sixteen accumulators of a block, thread q those
// of lanes 4 q to 4 q + 3.
#pragma once

#include "kernels/launch.h"
#include "kernels/warp.cuh"

namespace polyreme::kernels {

using Limb = unsigned long long;  // of exact.cuh, for atomics
inline constexpr int kNormBlock = 1024;
inline constexpr int kThreadsOfBlock = 4;
inline constexpr int kBlocksAtOnce = kThreads / kThreadsOfBlock;
inline constexpr int kStep = 16;  // elements of one step of a block

// All sixteen, added as the CPU adds them; to be called by whole warps.
__device__ inline double add_accumulators(double (&sum)[4]) {
#pragma unroll
  for (int by = 2; by > 0; by /= 2) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] = sum[e] + __shfl_xor_sync(kAllLanes, sum[e], by);
  }
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

}  // namespace polyreme::kernels
