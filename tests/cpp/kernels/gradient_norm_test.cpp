#include "kernels/gradient_norm.cuh"

#include "base/exact_sum.h"
#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

constexpr int kLimbs = ExactSum::kLimbs;

std::vector<int64_t> zeros() { return std::vector<int64_t>(kLimbs); }

std::vector<float> wide_range(int64_t count) {
  std::vector<float> values = normals(count, 7);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = std::ldexp(values[i], static_cast<int>(i % 61) * 3 - 90);
  return values;
}

std::vector<int64_t> cpu_limbs(const std::vector<float>& x,
                               void (*op)(Stream&, const Tensor&, const Tensor&)) {
  Cpu cpu;
  const Tensor limbs = cpu.make({kLimbs}, DType::kI64);
  zero_limbs(cpu.stream(), limbs);
  op(cpu.stream(), cpu.upload(x), limbs);
  op(cpu.stream(), cpu.upload({1.5F}), limbs);
  return cpu.download<int64_t>(limbs);
}

TEST(GradientNormKernel, HasTheLimbsOfTheCpu) {
  for (const int64_t count : {1, 5, 1024, 1025, 4096 + 77, 70000}) {
    const std::vector<float> x = wide_range(count);
    std::vector<float> scaled = x;
    for (float& value : scaled) value = value * 0.3F;
    const std::vector<int64_t> plain = cpu_limbs(x, exact_sum_squares),
                               unscaled = cpu_limbs(scaled, exact_sum_squares);
    for (const size_t shift : {0, 1}) {
      for_seeds([&] {
        const Array<float> grad(x, shift), more(std::vector<float>{1.5F}), scale(std::vector<float>{0.3F});
        const Array<int64_t> limbs(zeros()), again(zeros());
        const Array<int32_t> overflow(std::vector<int32_t>{0});
        run<PolyremeGradientNorm>(kernels::launch_gradient_norm,
                                  {grad.data(), nullptr, nullptr, limbs.data(), count});
        run<PolyremeGradientNorm>(kernels::launch_gradient_norm,
                                  {more.data(), nullptr, nullptr, limbs.data(), 1});
        EXPECT_EQ(limbs.values(), plain);
        expect_bits(grad.floats(), x, "only read");
        run<PolyremeGradientNorm>(kernels::launch_gradient_norm,
                                  {grad.data(), scale.data(), overflow.data(), again.data(), count});
        run<PolyremeGradientNorm>(kernels::launch_gradient_norm,
                                  {more.data(), nullptr, nullptr, again.data(), 1});
        EXPECT_EQ(again.values(), unscaled);
        EXPECT_EQ(overflow[0], 0);
        expect_bits(grad.floats(), scaled, "scaled");
      });
    }
  }
}

TEST(GradientNormKernel, NumbersThatAreNotFinite) {
  for (const float bad : {kInf, -kInf, kNan})
    for (const size_t at : {0, 1030, 2047}) {
      std::vector<float> x = normals(2048, 3);
      x[at] = bad;
      for_seeds([&] {
        const Array<float> grad(x), scale(std::vector<float>{0.5F});
        const Array<int32_t> overflow(std::vector<int32_t>{0});
        const Array<int64_t> limbs(zeros());
        run<PolyremeGradientNorm>(kernels::launch_gradient_norm,
                                  {grad.data(), scale.data(), overflow.data(), limbs.data(), 2048});
        EXPECT_EQ(overflow[0], 1);
        const Array<float> factor(1);
        run<PolyremeClipScale>(kernels::launch_clip_scale, {limbs.data(), factor.data(), 1.0, 1.0F});
        EXPECT_TRUE(std::isnan(factor[0]));
      });
    }
}

TEST(GradientNormKernel, ExactSumAndFactorHaveTheBitsOfTheCpu) {
  for (const int64_t count : {1, 100, 9000}) {
    const std::vector<float> x = wide_range(count);
    const std::vector<int64_t> wanted = cpu_limbs(x, exact_sum), squares = cpu_limbs(x, exact_sum_squares);
    for_seeds([&] {
      const Array<float> values(x), more(std::vector<float>{1.5F});
      const Array<int64_t> limbs(zeros());
      run<PolyremeExactSum>(kernels::launch_exact_sum, {values.data(), limbs.data(), count});
      run<PolyremeExactSum>(kernels::launch_exact_sum, {more.data(), limbs.data(), 1});
      EXPECT_EQ(limbs.values(), wanted);
    });
    Cpu cpu;
    for (const float max_norm : {0.0F, 1.0F, 1e30F}) {
      const Tensor limbs = cpu.make({kLimbs}, DType::kI64), scale = cpu.make({1});
      copy_from_host(cpu.stream(), squares.data(), limbs);
      clip_scale(cpu.stream(), limbs, max_norm, scale, 0.25);
      const Array<int64_t> gpu_limbs(squares);
      const Array<float> gpu_scale(1);
      start_case(1);
      run<PolyremeClipScale>(kernels::launch_clip_scale,
                             {gpu_limbs.data(), gpu_scale.data(), 0.25, max_norm});
      expect_bits(gpu_scale.floats(), cpu.download(scale), "factor");
    }
  }
}

TEST(GradientNormKernel, FactorsOfManySums) {
  // Sums with one to many digits, ties and bits far below.
  std::mt19937_64 random(5);
  Cpu cpu;
  for (int round = 0; round < 300; ++round) {
    ExactSum sum;
    const int terms = 1 + static_cast<int>(random() % 4);
    for (int t = 0; t < terms; ++t)
      sum.add(std::ldexp(static_cast<double>(random() >> (random() % 40)),
                         static_cast<int>(random() % 300) - 200));
    if (round % 7 == 0) {
      sum = ExactSum{};
      sum.add(1.0 + 0x1p-52);
      sum.add(0x1p-53);
      if (round % 2 == 0) sum.add(0x1p-900);
    }
    const ExactSum::Limbs limbs = sum.canonical_limbs();
    const double norm = std::sqrt(sum.value());
    const float wanted = norm > 1e-3 ? static_cast<float>(static_cast<double>(1e-3F) / norm) : 1.0F;
    const Array<int64_t> gpu_limbs(std::vector<int64_t>(limbs.begin(), limbs.end()));
    const Array<float> factor(1);
    start_case(1);
    run<PolyremeClipScale>(kernels::launch_clip_scale, {gpu_limbs.data(), factor.data(), 1.0, 1e-3F});
    EXPECT_EQ(bits_of(factor[0]), bits_of(wanted)) << round;
  }
}

}  // namespace
}  // namespace polyreme::kernel_test
