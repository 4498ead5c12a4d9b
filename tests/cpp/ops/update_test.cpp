// Norms of every order, and the rules beyond AdamW and SGD, against float64.
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

constexpr int64_t kSize = (1 << 15) + 77;

std::vector<float> gradients(int64_t step) {
  return random_floats(kSize, static_cast<uint32_t>(100 + step), 0.1f);
}
std::vector<float> zeros(int64_t count = kSize) {
  return std::vector<float>(static_cast<size_t>(count), 0.0f);
}
std::vector<double> widened(const std::vector<float>& values) { return {values.begin(), values.end()}; }

Tensor zero_sums(Rig& rig, double p) {
  const Shape shape = norm_shape(p);
  return rig.upload(shape, std::vector<int64_t>(static_cast<size_t>(shape.numel()), 0));
}

double norm_of(Rig& rig, const std::vector<float>& x, double p) {
  const Tensor sums = zero_sums(rig, p);
  add_to_norm(rig.stream(), rig.upload(x), p, sums);
  return norm_value(rig.download<int64_t>(sums), p);
}

TEST(Norm, OCl06OrdersOtherThanTwo) {
  Rig rig;
  EXPECT_EQ(norm_of(rig, {3, -4}, 1), 7.0);
  EXPECT_EQ(norm_of(rig, {3, -4}, 2), 5.0);
  EXPECT_NEAR(norm_of(rig, {3, -4}, 3), 4.497941, 1e-6);
  EXPECT_EQ(norm_of(rig, {3, -4}, std::numeric_limits<double>::infinity()), 4.0);
  EXPECT_NEAR(norm_of(rig, {3, -4}, 2.5), std::pow(std::pow(3, 2.5) + std::pow(4, 2.5), 1 / 2.5), 1e-12);
}

TEST(Norm, AgreesWithDoubleAndDoesNotDependOnTheCut) {
  const auto x = random_floats(kSize, 7);
  for (const double p : {1.0, 2.0, 3.0, 4.0, 1.5, std::numeric_limits<double>::infinity()}) {
    double expected = 0;
    for (const float value : x) {
      const double size = std::abs(static_cast<double>(value));
      expected = std::isinf(p) ? std::max(expected, size) : expected + std::pow(size, p);
    }
    if (!std::isinf(p)) expected = std::pow(expected, 1 / p);
    std::vector<int64_t> reference;
    same_bits_everywhere([&](Rig& rig) {
      const Tensor sums = zero_sums(rig, p), tensor = rig.upload(x);
      // The later part first, cut at a block: as shards of different ranks would come in.
      for (const auto& [begin, end] :
           {std::pair<int64_t, int64_t>{9 * kNormBlock, kSize}, {0, 9 * kNormBlock}})
        add_to_norm(rig.stream(), tensor.slice(0, begin, end), p, sums);
      const auto got = rig.download<int64_t>(sums);
      if (reference.empty()) reference = got;
      EXPECT_EQ(got, reference) << p;
      EXPECT_NEAR(norm_value(got, p), expected, 1e-12 * expected) << p;
      return std::vector<float>{};
    });
    Rig rig;
    EXPECT_EQ(norm_of(rig, x, p), norm_value(reference, p)) << p;
  }
}

TEST(Norm, OfWhatIsNotFinite) {
  Rig rig;
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    EXPECT_TRUE(std::isnan(norm_of(rig, {1, kNan, kInf}, p))) << p;
    EXPECT_EQ(norm_of(rig, {1, -kInf, 2}, p), std::numeric_limits<double>::infinity()) << p;
    EXPECT_EQ(norm_of(rig, {}, p), 0.0) << p;
  }
  EXPECT_THROW_WITH(norm_shape(0.5), InvalidArgument, "order 1 or more");
}

TEST(ClipScale, MultipliesAndClips) {
  Rig rig;
  const auto scale_of = [&](float max_norm, double multiplier, double p) {
    const Tensor sums = zero_sums(rig, p), scale = rig.empty_f32({1});
    add_to_norm(rig.stream(), rig.upload({30.0f, 40.0f}), p, sums);
    clip_scale(rig.stream(), sums, max_norm, scale, multiplier, p);
    return rig.download(scale)[0];
  };
  EXPECT_EQ(scale_of(0, 0.5, 2), 0.5f);
  EXPECT_EQ(scale_of(100, 0.5, 2), 0.5f);
  EXPECT_EQ(scale_of(5, 0.1, 2), 0.1f);  // the norm is 5: not above
  EXPECT_EQ(scale_of(1, 0.1, 2), 0.02f);
  EXPECT_EQ(scale_of(35, 1, 1), 0.5f);
  EXPECT_EQ(scale_of(20, 1, std::numeric_limits<double>::infinity()), 0.5f);
  EXPECT_THROW_WITH(scale_of(1, 0, 2), InvalidArgument, "multiplier");
}

