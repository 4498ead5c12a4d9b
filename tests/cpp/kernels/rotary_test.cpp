#include "kernels/rotary.cuh"

#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

struct Size {
  int64_t tokens, seq, heads, head_dim, row_stride;
};
constexpr Size kSizes[] = {
    {1, 1, 1, 2, 2}, {6, 3, 2, 6, 12}, {10, 5, 3, 16, 48}, {4, 4, 2, 64, 3 * 128}, {7, 9, 1, 20, 23}};

TEST(RotaryKernel, AgainstFloat64) {
  for (const Size s : kSizes)
    for_dtypes([&](auto type) {
      using T = decltype(type);
      SCOPED_TRACE(concat(s.tokens, " tokens, ", s.heads, " heads of ", s.head_dim));
      const int64_t half = s.head_dim / 2;
      std::vector<float> cosine, sine;
      for (int64_t position = 0; position < s.seq; ++position)
        for (int64_t i = 0; i < half; ++i) {
          const double angle = static_cast<double>(position) *
                               std::pow(1e4, -static_cast<double>(i) / static_cast<double>(half));
          cosine.push_back(static_cast<float>(std::cos(angle)));
          sine.push_back(static_cast<float>(std::sin(angle)));
        }
      const std::vector<float> x = normals_of<T>(s.tokens * s.row_stride, 1);
      for (const bool backward : {false, true}) {
        std::vector<double> wanted(x.begin(), x.end());
        for (int64_t token = 0; token < s.tokens; ++token)
          for (int64_t head = 0; head < s.heads; ++head)
            for (int64_t i = 0; i < half; ++i) {
              const auto at = static_cast<size_t>(token * s.row_stride + head * s.head_dim + i);
              const auto table = static_cast<size_t>(token % s.seq * half + i);
              const auto a = static_cast<double>(x[at]),
                         b = static_cast<double>(x[at + static_cast<size_t>(half)]);
              const auto c = static_cast<double>(cosine[table]);
              const double turn = static_cast<double>(sine[table]) * (backward ? -1 : 1);
              wanted[at] = a * c - b * turn;
              wanted[at + static_cast<size_t>(half)] = b * c + a * turn;
            }
        for_seeds([&] {
          const Array<T> gx(x);
          const Array<float> c(cosine), sn(sine);
          run<PolyremeRotary>(kernels::launch_rotary, {.x = gx.data(),
                                                       .cosine = c.data(),
                                                       .sine = sn.data(),
                                                       .tokens = s.tokens,
                                                       .seq = s.seq,
                                                       .groups = 1,
                                                       .heads = s.heads,
                                                       .head_dim = s.head_dim,
                                                       .row_stride = s.row_stride,
                                                       .backward = backward,
                                                       .dtype = kCodeOf<T>});
          expect_near(gx, wanted, 3e-7, 1.0, "x");
        });
      }
    });
}

TEST(RotaryKernel, TablesAgainstFloat64) {
  for (const auto& [seq, head_dim] : {std::pair<int64_t, int64_t>{1, 2}, {9, 6}, {3000, 8}})
    for_seeds([&] {
      const auto count = static_cast<size_t>(seq * head_dim / 2);
      const Array<float> cosine(count), sine(count);
      run<PolyremeRotaryTable>(kernels::launch_rotary_table,
                               {cosine.data(), sine.data(), seq, head_dim, 1e4});
      std::vector<double> cosines, sines;
      for (int64_t position = 0; position < seq; ++position)
        for (int64_t i = 0; i < head_dim / 2; ++i) {
          const double angle = static_cast<double>(position) *
                               std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
          cosines.push_back(std::cos(angle));
          sines.push_back(std::sin(angle));
        }
      expect_near(cosine, cosines, 1e-7, 1.0, "cosine");
      expect_near(sine, sines, 1e-7, 1.0, "sine");
    });
}

TEST(RotaryKernel, WhatItDoesNotTakeIsRefused) {
  EXPECT_EQ(kernels::launch_rotary(
                {.tokens = 1, .seq = 1, .groups = 1, .heads = 1, .head_dim = 3, .row_stride = 3}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(kernels::launch_rotary(
                {.tokens = 1, .seq = 1, .groups = 1, .heads = 2, .head_dim = 4, .row_stride = 4}, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace polyreme::kernel_test
