#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device/cpu/cpu_device.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

struct Sizes {
  int64_t batch, seq, heads, head_dim;
  size_t numel() const { return static_cast<size_t>(batch * seq * heads * head_dim); }
  // Position of (token, part, head, element) in qkv, part 0, 1, 2 = q, k, v; and of its like in out.
  size_t qkv(int64_t b, int64_t t, int64_t part, int64_t h, int64_t c) const {
    return static_cast<size_t>((((b * seq + t) * 3 + part) * heads + h) * head_dim + c);
  }
  size_t out(int64_t b, int64_t t, int64_t h, int64_t c) const {
    return static_cast<size_t>(((b * seq + t) * heads + h) * head_dim + c);
  }
  size_t lse(int64_t b, int64_t h, int64_t t) const { return static_cast<size_t>((b * heads + h) * seq + t); }
  std::string name() const {
    return concat("batch ", batch, " seq ", seq, " heads ", heads, " head_dim ", head_dim);
  }
};

struct Inputs {
  Floats qkv, dout;
};
struct Results {
  Floats out, lse, dqkv;
};

// q and k have the standard deviation `spread`: the scores have about its square.
Inputs random_inputs(const Sizes& sizes, float spread, uint32_t seed = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Inputs in{Floats(3 * sizes.numel()), Floats(sizes.numel())};
  const size_t row = static_cast<size_t>(sizes.heads * sizes.head_dim);
  for (size_t i = 0; i < in.qkv.size(); ++i)
    in.qkv[i] = normal(generator) * (i / row % 3 == 2 ? 1.0f : spread);
  for (float& x : in.dout) x = normal(generator);
  return in;
}

Tensor to_device(Device& device, const Floats& values, const Shape& shape) {
  Tensor tensor = empty(device, DType::kF32, shape, "test");
  const HostMapping mapping(tensor.buffer());
  if (!values.empty()) std::memcpy(tensor.raw_address(), values.data(), values.size() * sizeof(float));
  return tensor;
}

Floats to_host(const Tensor& tensor) {
  const HostMapping mapping(tensor.buffer());
  Floats values(static_cast<size_t>(tensor.numel()));
  if (!values.empty()) std::memcpy(values.data(), tensor.raw_address(), values.size() * sizeof(float));
  return values;
}

