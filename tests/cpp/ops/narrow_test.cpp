// Operations on bf16 and fp16: each one gives exactly the rounded result of its fp32 self on the widened
// inputs, on every instruction set; and cast rounds to nearest even.
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

const std::vector<DType> kNarrow = {DType::kBF16, DType::kF16};

struct Format {
  int mantissa_bits, min_exponent, max_exponent;
};

Format format_of(DType dtype) { return dtype == DType::kBF16 ? Format{7, -126, 127} : Format{10, -14, 15}; }

// The value of a finite, non-negative bit pattern.
double value_of(DType dtype, uint16_t bits) {
  const Format format = format_of(dtype);
  const int exponent = bits >> format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int scale = std::max(exponent, 1) - 1 + format.min_exponent - format.mantissa_bits;
  return std::ldexp(mantissa + (exponent > 0 ? 1 << format.mantissa_bits : 0), scale);
}

uint16_t infinity_of(DType dtype) { return dtype == DType::kBF16 ? 0x7f80 : 0x7c00; }

std::vector<uint16_t> download_bits(Rig& rig, const Tensor& tensor) {
  std::vector<uint16_t> bits(static_cast<size_t>(tensor.numel()));
  copy_to_host(rig.stream(), tensor, bits.data());
  rig.synchronize();
  return bits;
}

Tensor empty_of(Rig& rig, DType dtype, const Shape& shape) {
  return empty(rig.device(), dtype, shape, "narrow test");
}

Tensor narrow_random(Rig& rig, DType dtype, const Shape& shape, uint32_t seed, float scale = 1.0f) {
  return rig.upload(dtype, shape, random_floats(static_cast<size_t>(shape.numel()), seed, scale));
}

Tensor widened(Rig& rig, const Tensor& narrow) { return rig.cast_to(DType::kF32, narrow); }

// `narrow` holds what `wide` rounds to; returns it as floats.
std::vector<float> expect_rounded(Rig& rig, const Tensor& narrow, const Tensor& wide, const char* what) {
  const auto got = rig.download(widened(rig, narrow));
  expect_same_bits(got, rig.download(widened(rig, rig.cast_to(narrow.dtype(), wide))), what);
  return got;
}

TEST(Cast, WidensEveryNumberExactly) {
  for (const DType dtype : kNarrow) {
    std::vector<uint16_t> bits;
    for (int i = 0; i < 65536; ++i) bits.push_back(static_cast<uint16_t>(i));
    const auto got = same_bits_everywhere([&](Rig& rig) {
      const Tensor in = empty_of(rig, dtype, {65536});
      copy_from_host(rig.stream(), bits.data(), in);
      const Tensor wide = widened(rig, in);
      const auto back = download_bits(rig, rig.cast_to(dtype, wide));
      for (int i = 0; i < 65536; ++i) {
        const bool nan = (i & 0x7fff) > infinity_of(dtype);
        EXPECT_EQ((back[i] & 0x7fff) > infinity_of(dtype), nan);
        EXPECT_TRUE(nan || back[i] == i);
      }
      return rig.download(wide);
    });
    for (int i = 0; i < infinity_of(dtype); ++i) {
      ASSERT_EQ(got[i], value_of(dtype, static_cast<uint16_t>(i)));
      ASSERT_EQ(got[i + 32768], -got[i]);
    }
    EXPECT_EQ(got[infinity_of(dtype)], kInf);
    EXPECT_TRUE(std::isnan(got[infinity_of(dtype) + 1]));
  }
}

TEST(Cast, RoundsToNearestTiesToEven) {
  for (const DType dtype : kNarrow) {
    std::vector<float> in;
    std::vector<uint16_t> expected;
    for (int i = 0; i < infinity_of(dtype); ++i) {
      const auto bits = static_cast<uint16_t>(i);
      // Beyond the largest number, the one that would follow it counts as infinity.
      const double low = value_of(dtype, bits), high = value_of(dtype, static_cast<uint16_t>(i + 1));
      const auto middle = static_cast<float>(low + (high - low) / 2);
      if (static_cast<double>(middle) != low + (high - low) / 2) continue;  // below the smallest float
      const auto even = static_cast<uint16_t>(i + (i & 1));
      for (const float sign : {1.0f, -1.0f}) {
        const uint16_t sign_bit = sign < 0 ? 0x8000 : 0;
        in.push_back(sign * middle);
        expected.push_back(even | sign_bit);
        in.push_back(sign * std::nextafter(middle, 0.0f));
        expected.push_back(bits | sign_bit);
        in.push_back(sign * std::nextafter(middle, kInf));
        expected.push_back(static_cast<uint16_t>(i + 1) | sign_bit);
      }
    }
    in.push_back(dtype == DType::kF16 ? 1e5f : kInf);
    expected.push_back(infinity_of(dtype));
    same_bits_everywhere([&](Rig& rig) {
      const auto got = download_bits(rig, rig.cast_to(dtype, rig.upload(in)));
      for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(got[i], expected[i]) << in[i];
      return std::vector<float>();
    });
  }
}

