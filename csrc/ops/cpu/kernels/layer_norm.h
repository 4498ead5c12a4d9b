// LayerNorm and sums over rows, on contiguous rows of elements of any format; fp32 inside.
//
// Sums along a row use four (two for backward) chains of sixteen lanes, vector j of the row in chain
// j % 4, and one tree at the end: fp32, 64 partial sums. Sums over rows are one fp32 chain per
// column in ascending order. Elements moved, the row being in the L1 cache after its first pass:
// forward 1 in 1 out, backward_input 2 in 1 out, backward_weight 2 in, accumulate_rows 1 in.
#pragma once

#include <stdint.h>

#include "ops/cpu/kernels/element.h"

#define POLYREME_LAYER_NORM_KERNELS(isa)                                                                  \
  namespace isa {                                                                                         \
  void layer_norm_forward(const LayerNormForward& args, int64_t first_row, int64_t end_row);              \
  void layer_norm_backward_input(const LayerNormBackwardInput& args, int64_t first_row, int64_t end_row); \
  void layer_norm_backward_weight(const LayerNormBackwardWeight& args, int64_t first_column,              \
                                  int64_t end_column);                                                    \
  void accumulate_rows(const AccumulateRows& args, int64_t first_column, int64_t end_column);             \
  }

namespace polyreme::cpu {

// y = (x - mean) * rstd * gamma + beta with rstd = 1 / sqrt(variance + eps).
struct LayerNormForward {
  int64_t cols;
  Element type;        // of x and y
  const void* x;       // [rows, cols]
  const float* gamma;  // [cols]
  const float* beta;   // [cols]
  float eps;
  void* y;      // [rows, cols]; may be x
  float* mean;  // [rows]
  float* rstd;  // [rows]
};

// dx = rstd * (g - avg(g) - xhat * avg(g * xhat)) with g = dy * gamma, xhat = (x - mean) * rstd.
struct LayerNormBackwardInput {
  int64_t cols;
  Element type;        // of dy, x and dx
  const void* dy;      // [rows, cols]
  const void* x;       // [rows, cols]
  const float* gamma;  // [cols]
  const float* mean;   // [rows]
  const float* rstd;   // [rows]
  void* dx;            // [rows, cols]; may be dy or x
};

// dgamma[c] = fma(dy[r, c], xhat[r, c], dgamma[c]) and dbeta[c] += dy[r, c], row after row.
struct LayerNormBackwardWeight {
  int64_t rows, cols;
  Element type;       // of dy and x
  const void* dy;     // [rows, cols]
  const void* x;      // [rows, cols]
  const float* mean;  // [rows]
  const float* rstd;  // [rows]
  float* dgamma;      // [cols]
  float* dbeta;       // [cols]
};

// out[c] += x[r, c], row after row.
struct AccumulateRows {
  int64_t rows, cols;
  Element type;   // of x
  const void* x;  // [rows, cols]
  float* out;     // [cols]
};

POLYREME_LAYER_NORM_KERNELS(avx2)
POLYREME_LAYER_NORM_KERNELS(avx512)
}  // namespace polyreme::cpu

#undef POLYREME_LAYER_NORM_KERNELS