TEST(Lion, FollowsTheRuleInDouble) {
  constexpr LionOptions kLion{.lr = 0.01, .beta1 = 0.875, .beta2 = 0.9375, .weight_decay = 0.125};
  const auto got = same_bits_everywhere([&](Rig& rig) {
    const Tensor param = rig.upload(random_floats(kSize, 1)), m = rig.upload(zeros()),
                 scale = rig.upload({0.5f});
    for (int64_t step = 1; step <= 3; ++step)
      lion(rig.stream(), param, rig.upload(gradients(step)), m, scale, kLion);
    auto result = rig.download(param);
    append(result, rig.download(m));
    return result;
  });
  auto p = widened(random_floats(kSize, 1)), m = widened(zeros());
  int64_t close_calls = 0;
  for (int64_t step = 1; step <= 3; ++step) {
    const auto gradient = gradients(step);
    for (size_t i = 0; i < p.size(); ++i) {
      const double g = static_cast<double>(gradient[i]) * 0.5;
      const double u = kLion.beta1 * m[i] + (1 - kLion.beta1) * g;
      close_calls += std::abs(u) < 1e-9;
      p[i] -= kLion.lr * ((u > 0) - (u < 0) + kLion.weight_decay * p[i]);
      m[i] = kLion.beta2 * m[i] + (1 - kLion.beta2) * g;
    }
  }
  ASSERT_EQ(close_calls, 0) << "choose other gradients: their sign depends on rounding";
  for (size_t i = 0; i < p.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(got[i]), p[i], 1e-6) << i;
    ASSERT_NEAR(static_cast<double>(got[p.size() + i]), m[i], 1e-7) << i;
  }
}

TEST(Lion, ZeroStaysZero) {
  Rig rig;
  const Tensor param = rig.upload(zeros()), m = rig.upload(zeros());
  lion(rig.stream(), param, rig.upload(zeros()), m, rig.upload({1.0f}),
       {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1});
  expect_same_bits(rig.download(param), zeros());
  expect_same_bits(rig.download(m), zeros());
}

constexpr AdamWOptions kLamb{
    .lr = 0.01, .beta1 = 0.875, .beta2 = 0.96875, .eps = 1e-6, .weight_decay = 0.125, .step = 1};

// Three steps on a tensor that is cut at `cuts`, as shards would be.
std::vector<float> run_lamb(Rig& rig, const std::vector<int64_t>& cuts) {
  const Tensor param = rig.upload(random_floats(kSize, 1)), m = rig.upload(zeros()), v = rig.upload(zeros()),
               scale = rig.upload({0.5f});
  for (int64_t step = 1; step <= 3; ++step) {
    AdamWOptions options = kLamb;
    options.step = step;
    const Tensor gradient = rig.upload(gradients(step));
    const Tensor sums = rig.upload({2, ExactSum::kLimbs}, std::vector<int64_t>(2 * ExactSum::kLimbs, 0));
    for (const bool apply : {false, true}) {
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const auto part = [&](const Tensor& t) { return t.slice(0, cuts[i], cuts[i + 1]); };
        if (apply)
          lamb_apply(rig.stream(), part(param), part(m), part(v), sums, scale, options);
        else
          lamb_moments(rig.stream(), part(param), part(gradient), part(m), part(v), scale, options, sums);
      }
    }
  }
  return rig.download(param);
}

TEST(Lamb, FollowsTheRuleInDoubleWhateverTheCut) {
  const auto got = same_bits_everywhere([&](Rig& rig) { return run_lamb(rig, {0, kSize}); });
  Rig rig;
  expect_same_bits(run_lamb(rig, {0, kNormBlock, 7 * kNormBlock, kSize}), got);
  auto p = widened(random_floats(kSize, 1)), m = widened(zeros()), v = m, r = m;
  for (int step = 1; step <= 3; ++step) {
    const auto gradient = gradients(step);
    double weight_squares = 0, direction_squares = 0;
    for (size_t i = 0; i < p.size(); ++i) {
      const double g = static_cast<double>(gradient[i]) * 0.5;
      m[i] = kLamb.beta1 * m[i] + (1 - kLamb.beta1) * g;
      v[i] = kLamb.beta2 * v[i] + (1 - kLamb.beta2) * g * g;
      r[i] = m[i] / (1 - std::pow(kLamb.beta1, step)) /
                 (std::sqrt(v[i] / (1 - std::pow(kLamb.beta2, step))) + kLamb.eps) +
             kLamb.weight_decay * p[i];
      weight_squares += p[i] * p[i];
      direction_squares += r[i] * r[i];
    }
    for (size_t i = 0; i < p.size(); ++i)
      p[i] -= kLamb.lr * std::sqrt(weight_squares / direction_squares) * r[i];
  }
  for (size_t i = 0; i < p.size(); ++i)
    ASSERT_NEAR(static_cast<double>(got[i]), p[i], 2e-6 * (1 + std::abs(p[i]))) << i;
}

