#include "kernels/optimizer.cuh"

#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

constexpr int64_t kCounts[] = {1, 3, 4, 37, 1024, 2051};

struct Inputs {
  std::vector<float> param, grad, m, v;
  explicit Inputs(int64_t count)
      : param(normals(count, 1)), grad(normals(count, 2)), m(normals(count, 3, 0.1F)), v(normals(count, 4)) {
    for (float& x : v) x = x * x;
  }
};

template <typename Weight>
PolyremeUpdate update_of(const Array<float>& param, const Array<float>& grad, const Array<float>& scale,
                         const Array<Weight>& weight) {
  return {param.data(),
          grad.data(),
          scale.data(),
          weight.data(),
          kCodeOf<Weight>,
          0,
          static_cast<int64_t>(param.size())};
}

TEST(OptimizerKernel, AdamWHasTheBitsOfTheCpu) {
  const AdamWOptions options = {
      .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .step = 3};
  for_dtypes([&](auto type) {
    using Weight = decltype(type);
    for (const int64_t count : kCounts) {
      const Inputs in(count);
      Cpu cpu;
      const Tensor param = cpu.upload(in.param), m = cpu.upload(in.m), v = cpu.upload(in.v);
      adamw(cpu.stream(), param, cpu.upload(in.grad), m, v, cpu.upload({0.5F}), options);
      for (const size_t shift : {0, 1}) {
        for_seeds([&] {
          const Array<float> p(in.param, shift), g(in.grad, shift), gm(in.m, shift), gv(in.v, shift),
              scale(std::vector<float>{0.5F});
          const Array<Weight> weight(in.param.size());
          run<PolyremeAdamW>(kernels::launch_adamw,
                             {.update = update_of(p, g, scale, weight),
                              .m = gm.data(),
                              .v = gv.data(),
                              .new_m = static_cast<float>(1.0 - 0.9),
                              .keep_v = 0.95F,
                              .new_v = static_cast<float>(1.0 - 0.95),
                              .sqrt_bias2 = static_cast<float>(std::sqrt(1.0 - 0.95 * (0.95 * 0.95))),
                              .eps = 1e-8F,
                              .step_size = static_cast<float>(1e-3 / (1.0 - 0.9 * (0.9 * 0.9))),
                              .decay = static_cast<float>(1.0 - 1e-3 * 0.1)});
          expect_bits(p.floats(), cpu.download(param), "param");
          expect_bits(gm.floats(), cpu.download(m), "m");
          expect_bits(gv.floats(), cpu.download(v), "v");
          expect_rounded(weight, cpu.download(param), "weight");
        });
      }
    }
  });
}

TEST(OptimizerKernel, SgdHasTheBitsOfTheCpu) {
  for (const double momentum : {0.0, 0.9})
    for (const bool first_step : {true, false})
      for (const int64_t count : kCounts) {
        const Inputs in(count);
        Cpu cpu;
        const Tensor param = cpu.upload(in.param), buffer = cpu.upload(in.m);
        sgd(cpu.stream(), param, cpu.upload(in.grad), momentum > 0 ? buffer : Tensor{}, cpu.upload({2.0F}),
            {.lr = 0.01, .momentum = momentum, .weight_decay = 0.1, .first_step = first_step});
        for_seeds([&] {
          const Array<float> p(in.param), g(in.grad), b(in.m), scale(std::vector<float>{2.0F});
          const Array<BFloat16> weight(in.param.size());
          run<PolyremeSgd>(kernels::launch_sgd, {.update = update_of(p, g, scale, weight),
                                                 .buffer = momentum > 0 ? b.data() : nullptr,
                                                 .momentum = static_cast<float>(momentum),
                                                 .lr = 0.01F,
                                                 .decay = static_cast<float>(1.0 - 0.01 * 0.1),
                                                 .first_step = first_step});
          expect_bits(p.floats(), cpu.download(param), "param");
          if (momentum > 0) expect_bits(b.floats(), cpu.download(buffer), "buffer");
          expect_rounded(weight, cpu.download(param), "weight");
        });
      }
}

TEST(OptimizerKernel, LionAgainstFloat64) {
  const double lr = 0.01, beta1 = 0.9, beta2 = 0.99, decay = 0.1;
  for (const int64_t count : kCounts) {
    Inputs in(count);
    in.grad[0] = in.m[0] = 0.0F;  // no direction
    std::vector<double> param, m;
    for (size_t i = 0; i < in.param.size(); ++i) {
      const double g = 0.5 * static_cast<double>(in.grad[i]), old = static_cast<double>(in.m[i]);
      const double u = beta1 * old + (1 - beta1) * g;
      const double sign = u > 0 ? 1.0 : u < 0 ? -1.0 : 0.0;
      param.push_back(static_cast<double>(in.param[i]) * (1 - lr * decay) - lr * sign);
      m.push_back(beta2 * old + (1 - beta2) * g);
    }
    for_seeds([&] {
      const Array<float> p(in.param), g(in.grad), gm(in.m), scale(std::vector<float>{0.5F});
      const Array<Half> weight(in.param.size());
      run<PolyremeLion>(kernels::launch_lion, {.update = update_of(p, g, scale, weight),
                                               .m = gm.data(),
                                               .new_u = static_cast<float>(1 - beta1),
                                               .new_m = static_cast<float>(1 - beta2),
                                               .lr = static_cast<float>(lr),
                                               .decay = static_cast<float>(1 - lr * decay)});
      expect_near(p, param, 3e-7, 0.01, "param");
      expect_near(gm, m, 3e-7, 0.1, "m");
      expect_rounded(weight, p.floats(), "weight");
    });
  }
}

TEST(OptimizerKernel, AScaleThatIsNaNChangesNothing) {
  const Inputs in(77);
  for_seeds([&] {
    const Array<float> p(in.param), g(in.grad), m(in.m), v(in.v), scale(std::vector<float>{kNan});
    const Array<float> weight(in.m);
    run<PolyremeAdamW>(kernels::launch_adamw,
                       {.update = update_of(p, g, scale, weight), .m = m.data(), .v = v.data()});
    expect_bits(p.floats(), in.param, "param");
    expect_bits(m.floats(), in.m, "m");
    expect_bits(weight.floats(), in.m, "weight");
  });
}

}  // namespace
}  // namespace polyreme::kernel_test
