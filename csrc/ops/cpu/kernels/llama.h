// Rotary position embedding and SwiGLU, on contiguous rows of elements of any format; fp32 inside.
// Bytes moved: rotary, one read and one write of what it rotates; SwiGLU forward 2 in 1 out, backward 3 in 2
// out, in elements of the output.
#pragma once

#include <stdint.h>

#include "ops/cpu/kernels/element.h"

#define POLYREME_LLAMA_KERNELS(isa)                                                           \
  namespace isa {                                                                             \
  void rotary(const Rotary& args, int64_t first_position, int64_t end_position, float* turn); \
  void swiglu_forward(const SwiGlu& args, int64_t first_row, int64_t end_row);                \
  void swiglu_backward(const SwiGlu& args, int64_t first_row, int64_t end_row);               \
  }

namespace polyreme::cpu {

// y = x, [samples, seq, groups, group_heads, head_dim], with the pair (i, i + head_dim / 2) of some heads
// turned by position * theta^(-2 i / head_dim) radians, backwards if `inverse`. `turn`: head_dim floats of
// scratch.
struct Rotary {
  int64_t samples, seq, groups, group_heads;
  int64_t heads;     // of each group that are turned: the first ones
  int64_t head_dim;  // even
  double theta;
  bool inverse;
  Element type;
  const void* x;
  void* y;  // may be x
};

// Rows of x and dx are gate | up, `cols` elements each. y = silu(gate) * up with silu(g) = g / (1 + exp(-g)).
struct SwiGlu {
  int64_t cols;
  Element type;    // of all
  const void* x;   // [rows, 2 cols]
  void* y;         // [rows, cols]; forward
  const void* dy;  // [rows, cols]; backward
  void* dx;        // [rows, 2 cols]; backward; may be x
};

POLYREME_LLAMA_KERNELS(avx2)
POLYREME_LLAMA_KERNELS(avx512)
}  // namespace polyreme::cpu

#undef POLYREME_LLAMA_KERNELS