// Newton-Schulz in double, as in the paper.
std::vector<double> orthogonalized(const std::vector<float>& values, size_t rows, size_t cols) {
  std::vector<double> x = widened(values);
  double squares = 0;
  for (const double value : x) squares += value * value;
  for (double& value : x) value /= std::sqrt(squares) + 1e-7;
  const bool tall = rows > cols;
  const size_t n = std::min(rows, cols), k = std::max(rows, cols);
  const auto at = [&](const std::vector<double>& y, size_t i, size_t j) {
    return tall ? y[j * cols + i] : y[i * cols + j];
  };
  for (int step = 0; step < 5; ++step) {
    std::vector<double> gram(n * n, 0.0), poly(n * n, 0.0), next = x;
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < n; ++j)
        for (size_t l = 0; l < k; ++l) gram[i * n + j] += at(x, i, l) * at(x, j, l);
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < n; ++j) {
        double square = 0;
        for (size_t l = 0; l < n; ++l) square += gram[i * n + l] * gram[l * n + j];
        poly[i * n + j] = -4.7750 * gram[i * n + j] + 2.0315 * square;
      }
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < k; ++j) {
        double value = 3.4445 * at(x, i, j);
        for (size_t l = 0; l < n; ++l) value += poly[i * n + l] * at(x, l, j);
        (tall ? next[j * cols + i] : next[i * cols + j]) = value;
      }
    x = next;
  }
  return x;
}

TEST(Muon, OrthogonalizesWideAndTallMatrices) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{24, 40}, {40, 24}, {17, 17}, {1, 9}, {9, 1}}) {
    const auto values = random_floats(static_cast<size_t>(rows * cols), 3);
    const auto got = same_bits_everywhere([&, rows = rows, cols = cols](Rig& rig) {
      const Tensor x = rig.upload({rows, cols}, values);
      orthogonalize(rig.stream(), x);
      return rig.download(x);
    });
    const auto expected = orthogonalized(values, static_cast<size_t>(rows), static_cast<size_t>(cols));
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(static_cast<double>(got[i]), expected[i], 2e-5) << rows << "x" << cols;
    // Singular values end in [0.68, 1.13]: the squared Frobenius norm is near the rank.
    double squares = 0;
    for (const double value : expected) squares += value * value;
    EXPECT_NEAR(squares / static_cast<double>(std::min(rows, cols)), 0.9, 0.45);
  }
  Rig rig;
  const Tensor none = rig.upload({3, 4}, zeros(12));
  orthogonalize(rig.stream(), none);
  expect_same_bits(rig.download(none), zeros(12));
}

TEST(Muon, MomentumAndUpdateFollowTheRule) {
  constexpr double kMomentum = 0.9375;
  const auto start = random_floats(kSize, 1), old_m = random_floats(kSize, 2, 0.1f), gradient = gradients(1);
  const auto got = same_bits_everywhere([&](Rig& rig) {
    const Tensor param = rig.upload(start), m = rig.upload(old_m), out = rig.empty_f32({kSize}),
                 scale = rig.upload({0.5f});
    muon_momentum(rig.stream(), rig.upload(gradient), m, scale, kMomentum, out);
    muon_apply(rig.stream(), param, out, scale, {.lr = 0.1, .weight_decay = 0.25, .factor = 2});
    auto result = rig.download(param);
    append(result, rig.download(m));
    return result;
  });
  for (size_t i = 0; i < start.size(); ++i) {
    const double g = static_cast<double>(gradient[i]) * 0.5;
    const double m = kMomentum * static_cast<double>(old_m[i]) + (1 - kMomentum) * g;
    const double u = (1 - kMomentum) * g + kMomentum * m;
    const double p = static_cast<double>(start[i]) * (1 - 0.025) - 0.2 * u;
    ASSERT_NEAR(static_cast<double>(got[i]), p, 1e-6) << i;
    ASSERT_NEAR(static_cast<double>(got[start.size() + i]), m, 1e-7) << i;
  }
}

TEST(Rules, NanScaleChangesNothing) {
  Rig rig;
  const Tensor nan = rig.upload({kNan}), gradient = rig.upload(gradients(1)),
               param = rig.upload(random_floats(kSize, 1)), m = rig.upload(zeros()), v = rig.upload(zeros()),
               out = rig.empty_f32({kSize});
  const Tensor sums = rig.upload({2, ExactSum::kLimbs}, std::vector<int64_t>(2 * ExactSum::kLimbs, 0));
  lion(rig.stream(), param, gradient, m, nan, {.lr = 1, .beta1 = 0.9, .beta2 = 0.9, .weight_decay = 1});
  lamb_moments(rig.stream(), param, gradient, m, v, nan, kLamb, sums);
  lamb_apply(rig.stream(), param, m, v, sums, nan, kLamb);
  muon_momentum(rig.stream(), gradient, m, nan, 0.9, out);
  muon_apply(rig.stream(), param, gradient, nan, {.lr = 1, .weight_decay = 1, .factor = 1});
  expect_same_bits(rig.download(param), random_floats(kSize, 1));
  expect_same_bits(rig.download(m), zeros());
  expect_same_bits(rig.download(v), zeros());
  expect_same_bits(rig.download(out), zeros());
  EXPECT_EQ(rig.download<int64_t>(sums), std::vector<int64_t>(2 * ExactSum::kLimbs, 0));
}

}  // namespace
}  // namespace polyreme::testing
