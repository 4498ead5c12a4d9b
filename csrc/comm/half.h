#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace polyreme {

// `count` float16 or bfloat16 numbers as float32: exact.
void widen(DType from, const void* in, int64_t count, float* out);
// float32 numbers as float16 or bfloat16: to nearest, ties to even; what is too large becomes infinite;
// subnormal numbers are kept; NaN stays NaN.
void narrow(DType to, const float* in, int64_t count, void* out);

}  // namespace polyreme
