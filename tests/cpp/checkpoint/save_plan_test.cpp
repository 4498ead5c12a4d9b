#include "checkpoint/save_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "base/error.h"

namespace polyreme {
namespace {

using Held = std::vector<std::vector<PlanPiece>>;

// Every element is written once, by a rank that holds it; returns the bytes of each rank.
std::vector<int64_t> check(const std::vector<PlanTensor>& tensors, const Held& held,
                           const std::vector<int32_t>& classes, int64_t min_cut_bytes = 1) {
  std::vector<std::vector<int>> written;
  for (const PlanTensor& tensor : tensors) written.emplace_back(static_cast<size_t>(tensor.num_elements));
  std::vector<int64_t> loads;
  for (size_t r = 0; r < classes.size(); ++r) {
    const SavePlan plan = plan_save(tensors, held, classes, static_cast<int32_t>(r), min_cut_bytes);
    int64_t bytes = 0;
    for (const PlanPiece& piece : plan.pieces) {
      bytes += (piece.end - piece.begin) * tensors[static_cast<size_t>(piece.tensor)].item_bytes;
      for (int64_t i = piece.begin; i < piece.end; ++i) {
        ++written[static_cast<size_t>(piece.tensor)][static_cast<size_t>(i)];
        EXPECT_TRUE(std::ranges::any_of(
            held[static_cast<size_t>(classes[r])],
            [&](const PlanPiece& h) { return h.tensor == piece.tensor && h.begin <= i && i < h.end; }))
            << "rank " << r << " element " << i;
      }
    }
    EXPECT_EQ(bytes, plan.bytes_of_rank[r]);
    EXPECT_TRUE(r == 0 || plan.bytes_of_rank == loads);
    loads = plan.bytes_of_rank;
  }
  for (const std::vector<int>& counts : written)
    for (const int count : counts) EXPECT_EQ(count, 1);
  return loads;
}

TEST(SavePlan, DealsReplicatedTensorsOutEvenly) {
  const std::vector<PlanTensor> tensors = {{"a", 1000, 4}, {"b", 10, 4}, {"empty", 0, 4}};
  const Held held = {{{0, 0, 1000}, {1, 0, 10}}};
  for (const int32_t ranks : {1, 2, 3, 7}) {
    const std::vector<int64_t> loads = check(tensors, held, std::vector<int32_t>(static_cast<size_t>(ranks)));
    EXPECT_LE(std::ranges::max(loads) - std::ranges::min(loads), 8) << ranks;
  }
}

TEST(SavePlan, FillsUpRanksThatHaveLessOfTheirOwn) {
  // Shards of different sizes (class = rank), and a replicated tensor that evens them out.
  const std::vector<PlanTensor> tensors = {{"sharded", 600, 4}, {"shared", 1200, 4}};
  const Held held = {{{0, 0, 100}, {1, 0, 1200}}, {{0, 100, 600}, {1, 0, 1200}}, {{1, 0, 1200}}};
  const std::vector<int64_t> loads = check(tensors, held, {0, 1, 2});
  EXPECT_EQ(loads, (std::vector<int64_t>{2400, 2400, 2400}));
}

TEST(SavePlan, KeepsSmallTensorsWhole) {
  std::vector<PlanTensor> tensors;
  Held held(1);
  for (int32_t t = 0; t < 50; ++t) {
    tensors.push_back({"t", 100, 4});
    held[0].push_back({t, 0, 100});
  }
  const std::vector<int32_t> classes(4);
  const std::vector<int64_t> loads = check(tensors, held, classes, 1 << 20);
  EXPECT_LE(std::ranges::max(loads) - std::ranges::min(loads), 800);
  for (int32_t r = 0; r < 4; ++r)
    for (const PlanPiece& piece : plan_save(tensors, held, classes, r, 1 << 20).pieces)
      EXPECT_EQ(piece.end - piece.begin, 100);
}

TEST(SavePlan, RandomHoldings) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random); };
    std::vector<PlanTensor> tensors;
    for (int64_t t = below(5) + 1; t > 0; --t) tensors.push_back({"t", below(60), int64_t{1} << below(4)});
    Held held(static_cast<size_t>(below(4) + 1));
    for (size_t t = 0; t < tensors.size(); ++t) {
      const auto index = static_cast<int32_t>(t);
      const int64_t n = tensors[t].num_elements;
      for (std::vector<PlanPiece>& pieces : held)
        for (int64_t k = below(3); k > 0; --k) {
          const int64_t begin = below(n + 1), end = begin + below(n + 1 - begin);
          pieces.push_back({index, begin, end});
        }
      held[static_cast<size_t>(below(static_cast<int64_t>(held.size())))].push_back({index, 0, n});
    }
    std::vector<int32_t> classes(held.size() + static_cast<size_t>(below(4)));
    for (size_t r = 0; r < classes.size(); ++r) classes[r] = static_cast<int32_t>(r % held.size());
    check(tensors, held, classes, 1 << below(8));
  }
}

TEST(SavePlan, NamesWhatNobodyHolds) {
  const std::vector<PlanTensor> tensors = {{"w", 10, 4}};
  const auto text = [&](const Held& held) {
    try {
      plan_save(tensors, held, std::vector<int32_t>{0}, 0);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(text({{{0, 0, 4}, {0, 6, 10}}}).find("'w': no rank holds its elements 4 to 6 of 10"),
            std::string::npos);
  EXPECT_NE(text({{}}).find("elements 0 to 10"), std::string::npos);
  EXPECT_NE(text({{{0, 0, 11}}}).find("holds elements 0 to 11 of 10"), std::string::npos);
  EXPECT_NE(text({{{1, 0, 1}}}).find("tensor 1 of 1"), std::string::npos);
}

// ZeRO over many ranks: replicated weights, moments cut over all ranks. See test_checkpoint_plan.py for the
// size that counts.
TEST(SavePlan, ManyRanks) {
  constexpr int32_t kRanks = 64, kTensors = 200;
  constexpr int64_t kElements = 6400;
  std::vector<PlanTensor> tensors;
  Held held(kRanks);
  for (int32_t t = 0; t < kTensors; ++t) {
    tensors.push_back({"w", kElements, 4});
    tensors.push_back({"m", kElements, 4});
    for (int32_t r = 0; r < kRanks; ++r) {
      held[static_cast<size_t>(r)].push_back({2 * t, 0, kElements});
      held[static_cast<size_t>(r)].push_back(
          {2 * t + 1, r * kElements / kRanks, (r + 1) * kElements / kRanks});
    }
  }
  std::vector<int32_t> classes(kRanks);
  std::iota(classes.begin(), classes.end(), 0);
  const SavePlan plan = plan_save(tensors, held, classes, 5, 1024);
  const int64_t total = 2 * kTensors * kElements * 4;
  EXPECT_EQ(std::accumulate(plan.bytes_of_rank.begin(), plan.bytes_of_rank.end(), int64_t{0}), total);
  for (const int64_t bytes : plan.bytes_of_rank) EXPECT_NEAR(bytes, total / kRanks, 2048);
}

}  // namespace
}  // namespace polyreme
