#include "comm/tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "comm/half.h"
#include "comm/half_reference.h"
#include "comm/stream_copy.h"

namespace polyreme {
namespace {

// The tree as text, "((0 1) 2)", by executing the steps.
std::string by_steps(int first, int num_terms) {
  std::vector<std::string> terms;
  for (int t = 0; t < num_terms; ++t) terms.push_back(std::to_string(first + t));
  for (const TreeStep& step : tree_order(num_terms)) {
    auto& into = terms[static_cast<size_t>(step.into)];
    into = "(" + into + " " + terms[static_cast<size_t>(step.from)] + ")";
  }
  return terms[0];
}

// The definition in words: pair neighbours level by level, an odd last one moves up.
std::string by_levels(int num_terms) {
  std::vector<std::string> level;
  for (int t = 0; t < num_terms; ++t) level.push_back(std::to_string(t));
  while (level.size() > 1) {
    std::vector<std::string> next;
    for (size_t i = 0; i < level.size(); i += 2)
      next.push_back(i + 1 < level.size() ? "(" + level[i] + " " + level[i + 1] + ")" : level[i]);
    level = next;
  }
  return level[0];
}

TEST(TreeOrder, PairsNeighboursLevelByLevel) {
  EXPECT_EQ(by_steps(0, 5), "(((0 1) (2 3)) 4)");
  for (int n = 1; n <= 130; ++n) EXPECT_EQ(by_steps(0, n), by_levels(n));
}

TEST(TreeOrder, UsesEachTermOnce) {
  for (int n = 1; n <= 70; ++n) {
    std::set<int> used;
    for (const TreeStep& step : tree_order(n)) {
      EXPECT_LT(step.into, step.from);
      EXPECT_EQ(used.count(step.into), 0u);
      EXPECT_TRUE(used.insert(step.from).second);
    }
    EXPECT_EQ(used.size(), static_cast<size_t>(n - 1));
  }
}

TEST(TreeOrder, AlignedPowerOfTwoBlocksAreSubtrees) {
  for (const int n : {2, 3, 7, 8, 12, 16, 33, 64})
    for (int block = 2; block <= n; block *= 2)
      for (int first = 0; first + block <= n; first += block)
        EXPECT_NE(by_steps(0, n).find(by_steps(first, block)), std::string::npos)
            << n << " " << block << " " << first;
}

TEST(TreeOrder, RefusesNoTerms) { EXPECT_THROW(tree_order(0), InvalidArgument); }

constexpr ReduceOp kAllOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin,
                                ReduceOp::kAverage};

template <typename T>
T combine_plainly(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kMax) return b > a ? b : a;
  if (op == ReduceOp::kMin) return b < a ? b : a;
  if constexpr (std::is_integral_v<T>) {
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return static_cast<T>(op == ReduceOp::kProduct ? x * y : x + y);
  } else {
    return op == ReduceOp::kProduct ? a * b : a + b;
  }
}

// Executes the steps one element at a time.
template <typename T>
std::vector<T> reduce_plainly(ReduceOp op, std::vector<std::vector<T>> terms) {
  const int n = static_cast<int>(terms.size());
  for (const TreeStep& step : tree_order(n))
    for (size_t i = 0; i < terms[0].size(); ++i) {
      T& into = terms[static_cast<size_t>(step.into)][i];
      into = combine_plainly(op, into, terms[static_cast<size_t>(step.from)][i]);
    }
  if (op == ReduceOp::kAverage)
    for (T& value : terms[0]) value = value / static_cast<T>(n);
  return terms[0];
}

template <typename T>
std::vector<const void*> addresses(const std::vector<std::vector<T>>& terms) {
  std::vector<const void*> result;
  for (const auto& term : terms) result.push_back(term.data());
  return result;
}

const std::vector<int> kNumTerms = {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 31, 40};
const std::vector<int64_t> kElements = {0, 1, 5, 511, 512, 513, 1700};

template <typename T>
class TreeReduce : public ::testing::Test {};
using Types = ::testing::Types<float, double, int8_t, uint8_t, int32_t, int64_t>;
TYPED_TEST_SUITE(TreeReduce, Types);

