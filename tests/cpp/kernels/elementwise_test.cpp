#include "kernels/elementwise.cuh"

#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

constexpr int64_t kCounts[] = {1, 7, 8, 53, 1024, 4099};

// Normal numbers with special ones among them.
template <typename T>
std::vector<float> inputs(int64_t count, uint32_t seed) {
  std::vector<float> values = normals_of<T>(count, seed, 3.0F);
  const float special[] = {0.0F, -0.0F, kInf, -kInf, kNan, 100.0F, -100.0F, 1e-30F, -12.0F};
  for (size_t i = 0; i < std::size(special) && i * 5 + 5 < values.size(); ++i)
    values[i * 5 + seed] = widen(narrow<T>(special[i]));
  return values;
}

struct Case {
  const char* name;
  cudaError_t (*launch)(const PolyremeElementwise&, cudaStream_t);
  void (*cpu)(Stream&, const Tensor& x, const Tensor& y, const Tensor& out);
};
const Case kCases[] = {
    {"add", kernels::launch_add, add},
    {"gelu_forward", kernels::launch_gelu_forward,
     [](Stream& stream, const Tensor& x, const Tensor&, const Tensor& out) { gelu_forward(stream, x, out); }},
    {"gelu_backward", kernels::launch_gelu_backward, gelu_backward},
};

TEST(ElementwiseKernel, HasTheBitsOfTheCpu) {
  for (const Case& c : kCases)
    for_dtypes([&](auto type) {
      using T = decltype(type);
      for (const int64_t count : kCounts) {
        const std::vector<float> x = inputs<T>(count, 1), y = inputs<T>(count, 3);
        Cpu cpu;
        const Tensor wanted = cpu.make({count});
        c.cpu(cpu.stream(), cpu.upload(x), cpu.upload(y), wanted);
        for (const size_t shift : {0, 1}) {
          for_seeds([&] {
            const Array<T> gx(x, shift), gy(y, shift), out(x.size(), shift);
            run<PolyremeElementwise>(c.launch, {gx.data(), gy.data(), out.data(), count, kCodeOf<T>});
            expect_rounded(out, cpu.download(wanted), c.name);
            run<PolyremeElementwise>(c.launch, {gx.data(), gy.data(), gx.data(), count, kCodeOf<T>});
            expect_rounded(gx, cpu.download(wanted), c.name);
          });
        }
      }
    });
}

TEST(ElementwiseKernel, AccumulateAndScaleHaveTheBitsOfTheCpu) {
  for_dtypes([&](auto type) {
    using T = decltype(type);
    for (const int64_t count : kCounts)
      for (const bool finite : {true, false}) {
        std::vector<float> x = normals_of<T>(count, 1);
        const std::vector<float> sums = normals(count, 2);
        if (!finite) x.back() = kInf;
        Cpu cpu;
        const Tensor out = cpu.upload(sums), flag = cpu.upload({1}, std::vector<int32_t>{0}),
                     scaled = cpu.upload(x);
        accumulate(cpu.stream(), cpu.upload(x), out, flag);
        scale(cpu.stream(), scaled, 0.3F);
        for (const size_t shift : {0, 1}) {
          for_seeds([&] {
            const Array<T> gx(x, shift);
            const Array<float> gout(sums, shift);
            const Array<int32_t> gflag(std::vector<int32_t>{0});
            run<PolyremeAccumulate>(kernels::launch_accumulate,
                                    {gx.data(), gout.data(), gflag.data(), count, kCodeOf<T>});
            expect_bits(gout.floats(), cpu.download(out), "accumulate");
            EXPECT_EQ(gflag[0], finite ? 0 : 1);
            run<PolyremeScale>(kernels::launch_scale, {gx.data(), count, 0.3F, kCodeOf<T>});
            expect_rounded(gx, cpu.download(scaled), "scale");
          });
        }
      }
  });
}

TEST(ElementwiseKernel, GeluAgainstFloat64) {
  const auto gelu = [](double x) {
    return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
  };
  for_dtypes([&](auto type) {
    using T = decltype(type);
    const std::vector<float> x = normals_of<T>(777, 5, 2.0F);
    std::vector<double> wanted, slope;
    for (const float a : x) {
      const auto wide = static_cast<double>(a);
      wanted.push_back(gelu(wide));
      slope.push_back((gelu(wide + 1e-5) - gelu(wide - 1e-5)) / 2e-5);
    }
    const std::vector<float> ones(x.size(), 1.0F);
    for_seeds([&] {
      const Array<T> gx(x), dy(ones), y(x.size()), dx(x.size());
      run<PolyremeElementwise>(kernels::launch_gelu_forward, {gx.data(), nullptr, y.data(), 777, kCodeOf<T>});
      expect_near(y, wanted, 1e-6, 0.1, "y");
      run<PolyremeElementwise>(kernels::launch_gelu_backward,
                               {gx.data(), dy.data(), dx.data(), 777, kCodeOf<T>});
      expect_near(dx, slope, 1e-6, 1.0, "dx");
    });
  });
}

