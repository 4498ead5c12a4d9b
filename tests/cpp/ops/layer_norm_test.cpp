// LayerNorm against float64 and against itself on every device.
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

constexpr float kEps = 1e-5f;

struct Case {
  int64_t rows, cols;
  float offset, spread;  // x = offset + spread * normal
};
const std::vector<Case> kCases = {{1, 1, 0, 1},    {3, 5, 0, 1},      {7, 64, 1, 3},      {50, 768, 0, 1},
                                  {5, 769, 10, 1}, {4, 3000, 100, 1}, {3, 2048, 0, 1e-3f}};

struct Inputs {
  std::vector<float> x, gamma, beta, dy, dgamma, dbeta;
};

Inputs make_inputs(const Case& c) {
  Inputs in{random_floats(c.rows * c.cols, 1, c.spread), random_floats(c.cols, 2), random_floats(c.cols, 3),
            random_floats(c.rows * c.cols, 4),           random_floats(c.cols, 5), random_floats(c.cols, 6)};
  for (float& value : in.x) value += c.offset;
  return in;
}

// y | mean | rstd | dx | dgamma | dbeta, one after the other.
std::vector<float> run_all(Rig& rig, const Case& c, const Inputs& in) {
  const Shape matrix = {c.rows, c.cols};
  const Tensor x = rig.upload(matrix, in.x), gamma = rig.upload(in.gamma), beta = rig.upload(in.beta);
  const Tensor y = rig.empty_f32(matrix), mean = rig.empty_f32({c.rows}), rstd = rig.empty_f32({c.rows});
  const Tensor dy = rig.upload(matrix, in.dy), dx = rig.empty_f32(matrix);
  const Tensor dgamma = rig.upload(in.dgamma), dbeta = rig.upload(in.dbeta);
  layer_norm_forward(rig.stream(), x, gamma, beta, kEps, y, mean, rstd);
  layer_norm_backward_input(rig.stream(), dy, x, gamma, mean, rstd, dx);
  layer_norm_backward_weight(rig.stream(), dy, x, mean, rstd, dgamma, dbeta);
  std::vector<float> result;
  for (const Tensor& t : {y, mean, rstd, dx, dgamma, dbeta}) append(result, rig.download(t));
  return result;
}

struct RowReference {
  double mean, rstd;
};

RowReference row_reference(const float* x, int64_t n) {
  double sum = 0, square = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  const double mean = sum / n;
  for (int64_t i = 0; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
  return {mean, 1 / std::sqrt(square / n + static_cast<double>(kEps))};
}

TEST(LayerNorm, IsCloseToDoubleAndEqualEverywhere) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(concat("[", c.rows, ", ", c.cols, "] offset ", c.offset, " spread ", c.spread));
    const Inputs in = make_inputs(c);
    const auto got = same_bits_everywhere([&](Rig& rig) { return run_all(rig, c, in); });
    const float* y = got.data();
    const float* mean = y + c.rows * c.cols;
    const float* rstd = mean + c.rows;
    const float* dx = rstd + c.rows;
    const float* dgamma = dx + c.rows * c.cols;
    const float* dbeta = dgamma + c.cols;
    std::vector<double> expected_dgamma(in.dgamma.begin(), in.dgamma.end());
    std::vector<double> expected_dbeta(in.dbeta.begin(), in.dbeta.end());
    // The rounding of the mean to fp32 alone moves xhat by this much.
    const double mean_error = 0x1p-24 * (std::abs(c.offset) + c.spread) / std::max(c.spread, std::sqrt(kEps));
    const double tolerance = 1e-6 + 2 * mean_error;
    for (int64_t r = 0; r < c.rows; ++r) {
      const float* x = &in.x[r * c.cols];
      const RowReference row = row_reference(x, c.cols);
      EXPECT_NEAR(mean[r], row.mean, 0x1p-24 * (std::abs(row.mean) + c.spread)) << r;
      EXPECT_NEAR(rstd[r], row.rstd, row.rstd * 4e-7) << r;
      double sum = 0, dot = 0;
      for (int64_t i = 0; i < c.cols; ++i) {
        const double xhat = (x[i] - row.mean) * row.rstd,
                     g = static_cast<double>(in.dy[r * c.cols + i]) * in.gamma[i];
        sum += g;
        dot += g * xhat;
        expected_dgamma[i] += in.dy[r * c.cols + i] * xhat;
        expected_dbeta[i] += in.dy[r * c.cols + i];
      }
      for (int64_t i = 0; i < c.cols; ++i) {
        const double xhat = (x[i] - row.mean) * row.rstd,
                     g = static_cast<double>(in.dy[r * c.cols + i]) * in.gamma[i];
        const double expected_dx = row.rstd * (g - sum / c.cols - xhat * dot / c.cols);
        ASSERT_NEAR(y[r * c.cols + i], xhat * in.gamma[i] + in.beta[i],
                    tolerance * (2 + std::abs(in.gamma[i]) * 2));
        ASSERT_NEAR(dx[r * c.cols + i], expected_dx, row.rstd * tolerance * 4 * (1 + std::abs(xhat)))
            << r << " " << i;
      }
    }
    for (int64_t i = 0; i < c.cols; ++i) {
      ASSERT_NEAR(dgamma[i], expected_dgamma[i], tolerance * 4 * c.rows);
      ASSERT_NEAR(dbeta[i], expected_dbeta[i], 1e-6 * c.rows);
    }
  }
}