// Results of samples [begin, end) of the batch in one call each.
Results run(const Sizes& all, const Inputs& in, const CpuDeviceOptions& options, int64_t begin, int64_t end) {
  const std::unique_ptr<Device> device = make_cpu_device(options);
  const std::unique_ptr<Stream> stream = device->create_stream("compute");
  const int64_t n = end - begin, per_sample = all.seq * all.heads * all.head_dim;
  const auto part = [&](const Floats& v, int64_t stride) {
    return Floats(v.begin() + begin * stride, v.begin() + end * stride);
  };
  const Shape qkv_shape{n, all.seq, 3, all.heads, all.head_dim},
      out_shape{n, all.seq, all.heads, all.head_dim};
  const Tensor qkv = to_device(*device, part(in.qkv, 3 * per_sample), qkv_shape);
  const Tensor dout = to_device(*device, part(in.dout, per_sample), out_shape);
  // What a result held before must not matter.
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Tensor out = to_device(*device, Floats(static_cast<size_t>(n * per_sample), nan), out_shape);
  const Tensor lse =
      to_device(*device, Floats(static_cast<size_t>(n * all.heads * all.seq), nan), {n, all.heads, all.seq});
  const Tensor dqkv = to_device(*device, Floats(static_cast<size_t>(n * 3 * per_sample), nan), qkv_shape);
  attention_forward(*stream, qkv, out, lse);
  attention_backward(*stream, qkv, out, lse, dout, dqkv);
  stream->synchronize();
  return {to_host(out), to_host(lse), to_host(dqkv)};
}
Results run(const Sizes& sizes, const Inputs& in, const CpuDeviceOptions& options = {}) {
  return run(sizes, in, options, 0, sizes.batch);
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
void expect_same_bits(const Results& a, const Results& b, const std::string& what) {
  EXPECT_TRUE(same_bits(a.out, b.out)) << what << ": out";
  EXPECT_TRUE(same_bits(a.lse, b.lse)) << what << ": log_sum_exp";
  EXPECT_TRUE(same_bits(a.dqkv, b.dqkv)) << what << ": dqkv";
}

struct Reference {
  Doubles out, lse, dqkv;
};

// One head of one sample by the definition, in float64.
void reference_head(const Sizes& n, const Inputs& in, int64_t b, int64_t h, Reference& r) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(n.head_dim));
  const auto x = [&](int64_t t, int64_t part, int64_t c) {
    return static_cast<double>(in.qkv[n.qkv(b, t, part, h, c)]);
  };
  const auto dot = [&](const auto& f, const auto& g) {
    double sum = 0;
    for (int64_t c = 0; c < n.head_dim; ++c) sum += f(c) * g(c);
    return sum;
  };
  Doubles p(static_cast<size_t>(n.seq));
  for (int64_t i = 0; i < n.seq; ++i) {
    double largest = -std::numeric_limits<double>::infinity(), sum = 0;
    const size_t seen = static_cast<size_t>(i + 1);
    for (size_t j = 0; j < seen; ++j) {
      const int64_t key = static_cast<int64_t>(j);
      p[j] = scale * dot([&](int64_t c) { return x(i, 0, c); }, [&](int64_t c) { return x(key, 1, c); });
      largest = std::max(largest, p[j]);
    }
    for (size_t j = 0; j < seen; ++j) sum += std::exp(p[j] - largest);
    r.lse[n.lse(b, h, i)] = largest + std::log(sum);
    for (size_t j = 0; j < seen; ++j) {
      p[j] = std::exp(p[j] - largest) / sum;
      for (int64_t c = 0; c < n.head_dim; ++c)
        r.out[n.out(b, i, h, c)] += p[j] * x(static_cast<int64_t>(j), 2, c);
    }
    const auto grad = [&](int64_t c) { return static_cast<double>(in.dout[n.out(b, i, h, c)]); };
    const double row_dot = dot(grad, [&](int64_t c) { return r.out[n.out(b, i, h, c)]; });
    for (size_t j = 0; j < seen; ++j) {
      const int64_t key = static_cast<int64_t>(j);
      const double ds = scale * p[j] * (dot(grad, [&](int64_t c) { return x(key, 2, c); }) - row_dot);
      for (int64_t c = 0; c < n.head_dim; ++c) {
        r.dqkv[n.qkv(b, i, 0, h, c)] += ds * x(key, 1, c);
        r.dqkv[n.qkv(b, key, 1, h, c)] += ds * x(i, 0, c);
        r.dqkv[n.qkv(b, key, 2, h, c)] += p[j] * grad(c);
      }
    }
  }
}

Reference reference(const Sizes& sizes, const Inputs& in) {
  Reference r{Doubles(sizes.numel()), Doubles(static_cast<size_t>(sizes.batch * sizes.heads * sizes.seq)),
              Doubles(3 * sizes.numel())};
  for (int64_t b = 0; b < sizes.batch; ++b)
    for (int64_t h = 0; h < sizes.heads; ++h) reference_head(sizes, in, b, h, r);
  return r;
}

// Distance over length (at least `floor`), both Euclidean. NaN if the results hold one.
double relative_error(const Floats& got, const Doubles& expected, double floor = 0) {
  double distance = 0, length = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    distance += (got[i] - expected[i]) * (got[i] - expected[i]);
    length += expected[i] * expected[i];
  }
  return std::sqrt(distance) / std::max(std::sqrt(length), std::max(floor, 1e-30));
}

// The gradients of q, k and v apart, since they differ in size. Where nearly all weight is on one key (always
// at seq 1), those of q and k cancel to almost nothing: they are measured against a tenth of dout at least.
void expect_close(const Sizes& n, const Inputs& in, const Results& got, double tolerance) {
  const Reference r = reference(n, in);
  EXPECT_LT(relative_error(got.out, r.out), tolerance) << n.name() << ": out";
  EXPECT_LT(relative_error(got.lse, r.lse, 1), tolerance) << n.name() << ": log_sum_exp";
  const size_t row = static_cast<size_t>(n.heads * n.head_dim);
  double floor = 0;
  for (float x : in.dout) floor += 0.01 * x * x;
  for (size_t part = 0; part < 3; ++part) {
    Floats x;
    Doubles y;
    for (size_t i = 0; i < got.dqkv.size(); ++i) {
      if (i / row % 3 != part) continue;
      x.push_back(got.dqkv[i]);
      y.push_back(r.dqkv[i]);
    }
    EXPECT_LT(relative_error(x, y, std::sqrt(floor)), tolerance) << n.name() << ": gradient of "
                                                                 << "qkv"[part];
  }
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
  return names;
}