TYPED_TEST(TreeReduce, AppliesTheTreeToEachElement) {
  using T = TypeParam;
  const DType dtype = dtype_of<T>();
  std::mt19937_64 random(7);
  for (const int n : kNumTerms) {
    for (const int64_t count : kElements) {
      std::vector<std::vector<T>> terms(static_cast<size_t>(n), std::vector<T>(static_cast<size_t>(count)));
      for (auto& term : terms)
        for (T& value : term) {
          const auto bits = static_cast<int64_t>(random());
          value = std::is_integral_v<T>
                      ? static_cast<T>(bits)
                      : static_cast<T>(std::ldexp(static_cast<double>(bits % 1000) + 0.5, bits % 5 - 9));
        }
      for (const ReduceOp op : kAllOps) {
        if (!is_reducible(op, dtype)) continue;
        const std::vector<T> expected = reduce_plainly(op, terms);
        std::vector<T> out(static_cast<size_t>(count) + 1, T{42});
        const Reduction whole = Reduction::whole(op, dtype, n);
        tree_reduce(whole, addresses(terms).data(), n, count, out.data());
        EXPECT_EQ(out.back(), T{42});
        out.pop_back();
        EXPECT_EQ(out, expected) << n << " terms, " << count << " elements, " << reduce_op_name(op);

        auto in_place = terms;  // into the last term
        tree_reduce(whole, addresses(in_place).data(), n, count, in_place.back().data());
        EXPECT_EQ(in_place.back(), expected);
      }
    }
  }
}

TEST(TreeReduceBool, AllAndAny) {
  std::mt19937_64 random(8);
  for (const int n : kNumTerms) {
    std::vector<std::vector<uint8_t>> terms(static_cast<size_t>(n), std::vector<uint8_t>(1000));
    for (auto& term : terms)
      for (uint8_t& value : term) value = random() % static_cast<uint64_t>(n) == 0;
    for (const bool inverse : {false, true}) {
      for (auto& term : terms)
        for (uint8_t& value : term) value = inverse ? !value : value;
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kMin}) {
        const bool all = op == ReduceOp::kProduct || op == ReduceOp::kMin;
        std::vector<uint8_t> out(1000, 42), expected(1000, all);
        for (const auto& term : terms)
          for (size_t i = 0; i < term.size(); ++i)
            expected[i] = all ? expected[i] && term[i] : expected[i] || term[i];
        tree_reduce(Reduction::whole(op, DType::kBool, n), addresses(terms).data(), n, 1000, out.data());
        EXPECT_EQ(out, expected) << n << " terms, " << reduce_op_name(op);
      }
    }
  }
  const uint8_t one = 1, two = 2;  // another true than 1, out of a foreign library
  const std::vector<const void*> odd = {&one, &two};
  uint8_t out = 0;
  tree_reduce(Reduction::whole(ReduceOp::kMin, DType::kBool, 2), odd.data(), 2, 1, &out);
  EXPECT_EQ(out, 1);
}

class Halves : public ::testing::TestWithParam<DType> {
 protected:
  const HalfReference& reference = HalfReference::of(GetParam());

  // Equal bits, or both NaN.
  void expect_same(const std::vector<uint16_t>& got, const std::vector<uint16_t>& wanted,
                   const std::string& what) {
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_TRUE(got[i] == wanted[i] || (reference.is_nan(got[i]) && reference.is_nan(wanted[i])))
          << what << ", element " << i << ": " << std::hex << got[i] << ", wanted " << wanted[i];
  }
  std::vector<float> decoded(const std::vector<uint16_t>& bits) {
    std::vector<float> values;
    for (const uint16_t each : bits) values.push_back(static_cast<float>(reference.decode(each)));
    return values;
  }
  std::vector<uint16_t> encoded(const std::vector<float>& values) {
    std::vector<uint16_t> bits;
    for (const float value : values) bits.push_back(reference.encode(static_cast<double>(value)));
    return bits;
  }
  static std::vector<uint16_t> all_patterns() {
    std::vector<uint16_t> bits(65536);
    std::iota(bits.begin(), bits.end(), uint16_t{0});
    return bits;
  }
};

