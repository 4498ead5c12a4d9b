// The gemm operation: views in, checks, and the chain that the contract names. The kernel's own
// tests are in gemm_test.cpp.
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

constexpr int64_t kM = 13, kK = 37, kN = 50;

TEST(GemmOp, IsOneChainOverKForEveryLayout) {
  const auto a = random_floats(kM * kK, 1), b = random_floats(kK * kN, 2), c = random_floats(kM * kN, 3);
  const auto bias = random_floats(kN, 4);
  std::vector<float> at(a.size()), bt(b.size());
  for (int64_t i = 0; i < kM; ++i)
    for (int64_t k = 0; k < kK; ++k) at[k * kM + i] = a[i * kK + k];
  for (int64_t k = 0; k < kK; ++k)
    for (int64_t j = 0; j < kN; ++j) bt[j * kK + k] = b[k * kN + j];
  for (const bool accumulate : {false, true}) {
    for (const bool with_bias : {false, true}) {
      std::vector<float> expected(kM * kN);
      for (int64_t i = 0; i < kM; ++i) {
        for (int64_t j = 0; j < kN; ++j) {
          float sum = accumulate ? c[i * kN + j] : 0.0f;
          for (int64_t k = 0; k < kK; ++k) sum = std::fma(a[i * kK + k], b[k * kN + j], sum);
          expected[i * kN + j] = with_bias ? sum + bias[j] : sum;
        }
      }
      const auto got = same_bits_everywhere([&](Rig& rig) {
        const Tensor row_a = rig.upload({kM, kK}, a), col_a = rig.upload({kK, kM}, at).transpose(0, 1);
        const Tensor row_b = rig.upload({kK, kN}, b), col_b = rig.upload({kN, kK}, bt).transpose(0, 1);
        std::vector<float> first;
        for (const Tensor& left : {row_a, col_a}) {
          for (const Tensor& right : {row_b, col_b}) {
            const Tensor out = rig.upload({kM, kN}, c);
            gemm(rig.stream(), left, right, out, accumulate, with_bias ? rig.upload(bias) : Tensor());
            const auto result = rig.download(out);
            if (first.empty()) first = result;
            expect_same_bits(result, first);
          }
        }
        return first;
      });
      expect_same_bits(got, expected);
    }
  }
}

TEST(GemmOp, WritesIntoAColumnSlice) {
  Rig rig;
  const auto a = random_floats(kM * kK, 1), b = random_floats(kK * kN, 2);
  const Tensor ta = rig.upload({kM, kK}, a), tb = rig.upload({kK, kN}, b), whole = rig.empty_f32({kM, kN});
  const Tensor parts = rig.empty_f32({kM, kN});
  gemm(rig.stream(), ta, tb, whole, false);
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {1, 33}, {33, kN}})
    gemm(rig.stream(), ta, tb.slice(1, begin, end), parts.slice(1, begin, end), false);
  expect_same_bits(rig.download(parts), rig.download(whole));
}

TEST(GemmOp, EmptyAndRecorded) {
  Rig rig;
  rig.device().recorder().enable(true);
  const Tensor a = rig.empty_f32({3, 0}), b = rig.empty_f32({0, 2}), c = rig.empty_f32({3, 2}),
               bias = rig.upload({1.0f, 2.0f});
  gemm(rig.stream(), a, b, c, false, bias);
  expect_same_bits(rig.download(c), {1, 2, 1, 2, 1, 2});
  rig.device().recorder().clear();
  gemm(rig.stream(), rig.upload({3, 2}, random_floats(6, 1)), rig.upload({2, 2}, random_floats(4, 1)), c,
       false);
  const auto spans = rig.device().recorder().spans();
  ASSERT_FALSE(spans.empty());
  EXPECT_STREQ(spans.back().name, "gemm");
  EXPECT_EQ(spans.back().kind, OpKind::kGemm);
  EXPECT_EQ(spans.back().flops, 2.0 * 3 * 2 * 2);
}

TEST(GemmOp, RejectsBadArgumentsAndWritesNothing) {
  Rig rig;
  Stream& s = rig.stream();
  const Tensor a = rig.upload({3, 4}, random_floats(12, 1)), b = rig.upload({4, 2}, random_floats(8, 2));
  const Tensor c = rig.upload({3, 2}, std::vector<float>(6, 7.0f));
  EXPECT_THROW_WITH(gemm(s, a, a, c, false), InvalidArgument,
                    "a[m,k] x b[k,n] = c[m,n], got a float32[3, 4]");
  EXPECT_THROW_WITH(gemm(s, a, b, c.view({2, 3}), false), InvalidArgument, "c float32[2, 3]");
  EXPECT_THROW_WITH(gemm(s, a.view({12}), b, c, false), InvalidArgument,
                    "gemm: a: expected a float32, bfloat16 or float16 matrix");
  EXPECT_THROW_WITH(gemm(s, a, Tensor(), c, false), InvalidArgument, "gemm: b:");
  EXPECT_THROW_WITH(gemm(s, a, b, c, false, rig.upload({1.0f})), InvalidArgument,
                    "gemm: bias: expected contiguous float32[2]");
  EXPECT_THROW_WITH(gemm(s, a, b, c.view({2, 3}).transpose(0, 1), false), InvalidArgument,
                    "c: expected contiguous rows");
  EXPECT_THROW_WITH(gemm(s, a, b, a.view({12}).slice(0, 0, 6).view({3, 2}), false), InvalidArgument,
                    "overlaps");
  const Tensor cube = rig.upload({3, 4, 2}, random_floats(24, 1));
  Tensor strided = cube.slice(2, 0, 1).transpose(1, 2).slice(1, 0, 1);
  EXPECT_THROW_WITH(gemm(s, strided, b, c, false), InvalidArgument, "gemm: a:");
  expect_same_bits(rig.download(c), std::vector<float>(6, 7.0f));
}

}  // namespace
}  // namespace polyreme::testing
