#pragma once

#include "device/cpu/cpu_device.h"
#include "tensor/access.h"

namespace polyreme {

// The kernel of the level that the device runs at.
template <typename Function>
Function* pick(Isa isa, Function* avx2, Function* avx512) {
  return isa == Isa::kAvx512 ? avx512 : avx2;
}

}  // namespace polyreme
