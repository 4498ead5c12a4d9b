// Sums of a warp in the order of the CPU's sixteen virtual lanes (csrc/ops/cpu/kernels/lanes.h): a sum over a
// row has 16 * chains accumulators, element i goes to accumulator i % (16 * chains) in ascending order, and
// they are added pairwise: a with a + half of them, until one is left. Lane a of a warp holds accumulator a
// (and a + 32 of 64), so that these are the shuffles by 16, 8, 4, 2, 1; additions commute, so every lane gets
// the sum.
#pragma once

#include "kernels/launch.h"

namespace polyreme::kernels {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffff;

template <typename T>
__device__ T warp_sum(T value) {
#pragma unroll
  for (int by = kWarp / 2; by > 0; by /= 2) value = value + __shfl_xor_sync(kAllLanes, value, by);
  return value;
}

// The largest value; NaN is passed over where others are there.
__device__ inline float warp_max(float value) {
#pragma unroll
  for (int by = kWarp / 2; by > 0; by /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, value, by);
    value = other > value || value != value ? other : value;
  }
  return value;
}

}  // namespace polyreme::kernels
