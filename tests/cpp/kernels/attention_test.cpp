#include "kernels/attention.cuh"

#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

struct Size {
  int64_t batch, seq, heads, head_dim;
  int64_t numel() const { return batch * seq * heads * head_dim; }
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(head_dim)); }
  std::string text() const { return concat(batch, " x ", seq, " x ", heads, " x ", head_dim); }
};
constexpr Size kSizes[] = {{1, 1, 1, 1}, {2, 5, 2, 3}, {1, 64, 1, 16}, {1, 70, 2, 20}, {1, 130, 1, 66}};

template <typename T>
struct Inputs {
  std::vector<float> qkv, dout;
  explicit Inputs(Size s) : qkv(normals_of<T>(3 * s.numel(), 1)), dout(normals_of<T>(s.numel(), 2)) {}
};
template <typename T>
struct Results {
  Array<T> out, dqkv;
  Array<float> log_sum_exp;
};

// Forward and backward on the emulated GPU; the backward pass takes `out` and `log_sum_exp` of the forward
// pass.
template <typename T>
Results<T> run_both(Size s, const Inputs<T>& in) {
  const Array<T> qkv(in.qkv), dout(in.dout);
  const Results<T> r = {Array<T>(in.dout.size()), Array<T>(in.qkv.size()),
                        Array<float>(static_cast<size_t>(s.batch * s.heads * s.seq))};
  const PolyremeAttention args = {.qkv = qkv.data(),
                                  .out = r.out.data(),
                                  .log_sum_exp = r.log_sum_exp.data(),
                                  .dout = dout.data(),
                                  .dqkv = r.dqkv.data(),
                                  .batch = s.batch,
                                  .seq = s.seq,
                                  .heads = s.heads,
                                  .head_dim = s.head_dim,
                                  .kv_heads = s.heads,
                                  .by_group = 0,
                                  .scale = s.scale(),
                                  .dtype = kCodeOf<T>};
  run(kernels::launch_attention_forward, args);
  run(kernels::launch_attention_backward, args);
  return r;
}

template <typename T>
void check_bits(Size s, const Inputs<T>& in) {
  Cpu cpu;
  const Shape rows = {s.batch, s.seq, 3, s.heads, s.head_dim}, shape = {s.batch, s.seq, s.heads, s.head_dim};
  const Tensor qkv = cpu.upload(rows, in.qkv), out = cpu.make(shape),
               lse = cpu.make({s.batch, s.heads, s.seq}), dqkv = cpu.make(rows);
  attention_forward(cpu.stream(), qkv, out, lse);
  // The backward pass reads `out` as it is stored.
  const Tensor stored = cpu.upload(shape, Array<T>(cpu.download(out)).floats());
  attention_backward(cpu.stream(), qkv, stored, lse, cpu.upload(shape, in.dout), dqkv);
  for_seeds([&] {
    const Results<T> r = run_both(s, in);
    expect_rounded(r.out, cpu.download(out), "out");
    expect_bits(r.log_sum_exp.floats(), cpu.download(lse), "log_sum_exp");
    expect_rounded(r.dqkv, cpu.download(dqkv), "dqkv");
  });
}

TEST(AttentionKernel, HasTheBitsOfTheCpu) {
  for (const Size s : kSizes) {
    SCOPED_TRACE(s.text());
    for_dtypes([&](auto type) { check_bits(s, Inputs<decltype(type)>(s)); });
  }
}

TEST(AttentionKernel, NoNaNPassesToEarlierTokens) {
  const Size s = {1, 70, 1, 8};
  Inputs<float> in(s);
  for (int64_t i = 0; i < 3 * 8; ++i) in.qkv[static_cast<size_t>(66 * 3 * 8 + i)] = kNan;  // token 66
  check_bits(s, in);
  start_case(1);
  const Results<float> r = run_both(s, in);
  for (int64_t i = 0; i < 66 * 8; ++i) EXPECT_FALSE(std::isnan(r.out[static_cast<size_t>(i)])) << i;
}

TEST(AttentionKernel, AgainstFloat64) {
  for (const Size s : kSizes) {
    SCOPED_TRACE(s.text());
    const Inputs<float> in(s);
    const int64_t width = s.heads * s.head_dim;
    const auto at = [&](int64_t b, int64_t t, int64_t which, int64_t h, int64_t c) {
      return static_cast<size_t>(((b * s.seq + t) * 3 + which) * width + h * s.head_dim + c);
    };
    const auto out_at = [&](int64_t b, int64_t t, int64_t h, int64_t c) {
      return static_cast<size_t>((b * s.seq + t) * width + h * s.head_dim + c);
    };
    std::vector<double> out(in.dout.size()), dqkv(in.qkv.size());
    const auto scale = static_cast<double>(s.scale());
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t t = 0; t < s.seq; ++t) {
          std::vector<double> p(static_cast<size_t>(t + 1)), dp(p.size());
          double sum = 0, dot = 0;
          for (int64_t key = 0; key <= t; ++key) {
            double score = 0;
            for (int64_t c = 0; c < s.head_dim; ++c)
              score += static_cast<double>(in.qkv[at(b, t, 0, h, c)]) *
                       static_cast<double>(in.qkv[at(b, key, 1, h, c)]);
            sum += p[static_cast<size_t>(key)] = std::exp(score * scale);
          }
          for (int64_t key = 0; key <= t; ++key) {
            const auto n = static_cast<size_t>(key);
            p[n] /= sum;
            for (int64_t c = 0; c < s.head_dim; ++c) {
              const auto v = static_cast<double>(in.qkv[at(b, key, 2, h, c)]);
              const auto d = static_cast<double>(in.dout[out_at(b, t, h, c)]);
              out[out_at(b, t, h, c)] += p[n] * v;
              dp[n] += d * v;
              dqkv[at(b, key, 2, h, c)] += p[n] * d;
            }
            dot += p[n] * dp[n];
          }
          for (int64_t key = 0; key <= t; ++key) {
            const auto n = static_cast<size_t>(key);
            const double ds = p[n] * (dp[n] - dot) * scale;
            for (int64_t c = 0; c < s.head_dim; ++c) {
              dqkv[at(b, t, 0, h, c)] += ds * static_cast<double>(in.qkv[at(b, key, 1, h, c)]);
              dqkv[at(b, key, 1, h, c)] += ds * static_cast<double>(in.qkv[at(b, t, 0, h, c)]);
            }
          }
        }
    start_case(5);
    const Results<float> r = run_both(s, in);
    expect_near(r.out, out, 3e-6, 1.0, "out");
    expect_near(r.dqkv, dqkv, 1e-5, 1.0, "dqkv");
  }
}

}  // namespace
}  // namespace polyreme::kernel_test
