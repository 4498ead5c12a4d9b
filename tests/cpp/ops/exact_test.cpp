// Order-free scalars: exact sums, squared norms, the clipping factor.
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

ExactSum sum_of(Rig& rig, const Tensor& limbs) {
  const auto words = rig.download<int64_t>(limbs);
  return ExactSum(std::span<const int64_t, ExactSum::kLimbs>(words.data(), ExactSum::kLimbs));
}

Tensor new_limbs(Rig& rig) {
  const Tensor limbs = empty(rig.device(), DType::kI64, {ExactSum::kLimbs}, "limbs");
  zero_limbs(rig.stream(), limbs);
  return limbs;
}

TEST(ExactSumOp, DoesNotDependOnOrderOrThreads) {
  auto x = random_floats(100003, 1);
  for (size_t i = 0; i < x.size(); i += 100) x[i] *= 1e20f;
  ExactSum expected;
  for (const float value : x) expected.add(static_cast<double>(value));
  auto reversed = x;
  std::reverse(reversed.begin(), reversed.end());
  same_bits_everywhere([&](Rig& rig) {
    const Tensor limbs = new_limbs(rig), other = new_limbs(rig);
    exact_sum(rig.stream(), rig.upload(x), limbs);
    const Tensor backwards = rig.upload(reversed);
    exact_sum(rig.stream(), backwards.slice(0, 0, 777), other);
    exact_sum(rig.stream(), backwards.slice(0, 777, 100003), other);
    EXPECT_EQ(rig.download<int64_t>(limbs), rig.download<int64_t>(other));
    const auto words = expected.canonical_limbs();
    EXPECT_EQ(rig.download<int64_t>(limbs), std::vector<int64_t>(words.begin(), words.end()));
    return std::vector<float>{static_cast<float>(sum_of(rig, limbs).value())};
  });
}

TEST(ExactSumSquares, IsCloseToDoubleAndCutsAtBlocks) {
  for (const int64_t n :
       {int64_t{0}, int64_t{1}, int64_t{17}, kNormBlock, kNormBlock + 1, 200 * kNormBlock + 77}) {
    const auto x = random_floats(n, 2);
    long double expected = 0;
    for (const float value : x) expected += static_cast<long double>(value) * value;
    std::vector<int64_t> first;
    same_bits_everywhere([&](Rig& rig) {
      const Tensor tx = rig.upload(x), limbs = new_limbs(rig), parts = new_limbs(rig);
      exact_sum_squares(rig.stream(), tx, limbs);
      // A shard border at a block border changes nothing.
      const int64_t cut = std::min(n, 100 * kNormBlock);
      exact_sum_squares(rig.stream(), tx.slice(0, cut, n), parts);
      exact_sum_squares(rig.stream(), tx.slice(0, 0, cut), parts);
      const auto words = rig.download<int64_t>(limbs);
      EXPECT_EQ(words, rig.download<int64_t>(parts));
      if (first.empty()) first = words;
      EXPECT_EQ(words, first);
      const double value = sum_of(rig, limbs).value();
      EXPECT_NEAR(value, static_cast<double>(expected), static_cast<double>(expected) * 1e-14);
      return std::vector<float>{static_cast<float>(value)};
    });
  }
}

TEST(ExactSumSquares, HugeAndTinyElementsAreExact) {
  Rig rig;
  const Tensor limbs = new_limbs(rig);
  exact_sum_squares(rig.stream(), rig.upload({3e38f, 1e-40f}), limbs);
  exact_sum_squares(rig.stream(), rig.upload({1e-40f}), limbs);
  EXPECT_EQ(sum_of(rig, limbs).value(), static_cast<double>(3e38f) * static_cast<double>(3e38f));
}

float clip(Rig& rig, const std::vector<float>& gradient, float max_norm) {
  const Tensor limbs = new_limbs(rig), scale = rig.empty_f32({1});
  exact_sum_squares(rig.stream(), rig.upload(gradient), limbs);
  clip_scale(rig.stream(), limbs, max_norm, scale);
  return rig.download(scale)[0];
}

TEST(ClipScale, FollowsTheNorm) {
  Rig rig;
  EXPECT_EQ(clip(rig, {3.0f, 4.0f}, 1.0f), 0.2f);
  EXPECT_EQ(clip(rig, {3.0f, 4.0f}, 5.0f), 1.0f);
  EXPECT_EQ(clip(rig, {3.0f, 4.0f}, 6.0f), 1.0f);
  EXPECT_EQ(clip(rig, {3.0f, 4.0f}, 0.0f), 1.0f);
  EXPECT_EQ(clip(rig, {0.0f}, 1.0f), 1.0f);
  EXPECT_EQ(clip(rig, {3e38f, 3e38f}, 1.0f),
            static_cast<float>(1.0 / (std::sqrt(2.0) * static_cast<double>(3e38f))));
  for (const float bad : {kNan, kInf, -kInf}) {
    EXPECT_TRUE(std::isnan(clip(rig, {1.0f, bad}, 1.0f)));
    EXPECT_TRUE(std::isnan(clip(rig, {1.0f, bad}, 0.0f)));
  }
}

TEST(ExactOps, RejectBadArguments) {
  Rig rig;
  Stream& s = rig.stream();
  const Tensor x = rig.upload({1.0f, 2.0f}), limbs = new_limbs(rig);
  const Tensor short_limbs = limbs.slice(0, 0, 5);
  EXPECT_THROW_WITH(zero_limbs(s, x), InvalidArgument, "zero_limbs: limbs: expected contiguous int64[71]");
  EXPECT_THROW_WITH(exact_sum(s, limbs, limbs), InvalidArgument, "exact_sum: x:");
  EXPECT_THROW_WITH(exact_sum(s, x, short_limbs), InvalidArgument, "exact_sum: limbs:");
  EXPECT_THROW_WITH(exact_sum_squares(s, x, x), InvalidArgument, "exact_sum_squares: limbs:");
  EXPECT_THROW_WITH(clip_scale(s, limbs, 1.0f, x), InvalidArgument, "expected one element, got 2");
  EXPECT_THROW_WITH(clip_scale(s, limbs, kNan, x.slice(0, 0, 1)), InvalidArgument, "max_norm");
}

}  // namespace
}  // namespace polyreme::testing
