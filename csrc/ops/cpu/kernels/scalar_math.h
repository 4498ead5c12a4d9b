// log, exp, sine and cosine in double from written-out IEEE operations: their bits do not depend on the
// machine's libm. Error below 2e-16 relative or absolute, far inside what rounding to fp32 keeps.
// Branch-free, so that the compiler may vectorise loops over them.
#pragma once

#include <stdint.h>

#include "ops/cpu/kernels/vec.h"

namespace polyreme::cpu::POLYREME_ISA {

// For positive, normal, finite x. x = 2^e m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s) with
// s = (m - 1) / (m + 1), |s| < 0.1716, by its Taylor series.
POLYREME_INLINE double log_double(double x) {
  union {
    double value;
    int64_t bits;
  } m = {x};
  const int64_t e = (m.bits - 0x3fe6a09e667f3bcd) >> 52;
  m.bits -= e << 52;
  const double s = (m.value - 1.0) / (m.value + 1.0);
  const double z = s * s;
  double p = 1.0 / 19;
  p = p * z + 1.0 / 17;
  p = p * z + 1.0 / 15;
  p = p * z + 1.0 / 13;
  p = p * z + 1.0 / 11;
  p = p * z + 1.0 / 9;
  p = p * z + 1.0 / 7;
  p = p * z + 1.0 / 5;
  p = p * z + 1.0 / 3;
  const double twice = s + s;
  return static_cast<double>(static_cast<int32_t>(e)) * 0.6931471805599453 + (twice + twice * (p * z));
}

// For |x| < 700. x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts; exp(r) by its Taylor series.
POLYREME_INLINE double exp_double(double x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to the nearest integer
  const double shifted = x * 1.4426950408889634 + magic;
  const double n = shifted - magic;
  const double r = (x - n * 0.6931471805598903) - n * 5.497923018708371e-14;
  double p = 1.0 / 6227020800;
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  union {
    int64_t bits;
    double value;
  } power = {(static_cast<int64_t>(static_cast<int32_t>(n)) + 1023) << 52};
  return p * power.value;
}

struct SinCos {
  double sin, cos;
};

// Sine and cosine of 2 pi turns / 2^32. The nearest quarter turn is split off in integers, exactly;
// what is left, at most pi/4, goes through the Taylor series.
POLYREME_INLINE SinCos sin_cos_turns(uint32_t turns) {
  const uint32_t quarter = (turns + 0x20000000u) >> 30;
  const int32_t rest = static_cast<int32_t>(turns - (quarter << 30));
  const double x = rest * 1.4629180792671596e-09;  // 2 pi / 2^32
  const double z = x * x;
  double s = -1.0 / 1307674368000;
  s = s * z + 1.0 / 6227020800;
  s = s * z - 1.0 / 39916800;
  s = s * z + 1.0 / 362880;
  s = s * z - 1.0 / 5040;
  s = s * z + 1.0 / 120;
  s = s * z - 1.0 / 6;
  s = x + x * (s * z);
  double c = 1.0 / 20922789888000;
  c = c * z - 1.0 / 87178291200;
  c = c * z + 1.0 / 479001600;
  c = c * z - 1.0 / 3628800;
  c = c * z + 1.0 / 40320;
  c = c * z - 1.0 / 720;
  c = c * z + 1.0 / 24;
  c = c * z - 0.5;
  c = 1.0 + c * z;
  const double sin_magnitude = (quarter & 1) != 0 ? c : s;
  const double cos_magnitude = (quarter & 1) != 0 ? s : c;
  return {(quarter & 2) != 0 ? -sin_magnitude : sin_magnitude,
          ((quarter + 1) & 2) != 0 ? -cos_magnitude : cos_magnitude};
}

}  // namespace polyreme::cpu::POLYREME_ISA
