#pragma once

#include "device/cpu/cpu_device.h"
#include "tensor/tensor.h"

namespace polyreme {

inline Access reads(const Tensor& t) { return {t.buffer(), t.begin_byte(), t.end_byte(), false}; }
inline Access writes(const Tensor& t) { return {t.buffer(), t.begin_byte(), t.end_byte(), true}; }

// The kernel of the level that the device runs at.
template <typename Function>
Function* pick(Isa isa, Function* avx2, Function* avx512) {
  return isa == Isa::kAvx512 ? avx512 : avx2;
}

}  // namespace polyreme