TEST(Cast, RejectsBadArguments) {
  Rig rig;
  const Tensor x = rig.upload(std::vector<float>(8, 1.0f));
  EXPECT_THROW_WITH(cast(rig.stream(), rig.upload({8}, std::vector<int32_t>(8)), x), InvalidArgument,
                    "cast: from: expected a contiguous float32, bfloat16 or float16 tensor, got int32[8]");
  EXPECT_THROW_WITH(cast(rig.stream(), x, empty_of(rig, DType::kBF16, {7})), InvalidArgument,
                    "cast: to: expected contiguous bfloat16[8]");
  EXPECT_THROW_WITH(cast(rig.stream(), x, x), InvalidArgument, "memory apart from the inputs");
}

TEST(Narrow, ElementwiseIsRoundedFp32) {
  for (const DType dtype : kNarrow) {
    for (const int64_t n : {int64_t{1}, int64_t{16}, int64_t{100}, (int64_t{1} << 15) + 37}) {
      same_bits_everywhere([&](Rig& rig) {
        const Tensor x = narrow_random(rig, dtype, {n}, 1), y = narrow_random(rig, dtype, {n}, 2);
        const Tensor wide_x = widened(rig, x), wide_y = widened(rig, y), wide = rig.empty_f32({n});
        const Tensor out = empty_of(rig, dtype, {n});
        std::vector<float> all;
        add(rig.stream(), x, y, out);
        add(rig.stream(), wide_x, wide_y, wide);
        append(all, expect_rounded(rig, out, wide, "add"));
        gelu_forward(rig.stream(), x, out);
        gelu_forward(rig.stream(), wide_x, wide);
        append(all, expect_rounded(rig, out, wide, "gelu_forward"));
        gelu_backward(rig.stream(), x, y, out);
        gelu_backward(rig.stream(), wide_x, wide_y, wide);
        append(all, expect_rounded(rig, out, wide, "gelu_backward"));
        const RandomKey key{7, RandomPurpose::kDropout, 3, 5};
        dropout(rig.stream(), x, out, 0.3f, key, 11);
        dropout(rig.stream(), wide_x, wide, 0.3f, key, 11);
        append(all, expect_rounded(rig, out, wide, "dropout"));
        dropout(rig.stream(), x, out, 0.0f, key, 11);
        append(all, expect_rounded(rig, out, wide_x, "dropout of nothing"));
        fill(rig.stream(), out, 1.001f);
        fill(rig.stream(), wide, 1.001f);
        append(all, expect_rounded(rig, out, wide, "fill"));
        return all;
      });
    }
  }
}