TEST(AttentionTest, MatchesFloat64OnRaggedShapes) {
  for (const std::string& isa : isas()) {
    for (int64_t seq : {1, 2, 15, 16, 17, 63, 64, 65, 100, 257}) {
      for (int64_t head_dim : {1, 8, 16, 40, 64, 80, 128}) {
        for (int64_t heads : {1, 3}) {
          const Sizes sizes{1, seq, heads, head_dim};
          const Inputs in = random_inputs(sizes, 1);
          expect_close(sizes, in, run(sizes, in, {.isa = isa}), 2e-6);
        }
      }
    }
  }
}

TEST(AttentionTest, MatchesFloat64OnLongAndWide) {
  for (const Sizes sizes : {Sizes{2, 1024, 1, 64}, Sizes{1, 130, 2, 256}, Sizes{1, 70, 1, 250}}) {
    const Inputs in = random_inputs(sizes, 1);
    expect_close(sizes, in, run(sizes, in), 1.5e-6);
  }
}

TEST(AttentionTest, MatchesFloat64OnPeakedSoftmax) {
  // Scores up to about 50: an fp32 score is then off by some 1e-6, and exp() passes that on.
  for (const Sizes sizes : {Sizes{1, 1024, 1, 64}, Sizes{1, 200, 2, 40}}) {
    const Inputs in = random_inputs(sizes, 3.2f);
    expect_close(sizes, in, run(sizes, in), 8e-6);
  }
}

TEST(AttentionTest, HugeScoresNeitherOverflowNorVanish) {
  // One key gets all the weight: out is its value, the gradients of q and k vanish.
  const Sizes sizes{1, 100, 1, 16};
  Inputs in = random_inputs(sizes, 1);
  for (int64_t t = 0; t < sizes.seq; ++t) {
    for (int64_t c = 0; c < 16; ++c) {
      in.qkv[sizes.qkv(0, t, 0, 0, c)] = 1e4f;
      in.qkv[sizes.qkv(0, t, 1, 0, c)] = t == 0 ? 1e4f : -1e4f;
    }
  }
  const Results got = run(sizes, in);
  for (int64_t t = 0; t < sizes.seq; ++t) {
    for (int64_t c = 0; c < 16; ++c) {
      EXPECT_EQ(got.out[sizes.out(0, t, 0, c)], in.qkv[sizes.qkv(0, 0, 2, 0, c)]);
      EXPECT_TRUE(std::isfinite(got.dqkv[sizes.qkv(0, t, 0, 0, c)]));
      EXPECT_TRUE(std::isfinite(got.dqkv[sizes.qkv(0, t, 1, 0, c)]));
    }
  }
}

TEST(AttentionTest, BitsAreEqualOnAllThreadsAndExecutors) {
  for (const Sizes sizes : {Sizes{3, 130, 3, 40}, Sizes{1, 65, 1, 64}, Sizes{2, 17, 5, 24}}) {
    const Inputs in = random_inputs(sizes, 1.5f);
    const Results expected = run(sizes, in);
    for (int threads : {1, 2, 3}) {
      for (CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred}) {
        const std::string what = concat(sizes.name(), ", ", threads, " threads, ",
                                        executor == CpuExecutor::kDeferred ? "deferred" : "immediate");
        expect_same_bits(run(sizes, in, {.num_threads = threads, .executor = executor}), expected, what);
      }
    }
  }
}

TEST(AttentionTest, BitsAreEqualOnAllInstructionSets) {
  if (isas().size() < 2) GTEST_SKIP() << "this CPU has no AVX-512";
  for (int64_t seq : {1, 15, 16, 17, 64, 65, 200}) {
    for (int64_t head_dim : {1, 8, 40, 64, 80, 200}) {
      const Sizes sizes{1, seq, 2, head_dim};
      const Inputs in = random_inputs(sizes, 2);
      expect_same_bits(run(sizes, in, {.isa = "avx512"}), run(sizes, in, {.isa = "avx2"}), sizes.name());
    }
  }
}

