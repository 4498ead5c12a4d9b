// Update rules against float64.
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

constexpr int64_t kSize = (1 << 15) + 77;
constexpr AdamWOptions kAdamW = {
    .lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = 1};

std::vector<float> gradients(int64_t step) {
  return random_floats(kSize, static_cast<uint32_t>(100 + step), 0.1f);
}

struct AdamWState {
  Tensor param, m, v;
};

AdamWState new_state(Rig& rig) {
  return {rig.upload(random_floats(kSize, 1)), rig.upload(std::vector<float>(kSize, 0.0f)),
          rig.upload(std::vector<float>(kSize, 0.0f))};
}

TEST(AdamW, FollowsTheRuleInDoubleForTenSteps) {
  const float scale = 0.5f;
  const auto got = same_bits_everywhere([&](Rig& rig) {
    const AdamWState state = new_state(rig);
    const Tensor scale_tensor = rig.upload({scale});
    AdamWOptions options = kAdamW;
    for (options.step = 1; options.step <= 10; ++options.step)
      adamw(rig.stream(), state.param, rig.upload(gradients(options.step)), state.m, state.v, scale_tensor,
            options);
    auto result = rig.download(state.param);
    append(result, rig.download(state.m));
    append(result, rig.download(state.v));
    return result;
  });
  const auto start = random_floats(kSize, 1);
  std::vector<double> p(start.begin(), start.end()), m(kSize, 0.0), v(kSize, 0.0);
  const double beta1 = kAdamW.beta1, beta2 = kAdamW.beta2, lr = kAdamW.lr;
  for (int64_t step = 1; step <= 10; ++step) {
    const auto gradient = gradients(step);
    for (int64_t i = 0; i < kSize; ++i) {
      const double g = static_cast<double>(gradient[i]) * scale;
      m[i] = beta1 * m[i] + (1 - beta1) * g;
      v[i] = beta2 * v[i] + (1 - beta2) * g * g;
      const double m_hat = m[i] / (1 - std::pow(beta1, step)), v_hat = v[i] / (1 - std::pow(beta2, step));
      p[i] -= lr * (m_hat / (std::sqrt(v_hat) + kAdamW.eps) + kAdamW.weight_decay * p[i]);
    }
  }
  for (int64_t i = 0; i < kSize; ++i) {
    ASSERT_NEAR(got[i], p[i], 10 * 0x1p-24 * (std::abs(p[i]) + 0.2)) << i;
    ASSERT_NEAR(got[kSize + i], m[i], 20 * 0x1p-24 * 0.1) << i;
    ASSERT_NEAR(got[2 * kSize + i], v[i], 20 * 0x1p-24 * v[i]) << i;
  }
}

TEST(AdamW, DoesNotDependOnTheCut) {
  Rig rig;
  const AdamWState whole = new_state(rig), parts = new_state(rig);
  const Tensor gradient = rig.upload(gradients(1)), scale = rig.upload({1.0f});
  adamw(rig.stream(), whole.param, gradient, whole.m, whole.v, scale, kAdamW);
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 5}, {5, 5}, {5, kSize}}) {
    const auto part = [begin = begin, end = end](const Tensor& t) { return t.slice(0, begin, end); };
    adamw(rig.stream(), part(parts.param), part(gradient), part(parts.m), part(parts.v), scale, kAdamW);
  }
  expect_same_bits(rig.download(parts.param), rig.download(whole.param));
  expect_same_bits(rig.download(parts.v), rig.download(whole.v));
}

TEST(AdamW, NanScaleChangesNothing) {
  Rig rig;
  const AdamWState state = new_state(rig);
  const Tensor nan = rig.upload({kNan}), gradient = rig.upload(gradients(1));
  adamw(rig.stream(), state.param, gradient, state.m, state.v, nan, kAdamW);
  sgd(rig.stream(), state.param, gradient, state.m, nan,
      {.lr = 1, .momentum = 0.9f, .weight_decay = 0, .first_step = true});
  expect_same_bits(rig.download(state.param), random_floats(kSize, 1));
  expect_same_bits(rig.download(state.m), std::vector<float>(kSize, 0.0f));
  expect_same_bits(rig.download(state.v), std::vector<float>(kSize, 0.0f));
}

