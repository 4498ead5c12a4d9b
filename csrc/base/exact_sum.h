#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace polyreme {

// An exact sum of doubles: the result does not depend on the order of the terms, so scalars that
// many ranks add up (loss, squared norms) have the same bits on every layout.
//
// The sum is a fixed-point number that covers the whole range of double, cut into digits of 32
// bits that are held in int64 limbs. Adding two accumulators is adding limbs as integers, which an
// integer all-reduce does exactly. Source: Kulisch's long accumulator with carry-save digits (see
// Neal, "Fast exact summation using small and large superaccumulators", 2015).
class ExactSum {
 public:
  static constexpr int kDigits = 68;          // 68 * 32 bits cover 2^-1074 .. 2^1024 and 2^60 terms
  static constexpr int kLimbs = kDigits + 3;  // then counts of NaN, +inf, -inf
  using Limbs = std::array<int64_t, kLimbs>;

  ExactSum() = default;
  // Adopts `limbs`, for example the sum over ranks of the limbs of each rank's accumulator.
  explicit ExactSum(std::span<const int64_t, kLimbs> limbs);

  void add(double value);
  void add(const ExactSum& other);
  // The sum, rounded once to the nearest double (ties to even). NaN, or inf of one sign, if a term was.
  double value() const;
  // Digits in [0, 2^32) except the top one: equal sums have equal canonical limbs, and up to 2^30
  // of them can be added before a limb overflows. Call it before the limbs travel.
  Limbs canonical_limbs() const;

 private:
  static void propagate(Limbs& limbs);

  Limbs limbs_{};
  int64_t terms_since_carry_ = 0;
};

}  // namespace polyreme
