// Softmax cross-entropy against float64, and what it does with infinities and NaN.
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

struct Reference {
  double loss, log_sum_exp;
};

Reference reference(const float* logits, int64_t vocab, int32_t target) {
  double top = -INFINITY, sum = 0;
  for (int64_t i = 0; i < vocab; ++i) top = std::max(top, static_cast<double>(logits[i]));
  for (int64_t i = 0; i < vocab; ++i) sum += std::exp(logits[i] - top);
  const double log_sum_exp = top + std::log(sum);
  return {target == kIgnoreIndex ? 0 : log_sum_exp - logits[target], log_sum_exp};
}

// loss | log_sum_exp | gradient
std::vector<float> run_both(Rig& rig, int64_t rows, int64_t vocab, const std::vector<float>& logits,
                            const std::vector<int32_t>& targets, float scale) {
  const Tensor x = rig.upload({rows, vocab}, logits), t = rig.upload({rows}, targets);
  const Tensor loss = rig.empty_f32({rows}), log_sum_exp = rig.empty_f32({rows});
  cross_entropy_forward(rig.stream(), x, t, loss, log_sum_exp);
  cross_entropy_backward(rig.stream(), x, t, log_sum_exp, scale);
  auto result = rig.download(loss);
  append(result, rig.download(log_sum_exp));
  append(result, rig.download(x));
  return result;
}

TEST(CrossEntropy, IsCloseToDoubleAndEqualEverywhere) {
  for (const auto& [rows, vocab, spread] : {std::tuple<int64_t, int64_t, float>{1, 1, 1.0f},
                                            {5, 17, 1.0f},
                                            {3, 1024, 10.0f},
                                            {4, 1041, 0.1f},
                                            {3, 50257, 3.0f}}) {
    SCOPED_TRACE(concat("[", rows, ", ", vocab, "]"));
    const auto logits = random_floats(rows * vocab, 1, spread);
    std::vector<int32_t> targets(rows);
    for (int64_t r = 0; r < rows; ++r) targets[r] = static_cast<int32_t>((r * 7919) % vocab);
    if (rows > 1) targets[1] = kIgnoreIndex;
    const float scale = 0.125f;
    const auto got =
        same_bits_everywhere([&](Rig& rig) { return run_both(rig, rows, vocab, logits, targets, scale); });
    for (int64_t r = 0; r < rows; ++r) {
      const float* x = &logits[r * vocab];
      const Reference expected = reference(x, vocab, targets[r]);
      // exp within 1 ulp each: a few of them in the sum; then one rounding of the result.
      EXPECT_NEAR(got[r], expected.loss, 2e-7 + std::abs(expected.loss) * 0x1p-24);
      EXPECT_NEAR(got[rows + r], expected.log_sum_exp, 2e-7 + std::abs(expected.log_sum_exp) * 0x1p-24);
      for (int64_t i = 0; i < vocab; ++i) {
        const double p = std::exp(x[i] - expected.log_sum_exp);
        const double gradient = targets[r] == kIgnoreIndex ? 0 : scale * (p - (i == targets[r] ? 1 : 0));
        // log_sum_exp and the difference from it are rounded to fp32.
        const double rounding =
            (std::abs(expected.log_sum_exp) + std::abs(x[i] - expected.log_sum_exp) + 4) * 0x1p-24;
        ASSERT_NEAR(got[2 * rows + r * vocab + i], gradient, scale * p * rounding + scale * 0x1p-24)
            << r << " " << i;
      }
    }
  }
}

TEST(CrossEntropy, DoesNotDependOnTheCutOfRows) {
  Rig rig;
  const int64_t rows = 6, vocab = 2000;
  const auto logits = random_floats(rows * vocab, 2, 4.0f);
  const std::vector<int32_t> targets = {1, 1999, kIgnoreIndex, 0, 7, 1024};
  const auto whole = run_both(rig, rows, vocab, logits, targets, 1.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const auto one = run_both(rig, 1, vocab, {logits.begin() + r * vocab, logits.begin() + (r + 1) * vocab},
                              {targets[r]}, 1.0f);
    EXPECT_EQ(bits_of(one[0]), bits_of(whole[r]));
    EXPECT_EQ(bits_of(one[1]), bits_of(whole[rows + r]));
    expect_same_bits({one.begin() + 2, one.end()},
                     {whole.begin() + 2 * rows + r * vocab, whole.begin() + 2 * rows + (r + 1) * vocab});
  }
}

