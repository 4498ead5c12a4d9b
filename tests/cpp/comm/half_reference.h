#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/dtype.h"

namespace polyreme {

// float16 and bfloat16 by their definition, slowly, and without sharing a thought with comm/half.cpp: a table
// of the values of all non-negative bit patterns, and a search in it.
class HalfReference {
 public:
  static const HalfReference& of(DType dtype) {
    static const HalfReference bf16(7, 127), f16(10, 15);
    return dtype == DType::kBF16 ? bf16 : f16;
  }

  double decode(uint16_t bits) const {
    const uint16_t magnitude = bits & 0x7fff;
    if (magnitude > infinity_) return std::numeric_limits<double>::quiet_NaN();
    if (magnitude == infinity_) return bits & 0x8000 ? -HUGE_VAL : HUGE_VAL;
    return bits & 0x8000 ? -values_[magnitude] : values_[magnitude];
  }
  // To nearest, ties to the even pattern; NaN gives one.
  uint16_t encode(double value) const {
    if (std::isnan(value)) return static_cast<uint16_t>(0x7fff);
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    const auto above = std::lower_bound(values_.begin(), values_.end(), magnitude);
    if (above == values_.end()) return sign | infinity_;
    auto at = static_cast<uint16_t>(above - values_.begin());
    if (at > 0) {
      const double up = values_[at] - magnitude, down = magnitude - values_[at - 1u];
      if (down < up || (down == up && at % 2 == 1)) --at;
    }
    return sign | at;
  }
  bool is_nan(uint16_t bits) const { return (bits & 0x7fff) > infinity_; }

 private:
  // The pattern of infinity counts as the next power of two here: what is nearer to it overflows.
  HalfReference(int mantissa_bits, int bias) {
    const int steps = 1 << mantissa_bits;
    infinity_ = static_cast<uint16_t>(0x8000 - steps);
    for (int bits = 0; bits <= infinity_; ++bits) {
      const int exponent = bits / steps, mantissa = bits % steps;
      values_.push_back(std::ldexp(exponent == 0 ? mantissa : steps + mantissa,
                                   std::max(exponent, 1) - bias - mantissa_bits));
    }
  }

  std::vector<double> values_;
  uint16_t infinity_ = 0;
};

}  // namespace polyreme