TEST(AttentionTest, BitsDoNotDependOnTheBatchAround) {
  const Sizes sizes{5, 129, 2, 48};
  const Inputs in = random_inputs(sizes, 1);
  const Results whole = run(sizes, in);
  for (int64_t cut : {1, 2, 3, 4}) {
    Results parts;
    for (int64_t begin = 0; begin < sizes.batch; begin += cut) {
      const Results part = run(sizes, in, {}, begin, std::min(sizes.batch, begin + cut));
      parts.out.insert(parts.out.end(), part.out.begin(), part.out.end());
      parts.lse.insert(parts.lse.end(), part.lse.begin(), part.lse.end());
      parts.dqkv.insert(parts.dqkv.end(), part.dqkv.begin(), part.dqkv.end());
    }
    expect_same_bits(parts, whole, concat("micro-batches of ", cut));
  }
}

// A head's bits depend on that head alone, so that tensor parallelism can cut between heads.
TEST(AttentionTest, BitsDoNotDependOnTheHeadsAround) {
  const Sizes all{1, 100, 4, 40}, one{1, 100, 1, 40};
  const Inputs in = random_inputs(all, 1);
  const Results whole = run(all, in);
  for (int64_t h = 0; h < all.heads; ++h) {
    Inputs head{Floats(3 * one.numel()), Floats(one.numel())};
    Results expected{Floats(one.numel()), Floats(100), Floats(3 * one.numel())};
    for (int64_t t = 0; t < all.seq; ++t) {
      expected.lse[one.lse(0, 0, t)] = whole.lse[all.lse(0, h, t)];
      for (int64_t c = 0; c < all.head_dim; ++c) {
        head.dout[one.out(0, t, 0, c)] = in.dout[all.out(0, t, h, c)];
        expected.out[one.out(0, t, 0, c)] = whole.out[all.out(0, t, h, c)];
        for (int64_t part = 0; part < 3; ++part) {
          head.qkv[one.qkv(0, t, part, 0, c)] = in.qkv[all.qkv(0, t, part, h, c)];
          expected.dqkv[one.qkv(0, t, part, 0, c)] = whole.dqkv[all.qkv(0, t, part, h, c)];
        }
      }
    }
    expect_same_bits(run(one, head), expected, concat("head ", h));
  }
}

TEST(AttentionTest, LaterTokensChangeNoEarlierBit) {
  const Sizes sizes{1, 150, 2, 24};
  const Inputs in = random_inputs(sizes, 1);
  const Results before = run(sizes, in);
  for (int64_t cut : {1, 15, 16, 63, 64, 66, 128, 149}) {
    for (float value : {100.0f, std::numeric_limits<float>::quiet_NaN()}) {
      Inputs changed = in;
      for (size_t i = sizes.qkv(0, cut, 0, 0, 0); i < in.qkv.size(); ++i) changed.qkv[i] = value;
      const Results after = run(sizes, changed);
      EXPECT_EQ(std::memcmp(before.out.data(), after.out.data(), sizes.out(0, cut, 0, 0) * sizeof(float)), 0)
          << "tokens from " << cut << " on became " << value;
      for (int64_t h = 0; h < sizes.heads; ++h) {
        EXPECT_EQ(std::memcmp(&before.lse[sizes.lse(0, h, 0)], &after.lse[sizes.lse(0, h, 0)],
                              static_cast<size_t>(cut) * sizeof(float)),
                  0);
      }
    }
  }
}

// Gradients flow backwards only: what happens before token `cut` does not reach k and v from there on.
TEST(AttentionTest, EarlierQueriesChangeNoLaterKeyGradient) {
  const Sizes sizes{1, 150, 1, 24};
  const Inputs in = random_inputs(sizes, 1);
  const Results before = run(sizes, in);
  for (int64_t cut : {1, 15, 16, 63, 64, 66, 128, 149}) {
    Inputs changed = in;
    for (size_t i = 0; i < sizes.out(0, cut, 0, 0); ++i)
      changed.dout[i] = std::numeric_limits<float>::quiet_NaN();
    const Results after = run(sizes, changed);
    const size_t from = sizes.qkv(0, cut, 0, 0, 0);
    EXPECT_EQ(std::memcmp(&before.dqkv[from], &after.dqkv[from], (before.dqkv.size() - from) * sizeof(float)),
              0)
        << "gradients of the first " << cut << " tokens became NaN";
  }
}

