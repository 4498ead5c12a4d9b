#include "base/exact_sum.h"

#include <bit>
#include <cmath>
#include <limits>

namespace polyreme {
namespace {

constexpr int kNan = ExactSum::kDigits;
constexpr int kPosInf = ExactSum::kDigits + 1;
constexpr int kNegInf = ExactSum::kDigits + 2;
constexpr int64_t kDigitMask = 0xffffffff;
// A term changes a limb by less than 2^32, so 2^30 terms keep it below 2^62.
constexpr int64_t kMaxTermsBeforeCarry = int64_t{1} << 30;
// The bit of weight 2^0 in the lowest digit stands for the smallest subnormal double.
constexpr int kLowestExponent = -1074;

}  // namespace

ExactSum::ExactSum(std::span<const int64_t, kLimbs> limbs) {
  for (int i = 0; i < kLimbs; ++i) limbs_[i] = limbs[i];
  propagate(limbs_);
}

void ExactSum::add(double value) {
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  const int biased = static_cast<int>((bits >> 52) & 0x7ff);
  uint64_t mantissa = bits & ((uint64_t{1} << 52) - 1);
  const bool negative = (bits >> 63) != 0;
  if (biased == 0x7ff) {
    limbs_[mantissa != 0 ? kNan : negative ? kNegInf : kPosInf] += 1;
    return;
  }
  if (biased != 0) mantissa |= uint64_t{1} << 52;
  const int shift = biased == 0 ? 0 : biased - 1;  // value = mantissa * 2^(shift - 1074)
  const int digit = shift / 32;
  const unsigned __int128 wide = static_cast<unsigned __int128>(mantissa) << (shift % 32);
  const int64_t d0 = static_cast<int64_t>(static_cast<uint64_t>(wide) & kDigitMask);
  const int64_t d1 = static_cast<int64_t>(static_cast<uint64_t>(wide >> 32) & kDigitMask);
  const int64_t d2 = static_cast<int64_t>(static_cast<uint64_t>(wide >> 64) & kDigitMask);
  const int64_t sign = negative ? -1 : 1;
  limbs_[digit] += sign * d0;
  limbs_[digit + 1] += sign * d1;
  limbs_[digit + 2] += sign * d2;
  if (++terms_since_carry_ == kMaxTermsBeforeCarry) {
    propagate(limbs_);
    terms_since_carry_ = 0;
  }
}

void ExactSum::add(const ExactSum& other) {
  const Limbs theirs = other.canonical_limbs();
  propagate(limbs_);
  terms_since_carry_ = 1;
  for (int i = 0; i < kLimbs; ++i) limbs_[i] += theirs[i];
}

void ExactSum::propagate(Limbs& limbs) {
  int64_t carry = 0;
  for (int i = 0; i < kDigits - 1; ++i) {
    const int64_t sum = limbs[i] + carry;
    limbs[i] = sum & kDigitMask;
    carry = sum >> 32;  // arithmetic shift: floor division, also below zero
  }
  limbs[kDigits - 1] += carry;
}

ExactSum::Limbs ExactSum::canonical_limbs() const {
  Limbs limbs = limbs_;
  propagate(limbs);
  return limbs;
}

double ExactSum::value() const {
  if (limbs_[kNan] != 0 || (limbs_[kPosInf] != 0 && limbs_[kNegInf] != 0))
    return std::numeric_limits<double>::quiet_NaN();
  if (limbs_[kPosInf] != 0) return std::numeric_limits<double>::infinity();
  if (limbs_[kNegInf] != 0) return -std::numeric_limits<double>::infinity();

  Limbs limbs = canonical_limbs();
  const bool negative = limbs[kDigits - 1] < 0;
  if (negative) {
    for (int i = 0; i < kDigits; ++i) limbs[i] = -limbs[i];
    propagate(limbs);
  }
  int top = kDigits - 1;
  while (top >= 0 && limbs[top] == 0) --top;
  if (top < 0) return 0.0;

  // Take the 64 leading bits; everything below only matters as "not zero" for the rounding.
  unsigned __int128 window = 0;  // digits top, top-1, top-2 as a 96..127-bit number
  for (int i = top; i >= 0 && i > top - 3; --i)
    window |= static_cast<unsigned __int128>(static_cast<uint64_t>(limbs[i])) << (32 * (2 - (top - i)));
  int lowest_bit = 32 * (top - 2);  // weight of window's bit 0, in units of 2^-1074
  bool sticky = false;
  for (int i = top - 3; i >= 0; --i) sticky |= limbs[i] != 0;
  // Keep at most 53 bits, but never bits below 2^-1074 (subnormals keep fewer).
  int length = 0;
  for (unsigned __int128 w = window; w != 0; w >>= 1) ++length;
  int drop = length - 53;
  if (lowest_bit + drop < 0) drop = -lowest_bit;
  if (drop > 0) {
    const unsigned __int128 half = static_cast<unsigned __int128>(1) << (drop - 1);
    const unsigned __int128 rest = window & ((half << 1) - 1);
    window >>= drop;
    lowest_bit += drop;
    const bool odd = (window & 1) != 0;
    if (rest > half || (rest == half && (sticky || odd))) window += 1;
  }
  const double magnitude =
      std::ldexp(static_cast<double>(static_cast<uint64_t>(window)), lowest_bit + kLowestExponent);
  return negative ? -magnitude : magnitude;
}

}  // namespace polyreme
