// Kernels that draw from a counter-based stream (base/philox.h). Element e of the stream is a pure
// function of the key and e: it uses block e / 4, sixteen blocks (64 elements) at a time.
//
// dropout: y[i] = x[i] * (word e % 4 of the block >= threshold ? keep_scale : 0), e = first_element + i.
//   Stored in any format, 1 element in, 1 out. y may be x.
// fill_normal: Box-Muller (1958) in double on the word pairs (0, 1) and (2, 3) of the block: with
//   u = (first word + 1/2) / 2^32 and v = second word / 2^32, elements e % 4 = 0 and 2 are
//   sqrt(-2 ln u) cos(2 pi v), elements 1 and 3 the same with sin; times std, rounded once to fp32.
//   4 bytes out.
#pragma once

#include <stdint.h>

#include "base/philox.h"
#include "ops/cpu/kernels/element.h"

#define POLYREME_RANDOM_KERNELS(isa)                                                                \
  namespace isa {                                                                                   \
  void dropout(Element type, const void* x, void* y, int64_t n, const RandomKey& key,               \
               uint64_t first_element, DropoutRule rule);                                           \
  void fill_normal(float* out, int64_t n, const RandomKey& key, uint64_t first_element, float std); \
  }

namespace polyreme::cpu {

struct DropoutRule {
  uint32_t threshold;
  float keep_scale;
};

POLYREME_RANDOM_KERNELS(avx2)
POLYREME_RANDOM_KERNELS(avx512)
}  // namespace polyreme::cpu

#undef POLYREME_RANDOM_KERNELS