TEST(AdamW, ZeroGradientOfAFreshParameterOnlyDecays) {
  Rig rig;
  const AdamWState state = new_state(rig);
  adamw(rig.stream(), state.param, rig.upload(std::vector<float>(kSize, 0.0f)), state.m, state.v,
        rig.upload({1.0f}), kAdamW);
  auto expected = random_floats(kSize, 1);
  const auto decay =
      static_cast<float>(1.0 - static_cast<double>(kAdamW.lr) * static_cast<double>(kAdamW.weight_decay));
  for (float& value : expected) value *= decay;
  expect_same_bits(rig.download(state.param), expected);
}

TEST(AdamW, RejectsBadArguments) {
  Rig rig;
  Stream& s = rig.stream();
  const AdamWState state = new_state(rig);
  const Tensor gradient = rig.upload(gradients(1)), scale = rig.upload({1.0f}),
               few = gradient.slice(0, 0, 10);
  const auto call = [&](const AdamWOptions& options) {
    adamw(s, state.param, gradient, state.m, state.v, scale, options);
  };
  EXPECT_THROW_WITH(adamw(s, state.param, few, state.m, state.v, scale, kAdamW), InvalidArgument,
                    "adamw: grad:");
  EXPECT_THROW_WITH(adamw(s, state.param, gradient, few, state.v, scale, kAdamW), InvalidArgument,
                    "adamw: m:");
  EXPECT_THROW_WITH(adamw(s, state.param, gradient, state.m, state.m, scale, kAdamW), InvalidArgument,
                    "v: expected memory apart");
  EXPECT_THROW_WITH(adamw(s, state.param, gradient, state.m, state.v, few, kAdamW), InvalidArgument,
                    "expected one element");
  AdamWOptions bad = kAdamW;
  bad.step = 0;
  EXPECT_THROW_WITH(call(bad), InvalidArgument, "step: expected 1 or more, got 0");
  bad = kAdamW;
  bad.beta2 = 1.0f;
  EXPECT_THROW_WITH(call(bad), InvalidArgument, "beta2");
  bad = kAdamW;
  bad.lr = kNan;
  EXPECT_THROW_WITH(call(bad), InvalidArgument, "lr");
  expect_same_bits(rig.download(state.param), random_floats(kSize, 1));
}

TEST(Sgd, FollowsTheRule) {
  for (const float momentum : {0.0f, 0.9f}) {
    const auto got = same_bits_everywhere([&](Rig& rig) {
      const Tensor param = rig.upload(random_floats(kSize, 1)), scale = rig.upload({0.5f});
      const Tensor buffer = momentum == 0 ? Tensor() : rig.empty_f32({kSize});
      for (int64_t step = 1; step <= 3; ++step)
        sgd(rig.stream(), param, rig.upload(gradients(step)), buffer, scale,
            {.lr = 0.1f, .momentum = momentum, .weight_decay = 0.01f, .first_step = step == 1});
      return rig.download(param);
    });
    const auto start = random_floats(kSize, 1);
    std::vector<double> p(start.begin(), start.end()), b(kSize, 0.0);
    for (int64_t step = 1; step <= 3; ++step) {
      const auto gradient = gradients(step);
      for (int64_t i = 0; i < kSize; ++i) {
        b[i] = static_cast<double>(momentum) * b[i] + static_cast<double>(gradient[i]) * 0.5;
        p[i] -= static_cast<double>(0.1f) * (b[i] + static_cast<double>(0.01f) * p[i]);
      }
    }
    for (int64_t i = 0; i < kSize; ++i) ASSERT_NEAR(got[i], p[i], 6 * 0x1p-24 * (std::abs(p[i]) + 0.2)) << i;
  }
}

TEST(Sgd, RejectsBadArguments) {
  Rig rig;
  const Tensor param = rig.upload(random_floats(8, 1)), gradient = rig.upload(random_floats(8, 2)),
               scale = rig.upload({1.0f});
  EXPECT_THROW_WITH(sgd(rig.stream(), param, gradient, {}, scale,
                        {.lr = 0.1f, .momentum = 0.9f, .weight_decay = 0, .first_step = true}),
                    InvalidArgument, "sgd: buffer:");
  EXPECT_THROW_WITH(sgd(rig.stream(), param, gradient, {}, scale,
                        {.lr = 0.1f, .momentum = 1.5f, .weight_decay = 0, .first_step = true}),
                    InvalidArgument, "momentum");
  expect_same_bits(rig.download(param), random_floats(8, 1));
}

}  // namespace
}  // namespace polyreme::testing
