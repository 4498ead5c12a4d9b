// Sums of squares of blocks of fp32: sixteen lanes of double, element i in lane i % 16, one tree at
// the end. A square of an fp32 number is exact in double. 4 bytes in per element.
#pragma once

#include <stdint.h>

#define POLYREME_SUM_SQUARES_KERNELS(isa)        \
  namespace isa {                                \
  double sum_squares(const float* x, int64_t n); \
  }

namespace polyreme::cpu {
POLYREME_SUM_SQUARES_KERNELS(avx2)
POLYREME_SUM_SQUARES_KERNELS(avx512)
}  // namespace polyreme::cpu

#undef POLYREME_SUM_SQUARES_KERNELS
