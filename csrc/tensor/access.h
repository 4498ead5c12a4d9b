#pragma once

#include "device/cpu/cpu_device.h"
#include "tensor/tensor.h"

namespace polyreme {

// What an operation declares of a tensor that it reads, or writes.
inline Access reads(const Tensor& t) { return {t.buffer(), t.begin_byte(), t.end_byte(), false}; }
inline Access writes(const Tensor& t) { return {t.buffer(), t.begin_byte(), t.end_byte(), true}; }

}  // namespace polyreme
