// The exact accumulator against integers and long sums whose value is known.
#include "base/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace polyreme {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kTiny = std::numeric_limits<double>::denorm_min();
constexpr double kMax = std::numeric_limits<double>::max();

ExactSum sum_of(const std::vector<double>& terms) {
  ExactSum sum;
  for (const double term : terms) sum.add(term);
  return sum;
}

uint64_t bits(double value) { return std::bit_cast<uint64_t>(value); }

TEST(ExactSum, OneTermComesBack) {
  std::mt19937_64 random(1);
  for (const double term :
       {0.0, 1.0, -1.0, kTiny, -kTiny, kMax, -kMax, 0x1p-1022, 0x1.fffffffffffffp-1023, 1e300, 3e-310})
    EXPECT_EQ(bits(sum_of({term}).value()), bits(term)) << term;
  for (int i = 0; i < 200000; ++i) {
    const double term = std::bit_cast<double>(random());
    if (!std::isfinite(term) || term == 0) continue;
    ASSERT_EQ(bits(sum_of({term}).value()), bits(term)) << term;
  }
}

TEST(ExactSum, TwoTermsRoundAsTheHardwareDoes) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 200000; ++i) {
    const double a = std::bit_cast<double>(random());
    if (!std::isfinite(a) || a == 0) continue;
    // Close exponents, so that all bits meet.
    const int shift = static_cast<int>(random() % 120) - 60;
    const double b =
        std::ldexp(std::bit_cast<double>((random() >> 12) | 0x3ff0000000000000), std::ilogb(a) + shift);
    if (!std::isfinite(a + b) || !std::isfinite(a - b)) continue;
    ASSERT_EQ(sum_of({a, b}).value(), a + b) << a << " " << b;
    ASSERT_EQ(sum_of({a, -b}).value(), a - b) << a << " " << b;
  }
}

TEST(ExactSum, RoundsOnceToEven) {
  EXPECT_EQ(sum_of({1.0, 0x1p-53}).value(), 1.0);
  EXPECT_EQ(sum_of({1.0, 0x1p-53, kTiny}).value(), 1.0 + 0x1p-52);
  EXPECT_EQ(sum_of({1.0 + 0x1p-52, 0x1p-53}).value(), 1.0 + 0x1p-51);
  EXPECT_EQ(sum_of({1.0, 0x1p-53, -kTiny}).value(), 1.0);
  EXPECT_EQ(sum_of({-1.0, -0x1p-53, -kTiny}).value(), -1.0 - 0x1p-52);
  EXPECT_EQ(sum_of({0x1.fffffffffffffp0, 0x1p-53}).value(), 2.0);  // the carry goes all the way
  EXPECT_EQ(sum_of({0x1p-1074, 0x1p-1074, 0x1p-1074}).value(), 0x1.8p-1073);
}

TEST(ExactSum, CancelsAndPassesTheRangeOfDouble) {
  EXPECT_EQ(sum_of({1e300, 1.0, -1e300}).value(), 1.0);
  EXPECT_EQ(sum_of({kMax, kMax, -kMax}).value(), kMax);
  EXPECT_EQ(sum_of({kMax, kTiny, -kMax}).value(), kTiny);
  EXPECT_EQ(sum_of({kMax, kMax}).value(), kInf);
  EXPECT_EQ(sum_of({-kMax, -kMax}).value(), -kInf);
  EXPECT_EQ(bits(sum_of({1.0, -1.0}).value()), bits(0.0));
  EXPECT_EQ(bits(sum_of({-0.0}).value()), bits(0.0));
}

TEST(ExactSum, SpecialTermsShow) {
  EXPECT_TRUE(std::isnan(sum_of({1.0, std::nan("")}).value()));
  EXPECT_EQ(sum_of({1.0, kInf}).value(), kInf);
  EXPECT_EQ(sum_of({-kInf, -kInf, 1.0}).value(), -kInf);
  EXPECT_TRUE(std::isnan(sum_of({kInf, -kInf}).value()));
}

TEST(ExactSum, HasNoOrderAndNoGrouping) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> exponent(-250, 250);
  std::vector<double> terms(5000);
  for (double& term : terms) term = (random() % 2 ? 1 : -1) * std::exp(exponent(random));
  const auto expected = sum_of(terms).canonical_limbs();
  for (int round = 0; round < 10; ++round) {
    std::shuffle(terms.begin(), terms.end(), random);
    EXPECT_EQ(sum_of(terms).canonical_limbs(), expected);
    const auto middle = terms.begin() + static_cast<int64_t>(random() % terms.size());
    ExactSum total = sum_of({terms.begin(), middle});
    total.add(sum_of({middle, terms.end()}));
    EXPECT_EQ(total.canonical_limbs(), expected);
    // As an integer all-reduce does it: limbs are added one by one.
    auto limbs = sum_of({terms.begin(), middle}).canonical_limbs();
    const auto others = sum_of({middle, terms.end()}).canonical_limbs();
    for (size_t i = 0; i < limbs.size(); ++i) limbs[i] += others[i];
    EXPECT_EQ(ExactSum(limbs).canonical_limbs(), expected);
    EXPECT_EQ(bits(ExactSum(limbs).value()), bits(total.value()));
  }
}

TEST(ExactSum, LimbsAreCanonical) {
  const auto limbs = sum_of({-1.0, -kTiny, 0x1p40}).canonical_limbs();
  for (int i = 0; i + 1 < ExactSum::kDigits; ++i) {
    EXPECT_GE(limbs[i], 0);
    EXPECT_LT(limbs[i], int64_t{1} << 32);
  }
  EXPECT_EQ(sum_of({5.0, -2.0}).canonical_limbs(), sum_of({3.0}).canonical_limbs());
  EXPECT_EQ(sum_of({5.0, -7.0}).canonical_limbs(), sum_of({-2.0}).canonical_limbs());
}

}  // namespace
}  // namespace polyreme
