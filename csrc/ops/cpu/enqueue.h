#pragma once

#include "device/cpu/cpu_device.h"
#include "tensor/access.h"

namespace polyreme {

// The kernel of the level that the device runs at; amx has kernels of its own for products of bf16 alone.
template <typename Function>
Function* pick(Isa isa, Function* avx2, Function* avx512) {
  return isa == Isa::kAvx2 ? avx2 : avx512;
}

}  // namespace polyreme
