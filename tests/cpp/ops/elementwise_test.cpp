// Element-wise operations, random numbers, sums over rows and copies.
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

// Longer than one task, not a multiple of the lanes.
constexpr int64_t kLong = (1 << 15) + 4 * 16 + 5;
const std::vector<int64_t> kSizes = {0, 1, 15, 16, 17, 100, kLong};

double gelu(double x) {
  const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  return x / (1 + std::exp(-2 * u));
}

double gelu_derivative(double x) {
  const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  const double slope = std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
  const double s = 1 / (1 + std::exp(-2 * u));
  return s + x * s * (1 - s) * 2 * slope;
}

TEST(Levels, BothInstructionSetsAreTested) {
  if (supported_isas().size() < 2) GTEST_SKIP() << "this CPU lacks AVX-512; only the AVX2 kernels are tested";
}

TEST(Add, SumsAndAllowsInPlace) {
  for (const int64_t n : kSizes) {
    const auto x = random_floats(n, 1), y = random_floats(n, 2);
    const auto sums = same_bits_everywhere([&](Rig& rig) {
      const Tensor tx = rig.upload(x), ty = rig.upload(y), out = rig.empty_f32({n});
      add(rig.stream(), tx, ty, out);
      auto result = rig.download(out);
      add(rig.stream(), tx, ty, ty);
      expect_same_bits(rig.download(ty), result, "out is y");
      add(rig.stream(), tx, rig.upload(y), tx);
      expect_same_bits(rig.download(tx), result, "out is x");
      return result;
    });
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(sums[i], x[i] + y[i]);
  }
}

TEST(Add, RejectsBadArguments) {
  Rig rig;
  const Tensor x = rig.upload(std::vector<float>(8, 1.0f)), y = rig.upload(std::vector<float>(8, 2.0f));
  const Tensor out = rig.upload(std::vector<float>(8, 3.0f));
  EXPECT_THROW_WITH(add(rig.stream(), x, y.slice(0, 0, 7), out), InvalidArgument,
                    "add: y: expected contiguous float32[8]");
  EXPECT_THROW_WITH(add(rig.stream(), x, y, out.slice(0, 0, 7)), InvalidArgument, "add: out:");
  EXPECT_THROW_WITH(add(rig.stream(), Tensor(), y, out), InvalidArgument, "got an undefined tensor");
  EXPECT_THROW_WITH(add(rig.stream(), x, rig.upload({8}, std::vector<int32_t>(8)), out), InvalidArgument,
                    "int32[8]");
  const Tensor matrix = out.view({2, 4}).transpose(0, 1);
  EXPECT_THROW_WITH(add(rig.stream(), matrix, matrix, matrix), InvalidArgument, "with strides [1, 4]");
  EXPECT_THROW_WITH(add(rig.stream(), out.slice(0, 0, 4), x.slice(0, 0, 4), out.slice(0, 1, 5)),
                    InvalidArgument, "shifted by 4 bytes");
  expect_same_bits(rig.download(out), std::vector<float>(8, 3.0f));
}

TEST(Gelu, IsCloseToDouble) {
  std::vector<float> x;
  for (double v = -12; v < 12; v += 0.00071) x.push_back(static_cast<float>(v));
  for (const float v : {0.0f, -0.0f, 1e-30f, -1e-30f, 100.0f, -100.0f, 1e15f, -1e15f, kNan}) x.push_back(v);
  const auto n = static_cast<int64_t>(x.size());
  const std::vector<float> ones(x.size(), 1.0f);
  const auto values = same_bits_everywhere([&](Rig& rig) {
    const Tensor tx = rig.upload(x), out = rig.empty_f32({n}), dy = rig.upload(ones);
    gelu_forward(rig.stream(), tx, out);
    auto result = rig.download(out);
    gelu_backward(rig.stream(), tx, dy, out);
    const auto slopes = rig.download(out);
    gelu_backward(rig.stream(), tx, dy, dy);
    expect_same_bits(rig.download(dy), slopes, "dx is dy");
    append(result, slopes);
    return result;
  });
  double worst_ulp = 0, worst_far = 0, worst_slope = 0;
  for (int64_t i = 0; i + 1 < n; ++i) {
    const double error = std::abs(values[i] - gelu(x[i]));
    if (x[i] > -2)
      worst_ulp = std::max(worst_ulp, ulp_error(values[i], gelu(x[i])));
    else
      worst_far = std::max(worst_far, error);
    if (std::abs(x[i]) < 1e10)
      worst_slope = std::max(worst_slope, std::abs(values[n + i] - gelu_derivative(x[i])));
  }
  EXPECT_LE(worst_ulp, 8);
  EXPECT_LE(worst_far, 3e-8);
  EXPECT_LE(worst_slope, 4e-7);
  EXPECT_TRUE(std::isnan(values[n - 1]));
  EXPECT_TRUE(std::isnan(values[2 * n - 1]));
  RecordProperty("worst_ulp", std::to_string(worst_ulp));
  RecordProperty("worst_far", std::to_string(worst_far * 1e9) + "e-9");
  RecordProperty("worst_slope", std::to_string(worst_slope * 1e9) + "e-9");
}

