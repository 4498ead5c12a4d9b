#include "kernels/gemm.cuh"

#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

struct Size {
  int64_t m, n, k;
};
constexpr Size kSizes[] = {{1, 1, 1}, {3, 5, 0}, {7, 66, 19}, {65, 64, 16}, {64, 130, 33}, {129, 3, 70}};

// As the CPU's operation has it: [rows, cols], or the transpose of a matrix [cols, rows].
struct Operand {
  bool transposed;
  Tensor view(Cpu& cpu, int64_t rows, int64_t cols, const std::vector<float>& values) const {
    return transposed ? cpu.upload({cols, rows}, values).transpose(0, 1) : cpu.upload({rows, cols}, values);
  }
};

template <typename TA, typename TB, typename TC>
void check_size(Size s) {
  const std::vector<float> a = normals_of<TA>(s.m * s.k, 1), b = normals_of<TB>(s.k * s.n, 2),
                           c = normals_of<TC>(s.m * s.n, 3), bias = normals_of<TB>(s.n, 4);
  for (const bool a_transposed : {false, true})
    for (const bool b_transposed : {false, true})
      for (const bool accumulate : {false, true}) {
        if (accumulate && !std::is_same_v<TC, float>) continue;
        SCOPED_TRACE(concat(s.m, " x ", s.n, " x ", s.k, ", ", a_transposed, b_transposed, accumulate));
        Cpu cpu;
        const Tensor wanted = cpu.upload({s.m, s.n}, c);
        const bool has_bias = a_transposed;
        gemm(cpu.stream(), Operand{a_transposed}.view(cpu, s.m, s.k, a),
             Operand{b_transposed}.view(cpu, s.k, s.n, b), wanted, accumulate,
             has_bias ? cpu.upload(bias) : Tensor{});
        for_seeds([&] {
          const Array<TA> ga(a);
          const Array<TB> gb(b), gbias(bias);
          const Array<TC> gc(c);
          run<PolyremeGemm>(kernels::launch_ordered_gemm, {.a = ga.data(),
                                                           .b = gb.data(),
                                                           .c = gc.data(),
                                                           .bias = has_bias ? gbias.data() : nullptr,
                                                           .m = s.m,
                                                           .n = s.n,
                                                           .k = s.k,
                                                           .a_row = a_transposed ? 1 : s.k,
                                                           .a_column = a_transposed ? s.m : 1,
                                                           .b_row = b_transposed ? 1 : s.n,
                                                           .b_column = b_transposed ? s.k : 1,
                                                           .c_row = s.n,
                                                           .accumulate = accumulate,
                                                           .a_dtype = kCodeOf<TA>,
                                                           .b_dtype = kCodeOf<TB>,
                                                           .c_dtype = kCodeOf<TC>,
                                                           .bias_dtype = kCodeOf<TB>});
          expect_rounded(gc, cpu.download(wanted), "c");
        });
      }
}

TEST(GemmKernel, HasTheBitsOfTheCpu) {
  for (const Size s : kSizes) {
    check_size<float, float, float>(s);
    check_size<BFloat16, BFloat16, float>(s);
    check_size<BFloat16, float, BFloat16>(s);
    check_size<Half, Half, Half>(s);
  }
}

TEST(GemmKernel, AgainstFloat64) {
  const Size s = {70, 33, 129};
  const std::vector<float> a = normals(s.m * s.k, 1), b = normals(s.k * s.n, 2);
  std::vector<double> c(static_cast<size_t>(s.m * s.n));
  for (int64_t i = 0; i < s.m; ++i)
    for (int64_t j = 0; j < s.n; ++j)
      for (int64_t k = 0; k < s.k; ++k)
        c[static_cast<size_t>(i * s.n + j)] += static_cast<double>(a[static_cast<size_t>(i * s.k + k)]) *
                                               static_cast<double>(b[static_cast<size_t>(k * s.n + j)]);
  for_seeds([&] {
    const Array<float> ga(a), gb(b), gc(c.size());
    run<PolyremeGemm>(kernels::launch_ordered_gemm, {.a = ga.data(),
                                                     .b = gb.data(),
                                                     .c = gc.data(),
                                                     .m = s.m,
                                                     .n = s.n,
                                                     .k = s.k,
                                                     .a_row = s.k,
                                                     .a_column = 1,
                                                     .b_row = s.n,
                                                     .b_column = 1,
                                                     .c_row = s.n});
    expect_near(gc, c, 1e-6, std::sqrt(static_cast<double>(s.k)), "c");
  });
}

TEST(GemmKernel, WhatItDoesNotTakeIsRefused) {
  const int32_t bf16 = kCodeOf<BFloat16>, i32 = static_cast<int32_t>(DType::kI32);
  EXPECT_EQ(kernels::launch_ordered_gemm({.m = 1, .n = 1, .k = 1, .accumulate = 1, .c_dtype = bf16}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(kernels::launch_ordered_gemm({.m = 1, .n = 1, .k = 1, .a_dtype = i32}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(kernels::launch_ordered_gemm({.m = 1, .n = 1, .k = -1}, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace polyreme::kernel_test
