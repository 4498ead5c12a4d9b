// The sum of squares of fp32 numbers: sixteen lanes of double, element i in lane i % 16, one tree at the end.
// A square of an fp32 number is exact in double, so that a fused addition has the same bits.
#pragma once

#include "ops/cpu/kernels/lanes.h"

namespace polyreme::cpu::POLYREME_ISA {

struct SquareSum {
  __m256d s[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
};

POLYREME_INLINE void add_half_squares(__m256 x, __m256d& low, __m256d& high) {
  const __m256d x_low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
  const __m256d x_high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
  low = _mm256_fmadd_pd(x_low, x_low, low);
  high = _mm256_fmadd_pd(x_high, x_high, high);
}

POLYREME_INLINE void add_squares(SquareSum& sum, v16f x) {
  add_half_squares(low_half(x), sum.s[0], sum.s[1]);
  add_half_squares(high_half(x), sum.s[2], sum.s[3]);
}

POLYREME_INLINE double total(const SquareSum& sum) {
  const __m256d s = (sum.s[0] + sum.s[2]) + (sum.s[1] + sum.s[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}

}  // namespace polyreme::cpu::POLYREME_ISA
