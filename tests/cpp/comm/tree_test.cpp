#include "comm/tree.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>

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

template <typename T>
T combine_plainly(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kMax) return b > a ? b : a;
  if (op == ReduceOp::kMin) return b < a ? b : a;
  return static_cast<T>(a + b);
}

template <typename T>
class TreeReduce : public ::testing::Test {};
using Types = ::testing::Types<float, double, int32_t, int64_t>;
TYPED_TEST_SUITE(TreeReduce, Types);

TYPED_TEST(TreeReduce, AppliesTheTreeToEachElement) {
  using T = TypeParam;
  std::mt19937_64 random(7);
  for (const int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 31, 40}) {
    for (const int64_t count : {0, 1, 5, 511, 512, 513, 1700}) {
      std::vector<std::vector<T>> terms(static_cast<size_t>(n), std::vector<T>(static_cast<size_t>(count)));
      for (auto& term : terms)
        for (T& value : term)
          value = static_cast<T>(std::ldexp(static_cast<double>(random() % 2000) - 1000, random() % 12));
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
        auto expected = terms;
        for (const TreeStep& step : tree_order(n))
          for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
            T& into = expected[static_cast<size_t>(step.into)][i];
            into = combine_plainly(op, into, expected[static_cast<size_t>(step.from)][i]);
          }
        std::vector<const void*> sources;
        for (const auto& term : terms) sources.push_back(term.data());
        std::vector<T> out(static_cast<size_t>(count) + 1, T{42});
        tree_reduce(dtype_of<T>(), op, sources.data(), n, count, out.data());
        EXPECT_EQ(out.back(), T{42});
        out.pop_back();
        EXPECT_EQ(out, expected[0]) << n << " terms, " << count << " elements, " << reduce_op_name(op);

        auto in_place = terms;  // into the last term
        sources.back() = in_place.back().data();
        tree_reduce(dtype_of<T>(), op, sources.data(), n, count, in_place.back().data());
        EXPECT_EQ(in_place.back(), expected[0]);
      }
    }
  }
}

TEST(TreeReduceSpecial, MaxAndMinPassNanOn) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> a = {nan, 1, 2}, b = {1, nan, 3}, c = {0, 0, 1};
  const std::vector<const void*> terms = {a.data(), b.data(), c.data()};
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
    std::vector<float> out(3);
    tree_reduce(DType::kF32, op, terms.data(), 3, 3, out.data());
    EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1]));
    EXPECT_EQ(out[2], op == ReduceOp::kMax ? 3 : 1);
  }
}

TEST(TreeReduceSpecial, IntegerSumsWrap) {
  const int32_t a = std::numeric_limits<int32_t>::max(), b = 2;
  const std::vector<const void*> terms = {&a, &b};
  int32_t out = 0;
  tree_reduce(DType::kI32, ReduceOp::kSum, terms.data(), 2, 1, &out);
  EXPECT_EQ(out, std::numeric_limits<int32_t>::min() + 1);
}

TEST(TreeReduceSpecial, RefusesOtherTypes) {
  const void* terms[] = {nullptr};
  EXPECT_THROW(tree_reduce(DType::kBF16, ReduceOp::kSum, terms, 1, 0, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace polyreme
