#include "kernels/norm.cuh"

#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

struct Size {
  int64_t rows, cols;
};
// The last two do not fit into shared memory, backward or at all.
constexpr Size kSizes[] = {{1, 1}, {3, 7}, {9, 64}, {5, 100}, {2, 777}, {3, 1024}, {1, 6400}, {2, 12301}};

template <typename T>
struct Inputs {
  std::vector<float> x, gamma, beta, dy;
  explicit Inputs(Size s)
      : x(normals_of<T>(s.rows * s.cols, 1)),
        gamma(normals_of<T>(s.cols, 2)),
        beta(normals_of<T>(s.cols, 3)),
        dy(normals_of<T>(s.rows * s.cols, 4)) {
    for (float& value : x) value = widen(narrow<T>(value + 0.5F));
  }
};

// LayerNorm in the CPU's bits, with parameters of the types T and float.
template <typename T, typename Param>
void check_layer_norm(Size s) {
  const Inputs<T> in(s);
  const auto rows = static_cast<size_t>(s.rows);
  Cpu cpu;
  const Shape shape = {s.rows, s.cols};
  const Tensor x = cpu.upload(shape, in.x), dy = cpu.upload(shape, in.dy), gamma = cpu.upload(in.gamma);
  const Tensor y = cpu.make(shape), dx = cpu.make(shape), mean = cpu.make({s.rows}),
               rstd = cpu.make({s.rows});
  layer_norm_forward(cpu.stream(), x, gamma, cpu.upload(in.beta), 1e-5F, y, mean, rstd);
  layer_norm_backward_input(cpu.stream(), dy, x, gamma, mean, rstd, dx);
  for_seeds([&] {
    const Array<T> gx(in.x), gdy(in.dy), gy(in.x.size());
    const Array<Param> g(in.gamma), b(in.beta);
    const Array<float> gmean(rows), grstd(rows);
    run<PolyremeNormForward>(kernels::launch_norm_forward, {.x = gx.data(),
                                                            .gamma = g.data(),
                                                            .beta = b.data(),
                                                            .y = gy.data(),
                                                            .mean = gmean.data(),
                                                            .rstd = grstd.data(),
                                                            .rows = s.rows,
                                                            .cols = s.cols,
                                                            .eps = 1e-5F,
                                                            .dtype = kCodeOf<T>,
                                                            .param_dtype = kCodeOf<Param>});
    expect_bits(gmean.floats(), cpu.download(mean), "mean");
    expect_bits(grstd.floats(), cpu.download(rstd), "rstd");
    expect_rounded(gy, cpu.download(y), "y");
    // In place.
    run<PolyremeNormBackwardInput>(kernels::launch_norm_backward_input, {.dy = gdy.data(),
                                                                         .x = gx.data(),
                                                                         .gamma = g.data(),
                                                                         .mean = gmean.data(),
                                                                         .rstd = grstd.data(),
                                                                         .dx = gdy.data(),
                                                                         .rows = s.rows,
                                                                         .cols = s.cols,
                                                                         .dtype = kCodeOf<T>,
                                                                         .param_dtype = kCodeOf<Param>});
    expect_rounded(gdy, cpu.download(dx), "dx");
  });
}

TEST(NormKernel, LayerNormHasTheBitsOfTheCpu) {
  for (const Size s : kSizes) {
    SCOPED_TRACE(concat(s.rows, " x ", s.cols));
    for_dtypes([&](auto type) {
      using T = decltype(type);
      check_layer_norm<T, T>(s);
      if (!std::is_same_v<T, float>) check_layer_norm<T, float>(s);
    });
  }
}