TEST(Narrow, LayerNormIsRoundedFp32) {
  constexpr int64_t kRows = 9, kCols = 83;
  for (const DType dtype : kNarrow) {
    for (const DType param_dtype : {DType::kF32, dtype}) {
      same_bits_everywhere([&](Rig& rig) {
        const Tensor x = narrow_random(rig, dtype, {kRows, kCols}, 1),
                     dy = narrow_random(rig, dtype, x.shape(), 2);
        const Tensor gamma = narrow_random(rig, param_dtype, {kCols}, 3),
                     beta = narrow_random(rig, param_dtype, {kCols}, 4);
        const Tensor wide_x = widened(rig, x), wide_dy = widened(rig, dy);
        const Tensor wide_gamma = widened(rig, gamma), wide_beta = widened(rig, beta);
        const Tensor y = empty_of(rig, dtype, x.shape()), wide_y = rig.empty_f32(x.shape());
        const Tensor mean = rig.empty_f32({kRows}), rstd = rig.empty_f32({kRows});
        std::vector<float> all;
        layer_norm_forward(rig.stream(), x, gamma, beta, 1e-5f, y, mean, rstd);
        const auto statistics = rig.download(mean);
        layer_norm_forward(rig.stream(), wide_x, wide_gamma, wide_beta, 1e-5f, wide_y, mean, rstd);
        expect_same_bits(rig.download(mean), statistics, "mean");
        append(all, expect_rounded(rig, y, wide_y, "layer_norm_forward"));
        layer_norm_backward_input(rig.stream(), dy, x, gamma, mean, rstd, y);
        layer_norm_backward_input(rig.stream(), wide_dy, wide_x, wide_gamma, mean, rstd, wide_y);
        append(all, expect_rounded(rig, y, wide_y, "layer_norm_backward_input"));
        const auto start = random_floats(kCols, 5);
        const Tensor dgamma = rig.upload(start), dbeta = rig.upload(start), sums = rig.upload(start);
        layer_norm_backward_weight(rig.stream(), dy, x, mean, rstd, dgamma, dbeta);
        accumulate_rows(rig.stream(), dy, sums);
        const auto gamma_grad = rig.download(dgamma), beta_grad = rig.download(dbeta);
        expect_same_bits(rig.download(sums), beta_grad, "accumulate_rows");
        const Tensor wide_dgamma = rig.upload(start), wide_dbeta = rig.upload(start);
        layer_norm_backward_weight(rig.stream(), wide_dy, wide_x, mean, rstd, wide_dgamma, wide_dbeta);
        expect_same_bits(rig.download(wide_dgamma), gamma_grad, "dgamma");
        expect_same_bits(rig.download(wide_dbeta), beta_grad, "dbeta");
        append(all, gamma_grad);
        return all;
      });
    }
  }
}

TEST(Narrow, AttentionIsRoundedFp32) {
  for (const DType dtype : kNarrow) {
    for (const int64_t seq : {5, 70}) {
      const Shape qkv_shape{2, seq, 3, 2, 20}, out_shape{2, seq, 2, 20};
      same_bits_everywhere([&](Rig& rig) {
        const Tensor qkv = narrow_random(rig, dtype, qkv_shape, 1),
                     dout = narrow_random(rig, dtype, out_shape, 2);
        const Tensor out = empty_of(rig, dtype, out_shape), wide_out = rig.empty_f32(out_shape);
        const Tensor lse = rig.empty_f32({2, 2, seq}), wide_lse = rig.empty_f32({2, 2, seq});
        attention_forward(rig.stream(), qkv, out, lse);
        attention_forward(rig.stream(), widened(rig, qkv), wide_out, wide_lse);
        expect_same_bits(rig.download(lse), rig.download(wide_lse), "log_sum_exp");
        auto all = expect_rounded(rig, out, wide_out, "attention_forward");
        const Tensor dqkv = empty_of(rig, dtype, qkv_shape), wide_dqkv = rig.empty_f32(qkv_shape);
        attention_backward(rig.stream(), qkv, out, lse, dout, dqkv);
        attention_backward(rig.stream(), widened(rig, qkv), widened(rig, out), lse, widened(rig, dout),
                           wide_dqkv);
        append(all, expect_rounded(rig, dqkv, wide_dqkv, "attention_backward"));
        return all;
      });
    }
  }
}