TEST_P(Halves, EveryPatternIsWidenedAndComesBack) {
  const std::vector<uint16_t> bits = all_patterns();
  const std::vector<float> wanted = decoded(bits);
  std::vector<float> wide(bits.size());
  widen(GetParam(), bits.data(), 65536, wide.data());
  for (size_t i = 0; i < bits.size(); ++i)
    ASSERT_TRUE(std::bit_cast<uint32_t>(wide[i]) == std::bit_cast<uint32_t>(wanted[i]) ||
                (std::isnan(wide[i]) && std::isnan(wanted[i])))
        << std::hex << bits[i];
  std::vector<uint16_t> back(bits.size());
  narrow(GetParam(), wide.data(), 65536, back.data());
  expect_same(back, bits, "round trip");
}

// Halfway between neighbours, beside it, beyond the largest, below the smallest, and anywhere.
TEST_P(Halves, RoundsToNearestTiesToEven) {
  std::vector<float> values = {65504,         65519.996F, 65520,   3.3895314e38F,
                               3.3961775e38F, 1e-45F,     -1e-45F, HUGE_VALF};
  for (uint32_t bits = 0; bits < 0x8000; ++bits) {
    const double here = reference.decode(static_cast<uint16_t>(bits));
    const double next = reference.decode(static_cast<uint16_t>(bits + 1));
    if (!std::isfinite(next)) break;
    const auto middle = static_cast<float>((here + next) / 2);
    for (const float value : {middle, std::nextafterf(middle, 0), std::nextafterf(middle, HUGE_VALF)})
      values.insert(values.end(), {value, -value});
  }
  std::mt19937 random(9);
  for (int i = 0; i < 200'000; ++i) values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  std::vector<uint16_t> got(values.size());
  narrow(GetParam(), values.data(), static_cast<int64_t>(values.size()), got.data());
  expect_same(got, encoded(values), "narrow");
}

// A single number goes another way than eight of them: by arithmetic, not by an instruction. Also NaN has the
// same bits.
TEST_P(Halves, OneNumberIsConvertedAsManyAre) {
  std::vector<uint16_t> bits(65536), one(1);
  std::iota(bits.begin(), bits.end(), uint16_t{0});
  std::vector<float> wide(65536), single(1);
  widen(GetParam(), bits.data(), 65536, wide.data());
  std::vector<float> values;
  for (size_t i = 0; i < bits.size(); ++i) {
    widen(GetParam(), &bits[i], 1, single.data());
    ASSERT_EQ(std::bit_cast<uint32_t>(single[0]), std::bit_cast<uint32_t>(wide[i])) << i;
    const uint32_t at = std::bit_cast<uint32_t>(wide[i]);
    for (const uint32_t near : {at, at + 1, at - 1, at + 0x800, at + 0x1000, at + 0x1001, at + 0x8000})
      values.push_back(std::bit_cast<float>(near));
  }
  values.resize(values.size() / 8 * 8);
  std::vector<uint16_t> all(values.size());
  narrow(GetParam(), values.data(), std::ssize(values), all.data());
  for (size_t i = 0; i < values.size(); ++i) {
    narrow(GetParam(), &values[i], 1, one.data());
    ASSERT_EQ(one[0], all[i]) << std::hex << std::bit_cast<uint32_t>(values[i]);
  }
}

// Random patterns: subnormal numbers, infinities, NaN, zeros of both signs and sums that overflow among them.
TEST_P(Halves, AreReducedInFloat32AndRoundedOnce) {
  std::mt19937_64 random(10);
  for (const int n : kNumTerms) {
    for (const int64_t count : {int64_t{1}, int64_t{513}, int64_t{1700}}) {
      std::vector<std::vector<uint16_t>> terms(static_cast<size_t>(n),
                                               std::vector<uint16_t>(static_cast<size_t>(count)));
      std::vector<std::vector<float>> wide;
      for (auto& term : terms) {
        for (uint16_t& value : term) value = static_cast<uint16_t>(random());
        wide.push_back(decoded(term));
      }
      for (const ReduceOp op : kAllOps) {
        if (op == ReduceOp::kMax || op == ReduceOp::kMin) continue;
        const std::vector<float> partial = reduce_plainly(op, wide);
        std::vector<uint16_t> out(static_cast<size_t>(count));
        const Reduction whole = Reduction::whole(op, GetParam(), n);
        tree_reduce(whole, addresses(terms).data(), n, count, out.data());
        expect_same(out, encoded(partial), concat(n, " terms, ", reduce_op_name(op)));
        auto in_place = terms;
        tree_reduce(whole, addresses(in_place).data(), n, count, in_place[0].data());
        expect_same(in_place[0], out, "in place");
      }
    }
  }
}

TEST_P(Halves, MaxAndMinAreExact) {
  std::vector<uint16_t> a = all_patterns(), b = a, out(a.size());
  std::shuffle(b.begin(), b.end(), std::mt19937(11));
  const std::vector<const void*> terms = {a.data(), b.data()};
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
    tree_reduce(Reduction::whole(op, GetParam(), 2), terms.data(), 2, 65536, out.data());
    std::vector<uint16_t> wanted;
    for (size_t i = 0; i < a.size(); ++i) {
      const double x = reference.decode(a[i]), y = reference.decode(b[i]);
      const bool first = op == ReduceOp::kMax ? x > y : x < y;
      wanted.push_back(std::isnan(x) || (first && !std::isnan(y)) ? a[i] : b[i]);
    }
    expect_same(out, wanted, reduce_op_name(op));
  }
}

