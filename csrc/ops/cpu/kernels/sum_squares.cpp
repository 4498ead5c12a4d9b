#include "ops/cpu/kernels/sum_squares.h"

#include "ops/cpu/kernels/square_sum.h"

namespace polyreme::cpu::POLYREME_ISA {

double sum_squares(const float* x, int64_t n) {
  SquareSum sum;
  for_lanes(n, [&](int64_t i, auto lanes) { add_squares(sum, load(x + i, lanes)); });
  return total(sum);
}

}  // namespace polyreme::cpu::POLYREME_ISA