TEST(Narrow, EmbeddingAndLossAreRoundedFp32) {
  constexpr int64_t kVocab = 1500, kSeq = 6, kCols = 21, kRows = 2 * kSeq;
  std::vector<int32_t> tokens;
  for (int i = 0; i < kRows; ++i) tokens.push_back(i * 397 % kVocab);
  tokens[3] = tokens[1];
  for (const DType dtype : kNarrow) {
    same_bits_everywhere([&](Rig& rig) {
      const Tensor ids = rig.upload({2, kSeq}, tokens);
      const Tensor table = narrow_random(rig, dtype, {kVocab, kCols}, 1);
      const Tensor positions = narrow_random(rig, dtype, {kSeq, kCols}, 2);
      const Tensor out = empty_of(rig, dtype, {2, kSeq, kCols}), wide_out = rig.empty_f32(out.shape());
      embedding_forward(rig.stream(), ids, table, positions, out);
      embedding_forward(rig.stream(), ids, widened(rig, table), widened(rig, positions), wide_out);
      auto all = expect_rounded(rig, out, wide_out, "embedding_forward");
      const Tensor zeros = rig.empty_f32({2, kVocab + kSeq, kCols});
      fill(rig.stream(), zeros, 0.0f);
      std::vector<std::vector<float>> grads;
      for (const bool wide : {false, true}) {
        const Tensor half = zeros.slice(0, wide, wide + 1).view({kVocab + kSeq, kCols});
        const Tensor token_grad = half.slice(0, 0, kVocab),
                     position_grad = half.slice(0, kVocab, kVocab + kSeq);
        embedding_backward(rig.stream(), ids, wide ? widened(rig, out) : out, token_grad, position_grad);
        grads.push_back(rig.download(half));
      }
      expect_same_bits(grads[0], grads[1], "embedding_backward");

      const Tensor logits = narrow_random(rig, dtype, {kRows, kVocab}, 3, 3.0f);
      const Tensor wide_logits = widened(rig, logits), targets = ids.view({kRows});
      const Tensor loss = rig.empty_f32({kRows}), wide_loss = rig.empty_f32({kRows}),
                   lse = rig.empty_f32({kRows});
      cross_entropy_forward(rig.stream(), logits, targets, loss, lse);
      cross_entropy_forward(rig.stream(), wide_logits, targets, wide_loss, lse);
      expect_same_bits(rig.download(loss), rig.download(wide_loss), "loss");
      cross_entropy_backward(rig.stream(), logits, targets, lse, 0.25f);
      cross_entropy_backward(rig.stream(), wide_logits, targets, lse, 0.25f);
      append(all, expect_rounded(rig, logits, wide_logits, "cross_entropy_backward"));
      return all;
    });
  }
}

TEST(Narrow, GemmIsRoundedFp32ForEveryMixOfFormats) {
  const std::vector<DType> formats = {DType::kF32, DType::kBF16, DType::kF16};
  // The sizes cross blocks, and with k beyond a step of either level the sums of a narrow c are kept between.
  const std::vector<Shape> sizes = {{3, 5, 0}, {13, 50, 37}, {120, 40, 790}};
  for (const Shape& size : sizes) {
    const int64_t m = size[0], n = size[1], k = size[2];
    same_bits_everywhere([&](Rig& rig) {
      std::vector<float> all;
      for (const DType a_type : formats) {
        for (const DType c_type : formats) {
          const bool transposed = a_type != c_type;
          const DType b_type = a_type == DType::kF32 ? c_type : a_type;
          const Tensor a = narrow_random(rig, a_type, transposed ? Shape{k, m} : Shape{m, k}, 1);
          const Tensor b = narrow_random(rig, b_type, transposed ? Shape{n, k} : Shape{k, n}, 2);
          const Tensor bias = narrow_random(rig, b_type, {n}, 3);
          const auto view = [&](const Tensor& t) { return transposed ? t.transpose(0, 1) : t; };
          const Tensor c = empty_of(rig, c_type, {m, n}), wide_c = rig.empty_f32({m, n});
          gemm(rig.stream(), view(a), view(b), c, false, bias);
          gemm(rig.stream(), view(widened(rig, a)), view(widened(rig, b)), wide_c, false, widened(rig, bias));
          append(all, expect_rounded(rig, c, wide_c, "gemm"));
        }
      }
      return all;
    });
  }
}

TEST(Narrow, GemmAccumulatesInFp32Only) {
  Rig rig;
  const Tensor a = narrow_random(rig, DType::kBF16, {4, 6}, 1),
               b = narrow_random(rig, DType::kBF16, {6, 5}, 2);
  EXPECT_THROW_WITH(gemm(rig.stream(), a, b, empty_of(rig, DType::kBF16, {4, 5}), true), InvalidArgument,
                    "gemm: c: expected float32 to accumulate into, got bfloat16[4, 5]");
  const Tensor c = rig.empty_f32({4, 5}), parts = rig.empty_f32({4, 5});
  gemm(rig.stream(), a, b, c, false);
  gemm(rig.stream(), a.slice(1, 0, 2), b.slice(0, 0, 2), parts, false);
  gemm(rig.stream(), a.slice(1, 2, 6), b.slice(0, 2, 6), parts, true);
  expect_same_bits(rig.download(parts), rig.download(c), "k cut");
}

}  // namespace
}  // namespace polyreme::testing
