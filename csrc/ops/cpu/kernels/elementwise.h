// Element-wise kernels on n contiguous elements, stored in any format; every output element is a pure
// function of its inputs. An output may be one of the inputs. Elements moved: add 2 in 1 out, add_to
// 2 in 1 out, gelu_forward 1 in 1 out, gelu_backward 2 in 1 out, cast 1 in 1 out.
#pragma once

#include <stdint.h>

#include "ops/cpu/kernels/element.h"

#define POLYREME_ELEMENTWISE_KERNELS(isa)                                               \
  namespace isa {                                                                       \
  void add(Element type, const void* x, const void* y, void* out, int64_t n);           \
  /* out += x in fp32 */                                                                \
  void add_to(Element type, const void* x, float* out, int64_t n);                      \
  void gelu_forward(Element type, const void* x, void* y, int64_t n);                   \
  void gelu_backward(Element type, const void* x, const void* dy, void* dx, int64_t n); \
  void cast(Element from_type, const void* from, Element to_type, void* to, int64_t n); \
  }

namespace polyreme::cpu {
POLYREME_ELEMENTWISE_KERNELS(avx2)
POLYREME_ELEMENTWISE_KERNELS(avx512)
}  // namespace polyreme::cpu

#undef POLYREME_ELEMENTWISE_KERNELS
