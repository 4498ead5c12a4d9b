#include "ops/cpu/kernels/sum_squares.h"

#include "ops/cpu/kernels/lanes.h"

namespace polyreme::cpu::POLYREME_ISA {
namespace {

POLYREME_INLINE void add_squares(__m256 x, __m256d& low, __m256d& high) {
  const __m256d x_low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
  const __m256d x_high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
  low += x_low * x_low;
  high += x_high * x_high;
}

}  // namespace

double sum_squares(const float* x, int64_t n) {
  __m256d s0 = _mm256_setzero_pd(), s1 = s0, s2 = s0, s3 = s0;
  for_lanes(n, [&](int64_t i, auto lanes) {
    const v16f a = load(x + i, lanes);
    add_squares(low_half(a), s0, s1);
    add_squares(high_half(a), s2, s3);
  });
  const __m256d s = (s0 + s2) + (s1 + s3);
  return (s[0] + s[2]) + (s[1] + s[3]);
}

}  // namespace polyreme::cpu::POLYREME_ISA