// Both norms against float64.
template <typename T>
void check_float64(Size s, bool centred) {
  const Inputs<T> in(s);
  const auto rows = static_cast<size_t>(s.rows), cols = static_cast<size_t>(s.cols);
  const double n = static_cast<double>(s.cols), eps = 1e-5;
  std::vector<double> y(in.x.size()), dx(in.x.size());
  for (size_t row = 0; row < rows; ++row) {
    const auto x = [&](size_t c) { return static_cast<double>(in.x[row * cols + c]); };
    const auto gamma = [&](size_t c) { return static_cast<double>(in.gamma[c]); };
    double mean = 0, square = 0, sum = 0, dot = 0;
    for (size_t c = 0; c < cols; ++c) mean += centred ? x(c) / n : 0;
    for (size_t c = 0; c < cols; ++c) square += (x(c) - mean) * (x(c) - mean) / n;
    const double rstd = 1 / std::sqrt(square + eps);
    const auto g = [&](size_t c) { return static_cast<double>(in.dy[row * cols + c]) * gamma(c); };
    for (size_t c = 0; c < cols; ++c) {
      sum += centred ? g(c) / n : 0;
      dot += g(c) * (x(c) - mean) * rstd / n;
    }
    for (size_t c = 0; c < cols; ++c) {
      const double xhat = (x(c) - mean) * rstd;
      y[row * cols + c] = xhat * gamma(c) + (centred ? static_cast<double>(in.beta[c]) : 0);
      dx[row * cols + c] = rstd * (g(c) - sum - xhat * dot);
    }
  }
  for_seeds([&] {
    const Array<T> gx(in.x), gdy(in.dy), gy(in.x.size()), gdx(in.x.size());
    const Array<T> g(in.gamma), b(in.beta);
    const Array<float> mean(rows), rstd(rows);
    run<PolyremeNormForward>(kernels::launch_norm_forward, {.x = gx.data(),
                                                            .gamma = g.data(),
                                                            .beta = centred ? b.data() : nullptr,
                                                            .y = gy.data(),
                                                            .mean = centred ? mean.data() : nullptr,
                                                            .rstd = rstd.data(),
                                                            .rows = s.rows,
                                                            .cols = s.cols,
                                                            .eps = 1e-5F,
                                                            .dtype = kCodeOf<T>,
                                                            .param_dtype = kCodeOf<T>});
    expect_near(gy, y, 2e-6, 1.0, "y");
    run<PolyremeNormBackwardInput>(kernels::launch_norm_backward_input,
                                   {.dy = gdy.data(),
                                    .x = gx.data(),
                                    .gamma = g.data(),
                                    .mean = centred ? mean.data() : nullptr,
                                    .rstd = rstd.data(),
                                    .dx = gdx.data(),
                                    .rows = s.rows,
                                    .cols = s.cols,
                                    .dtype = kCodeOf<T>,
                                    .param_dtype = kCodeOf<T>});
    // A row of one element has a standard deviation of sqrt(eps): all is magnified by its inverse.
    expect_near(gdx, dx, 3e-6, s.cols == 1 ? 300.0 : 1.0, "dx");
  });
}

TEST(NormKernel, AgainstFloat64) {
  for (const Size s : kSizes) {
    SCOPED_TRACE(concat(s.rows, " x ", s.cols));
    for (const bool centred : {true, false})
      for_dtypes([&](auto type) { check_float64<decltype(type)>(s, centred); });
  }
}

TEST(NormKernel, WhatItDoesNotTakeIsRefused) {
  const int32_t f32 = kCodeOf<float>, bf16 = kCodeOf<BFloat16>;
  EXPECT_EQ(kernels::launch_norm_forward({.rows = 1, .cols = 4, .dtype = f32, .param_dtype = bf16}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(kernels::launch_norm_forward({.rows = 1, .cols = 0, .dtype = f32, .param_dtype = f32}, nullptr),
            cudaErrorInvalidValue);
  float beta = 0;
  EXPECT_EQ(kernels::launch_norm_forward(
                {.beta = &beta, .rows = 1, .cols = 4, .dtype = f32, .param_dtype = f32}, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace polyreme::kernel_test