TEST(Gelu, IsFiniteAtEveryNumberWhereItsExponentialOverflows) {
  std::vector<float> x;
  for (float v = -10.0605f; v > -10.0615f; v = std::nextafter(v, -11.0f)) x.push_back(v);
  const auto values = same_bits_everywhere([&](Rig& rig) {
    const Tensor tx = rig.upload(x), dy = rig.upload(std::vector<float>(x.size(), 1.0f));
    const Tensor out = rig.empty_f32({static_cast<int64_t>(x.size())});
    gelu_forward(rig.stream(), tx, out);
    auto result = rig.download(out);
    gelu_backward(rig.stream(), tx, dy, out);
    append(result, rig.download(out));
    return result;
  });
  for (const float value : values) ASSERT_NEAR(value, 0.0f, 1e-7);
}

TEST(Gelu, LargeInputsGiveTheLimits) {
  Rig rig;
  const Tensor x = rig.upload({30.0f, 1e10f, -30.0f, -1e10f}), dy = rig.upload(std::vector<float>(4, 1.0f));
  const Tensor out = rig.empty_f32({4});
  gelu_forward(rig.stream(), x, out);
  expect_same_bits(rig.download(out), {30.0f, 1e10f, -0.0f, -0.0f});
  gelu_backward(rig.stream(), x, dy, out);
  const auto slopes = rig.download(out);
  EXPECT_EQ(slopes[0], 1.0f);
  EXPECT_EQ(slopes[1], 1.0f);
  EXPECT_NEAR(slopes[2], 0.0f, 1e-20);
  EXPECT_NEAR(slopes[3], 0.0f, 1e-4);
}

std::vector<float> dropout_of(Rig& rig, const std::vector<float>& x, float p, const RandomKey& key,
                              int64_t first) {
  const Tensor tx = rig.upload(x), y = rig.empty_f32({static_cast<int64_t>(x.size())});
  dropout(rig.stream(), tx, y, p, key, first);
  const auto result = rig.download(y);
  dropout(rig.stream(), tx, tx, p, key, first);
  expect_same_bits(rig.download(tx), result, "in place");
  return result;
}

TEST(Dropout, FollowsItsRuleElementByElement) {
  const RandomKey key{
      .seed = 0x123456789abcdef0, .purpose = RandomPurpose::kDropout, .stream = 7, .step = 11};
  const float p = 0.3f;
  // The last one makes the block number carry into the counter's second word.
  for (const int64_t first : {int64_t{0}, int64_t{1}, int64_t{67}, (int64_t{1} << 34) - 70}) {
    for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{200}, kLong}) {
      const auto x = random_floats(n, 3);
      const auto y = same_bits_everywhere([&](Rig& rig) { return dropout_of(rig, x, p, key, first); });
      const auto keep_scale = static_cast<float>(1.0 / (1.0 - static_cast<double>(p)));
      for (int64_t i = 0; i < n; ++i) {
        const auto element = static_cast<uint64_t>(first + i);
        const uint32_t word = random_block(key, element / 4).word[element % 4];
        ASSERT_EQ(y[i], x[i] * (word >= static_cast<double>(p) * 0x1p32 ? keep_scale : 0.0f))
            << first << " " << i;
      }
    }
  }
}

TEST(Dropout, DoesNotDependOnTheCut) {
  const RandomKey key{.seed = 5, .purpose = RandomPurpose::kDropout};
  const auto x = random_floats(1000, 4);
  Rig rig;
  const auto whole = dropout_of(rig, x, 0.5f, key, 13);
  std::vector<float> parts;
  for (const auto& [begin, end] : {std::pair{0, 1}, {1, 130}, {130, 131}, {131, 1000}})
    append(parts, dropout_of(rig, {x.begin() + begin, x.begin() + end}, 0.5f, key, 13 + begin));
  expect_same_bits(parts, whole);
}

TEST(Dropout, KeepsTheRightShareAndZeroCopies) {
  Rig rig;
  const std::vector<float> ones(100000, 1.0f);
  const RandomKey key{.seed = 5, .purpose = RandomPurpose::kDropout};
  double sum = 0;
  for (const float value : dropout_of(rig, ones, 0.25f, key, 0)) sum += value;
  EXPECT_NEAR(sum / 1e5, 1.0, 0.01);
  const std::vector<float> odd = {1.0f, -0.0f, kNan, kInf, 5e-40f};
  expect_same_bits(dropout_of(rig, odd, 0.0f, key, 3), odd);
  const Tensor x = rig.upload(ones);
  for (const float p : {-0.1f, 1.0f, kNan})
    EXPECT_THROW_WITH(dropout(rig.stream(), x, x, p, key, 0), InvalidArgument, "dropout: p:");
  EXPECT_THROW_WITH(dropout(rig.stream(), x, x, 0.5f, key, -1), InvalidArgument, "first_element");
}

