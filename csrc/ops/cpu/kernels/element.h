// How activations and parameters are stored. Arithmetic on them is fp32: kernels widen on load, exactly, and
// round once on store, to nearest, ties to even.
// No inline functions here: this header is included by code of every instruction-set level.
#pragma once

#include <stdint.h>

namespace polyreme::cpu {

enum class Element : uint8_t { kF32, kBF16, kF16 };

// One stored element, so that overloads can tell the formats apart.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

}  // namespace polyreme::cpu