// A NaN in q reaches its own row, one in k or v the rows of all tokens from there on, and no other.
TEST(AttentionTest, NanReachesTheRowsThatSeeIt) {
  const Sizes sizes{1, 100, 2, 40};
  for (int64_t part : {0, 1, 2}) {
    for (int64_t bad : {0, 5, 63, 64, 70, 99}) {
      Inputs in = random_inputs(sizes, 1);
      in.qkv[sizes.qkv(0, bad, part, 1, 7)] = std::numeric_limits<float>::quiet_NaN();
      const Results got = run(sizes, in);
      for (int64_t t = 0; t < sizes.seq; ++t) {
        const bool seen = part == 0 ? t == bad : t >= bad;
        EXPECT_FALSE(std::isnan(got.out[sizes.out(0, t, 0, 7)])) << "the other head";
        EXPECT_EQ(std::isnan(got.out[sizes.out(0, t, 1, 7)]), seen) << "part " << part << ", token " << t;
        EXPECT_EQ(std::isnan(got.out[sizes.out(0, t, 1, 8)]), seen && part < 2);
        EXPECT_EQ(std::isnan(got.lse[sizes.lse(0, 1, t)]), seen && part < 2);
        EXPECT_EQ(std::isnan(got.dqkv[sizes.qkv(0, t, 0, 1, 7)]), seen) << "gradient of q, token " << t;
        EXPECT_FALSE(std::isnan(got.dqkv[sizes.qkv(0, t, 0, 0, 7)]));
      }
    }
  }
}

TEST(AttentionTest, AnEmptyBatchIsLegal) {
  const Sizes sizes{0, 8, 2, 4};
  const Results got = run(sizes, {});
  EXPECT_TRUE(got.out.empty());
}

// The message of the InvalidArgument that `call` throws.
template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(AttentionTest, RefusesBadArguments) {
  const std::unique_ptr<Device> device = make_cpu_device({});
  const std::unique_ptr<Stream> stream = device->create_stream("compute");
  const auto make = [&](const Shape& shape, DType dtype = DType::kF32) {
    return empty(*device, dtype, shape, "test");
  };
  const Tensor qkv = make({2, 8, 3, 2, 4}), out = make({2, 8, 2, 4}), lse = make({2, 2, 8});
  const Tensor dout = make({2, 8, 2, 4}), dqkv = make({2, 8, 3, 2, 4});
  const auto forward = [&](const Tensor& a, const Tensor& b, const Tensor& c) {
    return message_of([&] { attention_forward(*stream, a, b, c); });
  };
  const auto backward = [&](const Tensor& d, const Tensor& g) {
    return message_of([&] { attention_backward(*stream, qkv, out, lse, d, g); });
  };
  const auto expect_names = [](const std::string& message, std::initializer_list<const char*> parts) {
    for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect_names(forward(make({2, 8, 2, 2, 4}), out, lse),
               {"attention_forward", "qkv", "expected", "[2, 8, 2, 2, 4]"});
  expect_names(forward(make({2, 8, 24}), out, lse), {"attention_forward", "qkv", "expected", "[2, 8, 24]"});
  expect_names(forward({}, out, lse), {"attention_forward", "qkv", "undefined"});
  expect_names(forward(make({2, 8, 3, 2, 4}, DType::kI32), out, lse),
               {"attention_forward", "qkv", "float32"});
  expect_names(forward(qkv.transpose(3, 4), out, lse), {"attention_forward", "qkv", "contiguous"});
  expect_names(forward(qkv, make({2, 8, 8}), lse), {"attention_forward", "out", "[2, 8, 2, 4]", "[2, 8, 8]"});
  expect_names(forward(qkv, out, make({2, 8, 2})),
               {"attention_forward", "log_sum_exp", "[2, 2, 8]", "[2, 8, 2]"});
  expect_names(backward(make({2, 8, 2, 3}), dqkv),
               {"attention_backward", "dout", "[2, 8, 2, 4]", "[2, 8, 2, 3]"});
  expect_names(backward(dout, make({2, 8, 3, 2, 5})), {"attention_backward", "dqkv", "[2, 8, 3, 2, 4]"});
  expect_names(backward(dout, qkv), {"attention_backward", "dqkv", "overlaps"});
  stream->synchronize();
}

}  // namespace
}  // namespace polyreme
