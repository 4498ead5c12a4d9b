// Elementary functions from written-out operations, with the bits of the CPU's: csrc/ops/cpu/kernels/vec.h
// and scalar_math.h say what they are and how exact. An fma is one only where it is written.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/launch.h"

namespace polyreme::kernels {

__device__ inline float infinity() { return __int_as_float(0x7f800000); }
__device__ inline float quiet_nan() { return __int_as_float(0x7fc00000); }

// exp(x) in fp32: vec.h.
__device__ inline float exp_f32(float x) {
  const float magic = 12582912.0f;
  const float n = fmaf(x, 1.44269504088896341f, magic) - magic;
  float r = fmaf(-n, 0.693359375f, x);
  r = fmaf(n, 2.12194440e-4f, r);
  float p = fmaf(1.9875691500e-4f, r, 1.3981999507e-3f);
  p = fmaf(p, r, 8.3334519073e-3f);
  p = fmaf(p, r, 4.1665795894e-2f);
  p = fmaf(p, r, 1.6666665459e-1f);
  p = fmaf(p, r, 5.0000001201e-1f);
  p = fmaf(p, r * r, r) + 1.0f;
  const auto shifted = static_cast<uint32_t>(__float2int_rn(n)) << 23;
  float y = __int_as_float(static_cast<int>(static_cast<uint32_t>(__float_as_int(p)) + shifted));
  y = x < -87.336540f ? 0.0f : y;
  return x > 0x1.62e42ep+6f ? infinity() : y;
}

// log(x) in fp32: vec.h.
__device__ inline float log_f32(float x) {
  const auto offset = static_cast<int32_t>(static_cast<uint32_t>(__float_as_int(x)) - 0x3f3504f3u);
  const auto e = static_cast<float>(offset >> 23);
  const float m = __int_as_float((offset & 0x007fffff) + 0x3f3504f3);
  const float f = m - 1.0f;
  const float z = f * f;
  float p = fmaf(7.0376836292e-2f, f, -1.1514610310e-1f);
  p = fmaf(p, f, 1.1676998740e-1f);
  p = fmaf(p, f, -1.2420140846e-1f);
  p = fmaf(p, f, 1.4249322787e-1f);
  p = fmaf(p, f, -1.6668057665e-1f);
  p = fmaf(p, f, 2.0000714765e-1f);
  p = fmaf(p, f, -2.4999993993e-1f);
  p = fmaf(p, f, 3.3333331174e-1f);
  p = p * z * f;
  p = fmaf(e, -2.12194440e-4f, p);
  p = fmaf(-0.5f, z, p);
  float y = fmaf(e, 0.693359375f, f + p);
  y = x < 1.17549435e-38f ? -infinity() : y;
  y = x < 0.0f ? quiet_nan() : y;
  return x == infinity() || x != x ? x : y;
}

// log(x) in fp64 for positive, normal, finite x: scalar_math.h.
__device__ inline double log_f64(double x) {
  int64_t bits = __double_as_longlong(x);
  const int64_t e = (bits - 0x3fe6a09e667f3bcd) >> 52;
  bits -= e << 52;
  const double m = __longlong_as_double(bits);
  const double s = (m - 1.0) / (m + 1.0);
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

// exp(x) in fp64 for |x| < 700: scalar_math.h.
__device__ inline double exp_f64(double x) {
  const double magic = 6755399441055744.0;
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
  return p * __longlong_as_double((static_cast<int64_t>(static_cast<int32_t>(n)) + 1023) << 52);
}

struct SinCos {
  double sin, cos;
};
// Sine and cosine of 2 pi turns / 2^32: scalar_math.h.
__device__ inline SinCos sin_cos_turns(uint32_t turns) {
  const uint32_t quarter = (turns + 0x20000000u) >> 30;
  const auto rest = static_cast<int32_t>(turns - (quarter << 30));
  const double x = rest * 1.4629180792671596e-09;
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

}  // namespace polyreme::kernels