// Neighbours first, then what they gave, as over hosts: the bits of one call.
TEST_P(Halves, LevelsOfPartialResultsGiveTheSameBits) {
  std::mt19937_64 random(12);
  constexpr int64_t kCount = 1700;
  std::vector<std::vector<uint16_t>> terms(7, std::vector<uint16_t>(kCount));
  for (auto& term : terms)
    for (uint16_t& value : term) value = reference.encode(static_cast<double>(random() % 4000) / 7 - 100);
  for (const ReduceOp op : kAllOps) {
    const Reduction whole = Reduction::whole(op, GetParam(), 7);
    std::vector<uint16_t> wanted(kCount), got(kCount);
    tree_reduce(whole, addresses(terms).data(), 7, kCount, wanted.data());
    std::vector<std::vector<float>> pairs(4, std::vector<float>(kCount)),
        fours(2, std::vector<float>(kCount));
    const auto sources = addresses(terms);
    for (size_t i = 0; i < 4; ++i)
      tree_reduce(whole.partial(GetParam()), &sources[2 * i], i == 3 ? 1 : 2, kCount, pairs[i].data());
    const auto pair_sources = addresses(pairs);
    for (size_t i = 0; i < 2; ++i)
      tree_reduce(whole.partial(DType::kF32), &pair_sources[2 * i], 2, kCount, fours[i].data());
    tree_reduce({op, DType::kF32, GetParam(), 7}, addresses(fours).data(), 2, kCount, got.data());
    EXPECT_EQ(got, wanted) << reduce_op_name(op);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Halves, ::testing::Values(DType::kBF16, DType::kF16),
                         [](const auto& place) { return std::string(dtype_name(place.param)); });

// Whether it is written past the cache (apart from the terms, at the begin of a line) or not.
TEST(TreeReduceLarge, TheWayItIsWrittenChangesNothing) {
  constexpr int64_t kCount = (kStreamedFromBytes >> 2) + 777;
  constexpr size_t kRoom = 2 * kStreamedLine / sizeof(float);
  std::vector<float> a(kCount), b(kCount), out(kCount + kRoom);
  for (int64_t i = 0; i < kCount; ++i) {
    a[static_cast<size_t>(i)] = static_cast<float>(i % 1013) * 0.1f;
    b[static_cast<size_t>(i)] = static_cast<float>(i % 769) * -0.3f;
  }
  void* line = out.data();
  size_t room = out.size() * sizeof(float);
  ASSERT_NE(std::align(kStreamedLine, kCount * sizeof(float), line, room), nullptr);
  const std::array<const void*, 2> terms = {a.data(), b.data()};
  for (const int64_t shift : {0, 1}) {
    float* to = static_cast<float*>(line) + shift;
    to[kCount] = 7.0f;
    tree_reduce(Reduction::whole(ReduceOp::kAverage, DType::kF32, 2), terms.data(), 2, kCount, to);
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(to[i], (a[i] + b[i]) / 2) << i << ", shift " << shift;
    EXPECT_EQ(to[kCount], 7.0f);
  }
}

TEST(TreeReduceSpecial, MaxAndMinPassNanOn) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> a = {nan, 1, 2}, b = {1, nan, 3}, c = {0, 0, 1};
  const std::vector<const void*> terms = {a.data(), b.data(), c.data()};
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
    std::vector<float> out(3);
    tree_reduce(Reduction::whole(op, DType::kF32, 3), terms.data(), 3, 3, out.data());
    EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1]));
    EXPECT_EQ(out[2], op == ReduceOp::kMax ? 3 : 1);
  }
}