TEST(ElementwiseKernel, CastRoundsOnceToNearestEven) {
  for (const int64_t count : kCounts) {
    std::vector<float> x = inputs<float>(count, 2);
    x[0] = 1.0F + 0x1p-8F;  // a tie of bf16
    for_seeds([&] {
      for_dtypes([&](auto from_type) {
        for_dtypes([&](auto to_type) {
          using From = decltype(from_type);
          using To = decltype(to_type);
          for (const size_t shift : {0, 3}) {
            const Array<From> from(x, shift);
            const Array<To> to(x.size());
            run<PolyremeCast>(kernels::launch_cast,
                              {from.data(), to.data(), count, kCodeOf<From>, kCodeOf<To>});
            expect_rounded(to, from.floats(), "cast");
          }
        });
      });
    });
  }
}

TEST(ElementwiseKernel, Fill) {
  for_dtypes([&](auto type) {
    using T = decltype(type);
    for (const int64_t count : kCounts) {
      const Array<T> out(static_cast<size_t>(count), 1);
      start_case(1);
      run<PolyremeFill>(kernels::launch_fill, {out.data(), count, 0.3F, kCodeOf<T>});
      expect_rounded(out, std::vector<float>(static_cast<size_t>(count), 0.3F), "fill");
    }
  });
}

TEST(ElementwiseKernel, SwigluAgainstFloat64) {
  for_dtypes([&](auto type) {
    using T = decltype(type);
    for (const int64_t cols : {1, 5, 8, 64, 100})
      for (const int64_t rows : {1, 3}) {
        const std::vector<float> x = normals_of<T>(rows * cols * 2, 1, 2.0F),
                                 dy = normals_of<T>(rows * cols, 2);
        std::vector<double> y(dy.size()), dx(x.size());
        for (int64_t i = 0; i < rows * cols; ++i) {
          const auto at = static_cast<size_t>(i), gate_at = static_cast<size_t>(i + i / cols * cols),
                     up_at = gate_at + static_cast<size_t>(cols);
          const auto gate = static_cast<double>(x[gate_at]), up = static_cast<double>(x[up_at]);
          const double s = 1.0 / (1.0 + std::exp(-gate)), gradient = static_cast<double>(dy[at]);
          y[at] = gate * s * up;
          dx[up_at] = gradient * gate * s;
          dx[gate_at] = gradient * up * s * (1.0 + gate * (1.0 - s));
        }
        for_seeds([&] {
          const Array<T> gx(x), gdy(dy), out(y.size()), gdx(dx.size());
          run<PolyremeSwiglu>(kernels::launch_swiglu_forward,
                              {gx.data(), nullptr, out.data(), rows, cols, kCodeOf<T>});
          expect_near(out, y, 1e-6, 0.1, "y");
          run<PolyremeSwiglu>(kernels::launch_swiglu_backward,
                              {gx.data(), gdy.data(), gdx.data(), rows, cols, kCodeOf<T>});
          expect_near(gdx, dx, 1e-6, 1.0, "dx");
        });
      }
  });
}

TEST(ElementwiseKernel, SwigluOfLargeGates) {
  start_case(1);
  const Array<float> x(std::vector<float>{-200.0F, 200.0F, 2.0F, 2.0F}), dy(std::vector<float>{1.0F, 1.0F}),
      dx(4);
  run<PolyremeSwiglu>(kernels::launch_swiglu_backward,
                      {x.data(), dy.data(), dx.data(), 1, 2, kCodeOf<float>});
  EXPECT_NEAR(dx[0], 0.0F, 1e-30);
  EXPECT_EQ(dx[1], 2.0F);
  EXPECT_EQ(dx[3], 200.0F);
}

TEST(ElementwiseKernel, WhatItDoesNotTakeIsRefused) {
  const auto i32 = static_cast<int32_t>(DType::kI32);
  EXPECT_EQ(kernels::launch_add({nullptr, nullptr, nullptr, 1, i32}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(kernels::launch_add({nullptr, nullptr, nullptr, -1, 0}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(kernels::launch_add({nullptr, nullptr, nullptr, 0, 0}, nullptr), cudaSuccess);
  EXPECT_EQ(kernels::launch_cast({nullptr, nullptr, 1, 0, i32}, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace polyreme::kernel_test
