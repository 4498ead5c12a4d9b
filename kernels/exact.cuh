// ExactSum of csrc/base/exact_sum.h on the GPU: its comments define digits and limbs. Integer additions have
// no order, so atomics may add them.
#pragma once

#include "kernels/launch.h"
#include "kernels/math.cuh"

namespace polyreme::kernels::exact {

inline constexpr int kDigits = 68;
inline constexpr int kLimbs = kDigits + 3;
inline constexpr int kNan = kDigits, kPosInf = kDigits + 1, kNegInf = kDigits + 2;
inline constexpr int kLowestExponent = -1074;
inline constexpr int64_t kDigitMask = 0xffffffff;

__device__ inline void add_limb(unsigned long long* limbs, int limb, int64_t value) {
  if (value != 0) atomicAdd(limbs + limb, static_cast<unsigned long long>(value));
}

// Adds `value` to the limbs of the block, which other threads add to as well.
__device__ inline void add(unsigned long long* limbs, double value) {
  const auto bits = static_cast<uint64_t>(__double_as_longlong(value));
  const int biased = static_cast<int>(bits >> 52 & 0x7ff);
  uint64_t mantissa = bits & ((uint64_t{1} << 52) - 1);
  const bool negative = (bits >> 63) != 0;
  if (biased == 0x7ff) {
    add_limb(limbs, mantissa != 0 ? kNan : negative ? kNegInf : kPosInf, 1);
    return;
  }
  if (biased != 0) mantissa |= uint64_t{1} << 52;
  const int shift = biased == 0 ? 0 : biased - 1;
  const int digit = shift / 32, within = shift % 32;
  const uint64_t low = mantissa << within;
  const uint64_t high = within == 0 ? 0 : mantissa >> (64 - within);
  const int64_t sign = negative ? -1 : 1;
  add_limb(limbs, digit, sign * static_cast<int64_t>(low & kDigitMask));
  add_limb(limbs, digit + 1, sign * static_cast<int64_t>(low >> 32));
  add_limb(limbs, digit + 2, sign * static_cast<int64_t>(high));
}

// Carries from digit to digit.
__device__ inline void propagate(int64_t* limbs) {
  int64_t carry = 0;
  for (int i = 0; i < kDigits - 1; ++i) {
    const int64_t sum = limbs[i] + carry;
    limbs[i] = sum & kDigitMask;
    carry = sum >> 32;
  }
  limbs[kDigits - 1] += carry;
}

// ExactSum::value of a sum that is not negative; `limbs` are propagated and otherwise left as they are.
__device__ inline double value(int64_t* limbs) {
  if (limbs[kNan] != 0 || limbs[kNegInf] != 0) return static_cast<double>(quiet_nan());
  if (limbs[kPosInf] != 0) return static_cast<double>(infinity());
  propagate(limbs);
  int top = kDigits - 1;
  while (top >= 0 && limbs[top] == 0) --top;
  if (top < 0) return 0.0;
  // The 64 leading bits; what is below matters only as "not zero".
  const auto digit = [&](int i) { return i >= 0 ? static_cast<uint64_t>(limbs[i]) : uint64_t{0}; };
  const int unused = __clzll(limbs[top]) - 32;  // leading zeros of the top digit
  uint64_t window = digit(top) << 32 | digit(top - 1);
  uint64_t rest = digit(top - 2) << 32;
  if (unused > 0) {
    window = window << unused | digit(top - 2) >> (32 - unused);
    rest = digit(top - 2) << (32 + unused);
  }
  bool sticky = rest != 0;
  for (int i = top - 3; i >= 0; --i) sticky |= limbs[i] != 0;
  int lowest = 32 * (top - 1) - unused;  // weight of the window's bit 0, in units of 2^-1074
  int drop = 11;
  if (lowest + drop < 0) drop = -lowest;
  if (drop >= 64) return 0.0;  // unreachable: the top digit is at 2^-1074 or above
  const uint64_t half = uint64_t{1} << (drop - 1);
  const uint64_t below = window & (half * 2 - 1);
  window >>= drop;
  lowest += drop;
  if (below > half || (below == half && (sticky || (window & 1) != 0))) window += 1;
  return ldexp(static_cast<double>(window), lowest + kLowestExponent);
}

}  // namespace polyreme::kernels::exact