TEST(FillNormal, IsBoxMullerOfTheElementsWords) {
  const RandomKey key{.seed = 42, .stream = 3};
  for (const int64_t first : {int64_t{0}, int64_t{3}, int64_t{1000}}) {
    const auto values = same_bits_everywhere([&](Rig& rig) {
      const Tensor out = rig.empty_f32({kLong});
      fill_normal(rig.stream(), out, 0.02f, key, first);
      return rig.download(out);
    });
    for (int64_t i = 0; i < kLong; ++i) {
      const auto element = static_cast<uint64_t>(first + i);
      const Philox4 block = random_block(key, element / 4);
      const uint64_t pair = element % 4 / 2 * 2;
      const double radius = std::sqrt(-2 * std::log((block.word[pair] + 0.5) * 0x1p-32));
      const double angle = 2 * M_PI * block.word[pair + 1] * 0x1p-32;
      const double expected = 0.02f * radius * (element % 2 == 0 ? std::cos(angle) : std::sin(angle));
      // Half a unit of the last place, and what a sine near its zero loses to the rounding of pi.
      ASSERT_NEAR(values[i], expected, std::abs(expected) * 0x1.01p-24 + 1e-17) << i;
    }
  }
}

TEST(FillNormal, HasTheRightMomentsAndDoesNotDependOnTheCut) {
  Rig rig;
  const RandomKey key{.seed = 9};
  const Tensor out = rig.empty_f32({200000});
  fill_normal(rig.stream(), out, 2.0f, key, 0);
  const auto whole = rig.download(out);
  double sum = 0, square = 0, fourth = 0;
  for (const float value : whole) {
    const double z = value / 2.0;
    sum += z;
    square += z * z;
    fourth += z * z * z * z;
  }
  EXPECT_NEAR(sum / 200000, 0.0, 0.01);
  EXPECT_NEAR(square / 200000, 1.0, 0.015);
  EXPECT_NEAR(fourth / 200000, 3.0, 0.1);
  const Tensor parts = rig.empty_f32({200000});
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 2}, {2, 77}, {77, 200000}})
    fill_normal(rig.stream(), parts.slice(0, begin, end), 2.0f, key, begin);
  expect_same_bits(rig.download(parts), whole);
}

TEST(AccumulateRows, IsOneChainPerColumn) {
  for (const int64_t rows : {0, 1, 3, 4, 9}) {
    for (const int64_t cols : {1, 16, 33, 5000}) {
      const auto x = random_floats(rows * cols, 5), start = random_floats(cols, 6);
      const auto sums = same_bits_everywhere([&](Rig& rig) {
        const Tensor out = rig.upload(start);
        accumulate_rows(rig.stream(), rig.upload({rows, cols}, x), out);
        return rig.download(out);
      });
      for (int64_t c = 0; c < cols; ++c) {
        float expected = start[c];
        for (int64_t r = 0; r < rows; ++r) expected += x[r * cols + c];
        ASSERT_EQ(bits_of(sums[c]), bits_of(expected));
      }
    }
  }
}

TEST(AccumulateRows, DoesNotDependOnTheCut) {
  Rig rig;
  const int64_t rows = 11, cols = 70;
  const Tensor x = rig.upload({rows, cols}, random_floats(rows * cols, 7));
  const Tensor whole = rig.upload(random_floats(cols, 8)), parts = rig.upload(random_floats(cols, 8));
  accumulate_rows(rig.stream(), x, whole);
  for (const auto& [begin, end] : {std::pair{0, 1}, {1, 6}, {6, 11}})
    accumulate_rows(rig.stream(), x.slice(0, begin, end), parts);
  expect_same_bits(rig.download(parts), rig.download(whole));
  EXPECT_THROW_WITH(accumulate_rows(rig.stream(), x, rig.empty_f32({cols + 1})), InvalidArgument,
                    "accumulate_rows: out: expected contiguous float32[70]");
}

TEST(Memory, CopiesEveryDTypeAndChecks) {
  Rig rig;
  std::vector<int64_t> words(300001);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<int64_t>(i * i);
  const Tensor from = rig.upload({300001}, words), to = empty(rig.device(), DType::kI64, {300001}, "to");
  copy(rig.stream(), from, to);
  EXPECT_EQ(rig.download<int64_t>(to), words);
  EXPECT_THROW_WITH(copy(rig.stream(), from, rig.empty_f32({300001})), InvalidArgument, "copy: to:");
  EXPECT_THROW_WITH(copy(rig.stream(), from.slice(0, 0, 10), from.slice(0, 5, 15)), InvalidArgument,
                    "overlaps");
  EXPECT_THROW_WITH(copy_from_host(rig.stream(), nullptr, to), InvalidArgument, "null pointer");
  EXPECT_THROW_WITH(copy_to_host(rig.stream(), from, nullptr), InvalidArgument, "null pointer");
  const Tensor filled = rig.empty_f32({kLong});
  fill(rig.stream(), filled, -1.5f);
  expect_same_bits(rig.download(filled), std::vector<float>(kLong, -1.5f));
  EXPECT_THROW_WITH(fill(rig.stream(), to, 0.0f), InvalidArgument, "fill: out:");
}

}  // namespace
}  // namespace polyreme::testing