TEST(CrossEntropy, ShowsWhatIsNotANumber) {
  const int64_t vocab = 3000;
  const auto forward = [&](const std::vector<float>& logits, int32_t target) {
    const auto got =
        same_bits_everywhere([&](Rig& rig) { return run_both(rig, 1, vocab, logits, {target}, 1.0f); });
    return std::pair{got[0], got[1]};
  };
  const auto base = random_floats(vocab, 3);
  for (const int64_t place : {0, 1500, 2999}) {
    auto logits = base;
    logits[place] = kNan;
    EXPECT_TRUE(std::isnan(forward(logits, 5).first)) << place;
    logits[place] = kInf;
    EXPECT_TRUE(std::isnan(forward(logits, 5).first)) << place;
    // Padding columns are masked with -inf: they take no part.
    logits[place] = -kInf;
    const Reference expected = reference(logits.data(), vocab, 5);
    EXPECT_NEAR(forward(logits, 5).first, expected.loss, 2e-6) << place;
  }
  EXPECT_TRUE(std::isnan(forward(std::vector<float>(vocab, -kInf), 5).first));
  // A first block of nothing but -inf, then a NaN or a number.
  auto late = std::vector<float>(vocab, -kInf);
  late[2500] = 3.0f;
  EXPECT_EQ(forward(late, 2500).first, 0.0f);
  EXPECT_EQ(forward(late, 2500).second, 3.0f);
  EXPECT_EQ(forward(late, 5).first, kInf);
  late[3] = kNan;
  EXPECT_TRUE(std::isnan(forward(late, 2500).first));
}

TEST(CrossEntropy, RejectsBadArgumentsAndWritesNothing) {
  Rig rig;
  Stream& s = rig.stream();
  const std::vector<float> sevens(8, 7.0f);
  const Tensor x = rig.upload({2, 4}, sevens), t = rig.upload({2}, std::vector<int32_t>{0, 3});
  const Tensor loss = rig.upload({7.0f, 7.0f}), lse = rig.upload({7.0f, 7.0f}), three = rig.empty_f32({3});
  EXPECT_THROW_WITH(cross_entropy_forward(s, x.view({8}), t, loss, lse), InvalidArgument, "logits:");
  EXPECT_THROW_WITH(cross_entropy_forward(s, x, loss, loss, lse), InvalidArgument,
                    "targets: expected contiguous int32[2]");
  EXPECT_THROW_WITH(cross_entropy_forward(s, x, t, three, lse), InvalidArgument, "loss:");
  EXPECT_THROW_WITH(cross_entropy_forward(s, x, t, loss, three), InvalidArgument, "log_sum_exp:");
  EXPECT_THROW_WITH(cross_entropy_backward(s, x, t, three, 1.0f), InvalidArgument, "log_sum_exp:");
  for (const int32_t bad : {4, -1}) {
    const Tensor wrong = rig.upload({2}, std::vector<int32_t>{0, bad});
    cross_entropy_forward(s, x, wrong, loss, lse);
    EXPECT_THROW_WITH(rig.synchronize(), InvalidArgument, concat("target of row 1 is ", bad));
    cross_entropy_backward(s, x, wrong, lse, 1.0f);
    EXPECT_THROW_WITH(rig.synchronize(), InvalidArgument, "expected 0 to 3, or -100");
  }
  expect_same_bits(rig.download(x), sevens);
  expect_same_bits(rig.download(loss), {7.0f, 7.0f});
}

}  // namespace
}  // namespace polyreme::testing