TEST(LayerNorm, BackwardWeightIsOneChainPerColumn) {
  const Case c{9, 37, 0.5f, 2};
  const Inputs in = make_inputs(c);
  Rig rig;
  const auto got = run_all(rig, c, in);
  const float* mean = got.data() + c.rows * c.cols;
  const float* rstd = mean + c.rows;
  const float* dgamma = rstd + c.rows + c.rows * c.cols;
  for (int64_t i = 0; i < c.cols; ++i) {
    float gamma_sum = in.dgamma[i], beta_sum = in.dbeta[i];
    for (int64_t r = 0; r < c.rows; ++r) {
      const float xhat = (in.x[r * c.cols + i] - mean[r]) * rstd[r];
      gamma_sum = std::fma(in.dy[r * c.cols + i], xhat, gamma_sum);
      beta_sum += in.dy[r * c.cols + i];
    }
    ASSERT_EQ(bits_of(dgamma[i]), bits_of(gamma_sum));
    ASSERT_EQ(bits_of(dgamma[c.cols + i]), bits_of(beta_sum));
  }
}

TEST(LayerNorm, DoesNotDependOnTheCutOfRows) {
  const Case c{10, 300, 0, 1};
  const Inputs in = make_inputs(c);
  Rig rig;
  const auto whole = run_all(rig, c, in);
  const Shape matrix = {c.rows, c.cols};
  const Tensor x = rig.upload(matrix, in.x), gamma = rig.upload(in.gamma), beta = rig.upload(in.beta);
  const Tensor y = rig.empty_f32(matrix), mean = rig.empty_f32({c.rows}), rstd = rig.empty_f32({c.rows});
  const Tensor dy = rig.upload(matrix, in.dy), dx = rig.empty_f32(matrix);
  const Tensor dgamma = rig.upload(in.dgamma), dbeta = rig.upload(in.dbeta);
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 3}, {3, 3}, {3, 4}, {4, 10}}) {
    const auto part = [begin = begin, end = end](const Tensor& t) { return t.slice(0, begin, end); };
    layer_norm_forward(rig.stream(), part(x), gamma, beta, kEps, part(y), part(mean), part(rstd));
    layer_norm_backward_input(rig.stream(), part(dy), part(x), gamma, part(mean), part(rstd), part(dx));
    layer_norm_backward_weight(rig.stream(), part(dy), part(x), part(mean), part(rstd), dgamma, dbeta);
  }
  std::vector<float> parts;
  for (const Tensor& t : {y, mean, rstd, dx, dgamma, dbeta}) append(parts, rig.download(t));
  expect_same_bits(parts, whole);
}

TEST(LayerNorm, EqualElementsAndNan) {
  Rig rig;
  const int64_t cols = 40;
  std::vector<float> x(2 * cols, 0.1f);
  x[cols + 3] = kNan;
  const Tensor tx = rig.upload({2, cols}, x), gamma = rig.upload(std::vector<float>(cols, 1.0f));
  const Tensor beta = rig.upload(std::vector<float>(cols, 0.0f)), y = rig.empty_f32({2, cols});
  const Tensor mean = rig.empty_f32({2}), rstd = rig.empty_f32({2});
  layer_norm_forward(rig.stream(), tx, gamma, beta, kEps, y, mean, rstd);
  EXPECT_FLOAT_EQ(rig.download(mean)[0], 0.1f);
  EXPECT_FLOAT_EQ(rig.download(rstd)[0], static_cast<float>(1 / std::sqrt(static_cast<double>(kEps))));
  for (const float value : rig.download(y.slice(0, 0, 1))) EXPECT_NEAR(value, 0.0f, 1e-5);
  for (const float value : rig.download(y.slice(0, 1, 2))) EXPECT_TRUE(std::isnan(value));
}

TEST(LayerNorm, RejectsBadArgumentsAndWritesNothing) {
  Rig rig;
  const Tensor x = rig.upload({2, 4}, random_floats(8, 1)), g = rig.upload(random_floats(4, 2));
  const Tensor y = rig.upload({2, 4}, std::vector<float>(8, 7.0f)), m = rig.upload({7.0f, 7.0f}),
               r = rig.upload({7.0f, 7.0f});
  Stream& s = rig.stream();
  EXPECT_THROW_WITH(layer_norm_forward(s, x.view({8}), g, g, kEps, y, m, r), InvalidArgument,
                    "layer_norm_forward: x:");
  EXPECT_THROW_WITH(layer_norm_forward(s, x, m, g, kEps, y, m, r), InvalidArgument,
                    "gamma: expected contiguous float32[4]");
  EXPECT_THROW_WITH(layer_norm_forward(s, x, g, m, kEps, y, m, r), InvalidArgument, "beta:");
  EXPECT_THROW_WITH(layer_norm_forward(s, x, g, g, -1.0f, y, m, r), InvalidArgument, "eps:");
  EXPECT_THROW_WITH(layer_norm_forward(s, x, g, g, kEps, y.view({4, 2}), m, r), InvalidArgument, "y:");
  EXPECT_THROW_WITH(layer_norm_forward(s, x, g, g, kEps, y, g, r), InvalidArgument, "mean:");
  EXPECT_THROW_WITH(layer_norm_forward(s, x, g, g, kEps, y, m, g), InvalidArgument, "rstd:");
  EXPECT_THROW_WITH(layer_norm_backward_input(s, x, y.view({4, 2}), g, m, r, y), InvalidArgument,
                    "layer_norm_backward_input: x:");
  EXPECT_THROW_WITH(layer_norm_backward_weight(s, x, x, m, r, m, g), InvalidArgument, "dgamma:");
  EXPECT_THROW_WITH(layer_norm_backward_weight(s, x, x, m, r, g, g), InvalidArgument,
                    "dbeta: expected memory apart");
  for (const Tensor& t : {y, m, r})
    for (const float value : rig.download(t)) EXPECT_EQ(value, 7.0f);
}

}  // namespace
}  // namespace polyreme::testing