TEST(TreeReduceSpecial, ZerosKeepTheirSigns) {
  const std::vector<float> a = {-0.0F, 0.0F, -0.0F, -0.0F}, b = {-0.0F, -0.0F, 0.0F, -0.0F};
  const std::vector<const void*> terms = {a.data(), b.data()};
  std::vector<float> out(4);
  const auto signs = [&](ReduceOp op) {
    tree_reduce(Reduction::whole(op, DType::kF32, 2), terms.data(), 2, 4, out.data());
    return std::vector<bool>{std::signbit(out[0]), std::signbit(out[1]), std::signbit(out[2])};
  };
  EXPECT_EQ(signs(ReduceOp::kSum), (std::vector<bool>{true, false, false}));
  EXPECT_EQ(signs(ReduceOp::kMax), (std::vector<bool>{true, true, false}));  // the later term
  EXPECT_EQ(signs(ReduceOp::kMin), (std::vector<bool>{true, true, false}));
  EXPECT_EQ(signs(ReduceOp::kProduct), (std::vector<bool>{false, true, true}));
}

TEST(TreeReduceSpecial, SubnormalSumsAreNotFlushed) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const std::vector<const void*> terms = {&tiny, &tiny, &tiny};
  float out = 0;
  tree_reduce(Reduction::whole(ReduceOp::kSum, DType::kF32, 3), terms.data(), 3, 1, &out);
  EXPECT_EQ(out, 3 * tiny);
}

TEST(TreeReduceSpecial, AnAverageDoesNotOverflowInSixteenBits) {
  const uint16_t large = 0x7bff;  // 65504, the largest float16
  const std::vector<const void*> terms = {&large, &large, &large, &large};
  uint16_t out = 0;
  tree_reduce(Reduction::whole(ReduceOp::kAverage, DType::kF16, 4), terms.data(), 4, 1, &out);
  EXPECT_EQ(out, large);
  tree_reduce(Reduction::whole(ReduceOp::kSum, DType::kF16, 4), terms.data(), 4, 1, &out);
  EXPECT_EQ(out, 0x7c00);
}

TEST(TreeReduceSpecial, IntegerSumsWrap) {
  const int32_t a = std::numeric_limits<int32_t>::max(), b = 2;
  const std::vector<const void*> terms = {&a, &b};
  int32_t out = 0;
  tree_reduce(Reduction::whole(ReduceOp::kSum, DType::kI32, 2), terms.data(), 2, 1, &out);
  EXPECT_EQ(out, std::numeric_limits<int32_t>::min() + 1);
}

TEST(TreeReduceSpecial, RefusesWhatHasNoMeaning) {
  const void* terms[] = {nullptr};
  const auto refused = [&](const Reduction& reduction) {
    EXPECT_THROW(tree_reduce(reduction, terms, 1, 0, nullptr), InvalidArgument);
  };
  refused(Reduction::whole(ReduceOp::kAverage, DType::kI32, 1));
  refused(Reduction::whole(ReduceOp::kAverage, DType::kBool, 1));
  refused({ReduceOp::kAverage, DType::kF32, DType::kF32, 0});
  refused({ReduceOp::kSum, DType::kF32, DType::kI32});
  refused({ReduceOp::kSum, DType::kBF16, DType::kF16});
  EXPECT_THROW(tree_reduce({}, terms, 0, 0, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace polyreme
