// RMSNorm on contiguous rows of elements of any format; fp32 inside.
//
// Sums along a row use four (two for backward) chains of sixteen lanes, vector j of the row in chain
// j % 4, and one tree at the end. The sum over rows is one fp32 chain per column in ascending order. Elements
// moved, the row being in the L1 cache after its first pass: forward 1 in 1 out, backward_input 2 in 1 out,
// backward_weight 2 in.
#pragma once

#include <stdint.h>

#include "ops/cpu/kernels/element.h"

#define POLYREME_RMS_NORM_KERNELS(isa)                                                                \
  namespace isa {                                                                                     \
  void rms_norm_forward(const RmsNormForward& args, int64_t first_row, int64_t end_row);              \
  void rms_norm_backward_input(const RmsNormBackwardInput& args, int64_t first_row, int64_t end_row); \
  void rms_norm_backward_weight(const RmsNormBackwardWeight& args, int64_t first_column,              \
                                int64_t end_column);                                                  \
  }

namespace polyreme::cpu {

// y = x * rstd * gamma with rstd = 1 / sqrt(average of x^2 + eps).
struct RmsNormForward {
  int64_t cols;
  Element type;        // of x and y
  const void* x;       // [rows, cols]
  const float* gamma;  // [cols]
  float eps;
  void* y;      // [rows, cols]; may be x
  float* rstd;  // [rows]
};

// dx = rstd * (g - xhat * avg(g * xhat)) with g = dy * gamma, xhat = x * rstd.
struct RmsNormBackwardInput {
  int64_t cols;
  Element type;        // of dy, x and dx
  const void* dy;      // [rows, cols]
  const void* x;       // [rows, cols]
  const float* gamma;  // [cols]
  const float* rstd;   // [rows]
  void* dx;            // [rows, cols]; may be dy or x
};

// dgamma[c] = fma(dy[r, c], xhat[r, c], dgamma[c]), row after row.
struct RmsNormBackwardWeight {
  int64_t rows, cols;
  Element type;       // of dy and x
  const void* dy;     // [rows, cols]
  const void* x;      // [rows, cols]
  const float* rstd;  // [rows]
  float* dgamma;      // [cols]
};

POLYREME_RMS_NORM_KERNELS(avx2)
POLYREME_RMS_NORM_KERNELS(avx512)
}  // namespace polyreme::cpu

#undef POLYREME_RMS_NORM_KERNELS
