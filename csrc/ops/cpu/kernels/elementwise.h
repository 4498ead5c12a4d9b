// Element-wise kernels on n contiguous floats: fp32 throughout, every output element a pure function
// of its inputs. An output may be one of the inputs. Bytes moved per element: add 8 in 4 out,
// gelu_forward 4 in 4 out, gelu_backward 8 in 4 out.
#pragma once

#include <stdint.h>

#define POLYREME_ELEMENTWISE_KERNELS(isa)                                    \
  namespace isa {                                                            \
  void add(const float* x, const float* y, float* out, int64_t n);           \
  void gelu_forward(const float* x, float* y, int64_t n);                    \
  void gelu_backward(const float* x, const float* dy, float* dx, int64_t n); \
  }

namespace polyreme::cpu {
POLYREME_ELEMENTWISE_KERNELS(avx2)
POLYREME_ELEMENTWISE_KERNELS(avx512)
}  // namespace polyreme::cpu

#undef POLYREME_ELEMENTWISE_KERNELS
