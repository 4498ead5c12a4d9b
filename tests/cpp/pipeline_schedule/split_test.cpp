// Layers over chunks: every layer once, no chunk empty, and the best of all splits.
#include "pipeline/schedule/split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "base/error.h"
#include "common/error_text.h"

namespace polyreme::pipeline {
namespace {

using polyreme::testing::error_text;
using polyreme::testing::expect_parts;

double dearest(const std::vector<double>& costs, const std::vector<int>& counts) {
  double most = 0;
  auto at = costs.begin();
  for (const int count : counts) {
    most = std::max(most, std::accumulate(at, at + count, 0.0));
    at += count;
  }
  return most;
}

// Calls body(counts) for every way to give `layers` layers to `chunks` chunks.
void for_splits(int layers, int chunks, std::vector<int>& counts,
                const std::function<void(const std::vector<int>&)>& body) {
  if (chunks == 0) {
    if (layers == 0) body(counts);
    return;
  }
  for (int count = 1; count <= layers - (chunks - 1); ++count) {
    counts.push_back(count);
    for_splits(layers - count, chunks - 1, counts, body);
    counts.pop_back();
  }
}

TEST(SplitLayers, NoOtherSplitIsBetter) {
  std::mt19937 random(1);
  for (int layers = 1; layers <= 9; ++layers)
    for (int chunks = 1; chunks <= layers; ++chunks)
      for (int round = 0; round < 5; ++round) {
        std::vector<double> costs(static_cast<size_t>(layers));
        for (double& cost : costs) cost = round == 0 ? 1 : static_cast<double>(random() % 8);
        const std::vector<int> counts = split_layers(costs, chunks);
        EXPECT_NO_THROW(check_split(counts, layers, chunks));
        std::vector<int> other;
        for_splits(layers, chunks, other,
                   [&](const auto& split) { EXPECT_LE(dearest(costs, counts), dearest(costs, split)); });
        if (round == 0) {
          const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
          EXPECT_LE(*most - *least, 1);
        }
      }
}

TEST(SplitLayers, ADearHeadGetsAStageOfItsOwn) {
  EXPECT_EQ(split_layers(std::vector<double>{0, 1, 1, 1, 1, 1, 1, 5.4}, 2), (std::vector<int>{7, 1}));
  EXPECT_EQ(split_layers(std::vector<double>{0, 1, 1, 1, 1, 1, 1, 0}, 3), (std::vector<int>{3, 2, 3}));
}

// O-PP-01: every layer on one stage, or refused with both numbers.
TEST(SplitLayers, O_PP_01_LayersThatDoNotDivide) {
  for (const int layers : {5, 7, 10, 30})
    for (const int chunks : {2, 3, 4, 6, 8}) {
      const std::vector<double> costs(static_cast<size_t>(layers), 1.0);
      if (layers < chunks) {
        expect_parts(error_text<InvalidArgument>([&] { split_layers(costs, chunks); }),
                     {concat(layers, " layers cannot fill ", chunks, " chunks"),
                      concat("use at most ", layers, " chunks")});
        continue;
      }
      const std::vector<int> counts = split_layers(costs, chunks);
      EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), 0), layers);
    }
}

TEST(SplitLayers, AListOfTheUserIsChecked) {
  const auto refusal = [](const std::vector<int>& counts) {
    return error_text<InvalidArgument>([&] { check_split(counts, 7, 3); });
  };
  EXPECT_NO_THROW(check_split(std::vector<int>{1, 5, 1}, 7, 3));
  expect_parts(refusal({3, 4}), {"[3, 4] has 2 numbers", "each of 3 chunks", "[3, 2, 2]"});
  expect_parts(refusal({3, 0, 4}), {"gives chunk 1 0 layers", "at least 1"});
  expect_parts(refusal({3, 3, 3}), {"has 9 layers; the model has 7", "[3, 2, 2]"});
  expect_parts(error_text<InvalidArgument>([] {
                 split_layers(std::vector<double>{1, -1}, 1);
               }),
               {"layer 1 costs -1"});
}

TEST(SplitLayers, IsFastForDeepModels) {
  const std::vector<int> counts = split_layers(std::vector<double>(500, 1.0), 64);
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), 0), 500);
}

}  // namespace
}  // namespace polyreme::pipeline
