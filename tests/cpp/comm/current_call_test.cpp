#include "comm/shared_memory/current_call.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace polyreme {
namespace {

// Calls of every operation, dtype and reduction, which differ from each other in one field at least.
std::vector<CollectiveCall> many_calls() {
  std::vector<CollectiveCall> calls;
  for (int op = 0; op <= static_cast<int>(CollectiveOp::kSplit); ++op)
    for (int dtype = 0; dtype <= static_cast<int>(DType::kBool); ++dtype)
      for (int reduce = 0; reduce <= static_cast<int>(ReduceOp::kAverage); ++reduce)
        for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{1} << 40}) {
          CollectiveCall call{.sequence = uint64_t{1} << 40,
                              .count = count,
                              .op = static_cast<CollectiveOp>(op),
                              .dtype = static_cast<DType>(dtype),
                              .reduce = static_cast<ReduceOp>(reduce)};
          if (call.op == CollectiveOp::kBroadcast) call.root = 1023;
          if (call.op == CollectiveOp::kAllGather) call.counts_hash = ~uint64_t{0};
          calls.push_back(call);
        }
  return calls;
}

TEST(PackedCall, KeepsAllOfACall) {
  for (const CollectiveCall& call : many_calls()) EXPECT_EQ(PackedCall::of(call).unpacked(), call);
}

TEST(PackedCall, CallsThatDifferInOneFieldDiffer) {
  const CollectiveCall call{.sequence = 7, .count = 5, .op = CollectiveOp::kAllGather, .dtype = DType::kI8};
  const auto differs = [&](auto change) {
    CollectiveCall other = call;
    change(other);
    return !(PackedCall::of(other) == PackedCall::of(call));
  };
  EXPECT_FALSE(differs([](CollectiveCall&) {}));
  EXPECT_TRUE(differs([](CollectiveCall& c) { ++c.sequence; }));
  EXPECT_TRUE(differs([](CollectiveCall& c) { ++c.count; }));
  EXPECT_TRUE(differs([](CollectiveCall& c) { ++c.counts_hash; }));
  EXPECT_TRUE(differs([](CollectiveCall& c) { c.op = CollectiveOp::kAllReduce; }));
  EXPECT_TRUE(differs([](CollectiveCall& c) { c.dtype = DType::kU8; }));
  EXPECT_TRUE(differs([](CollectiveCall& c) { c.reduce = ReduceOp::kMax; }));
  const CollectiveCall broadcast{.root = 0, .op = CollectiveOp::kBroadcast};
  CollectiveCall other = broadcast;
  other.root = 1;
  EXPECT_FALSE(PackedCall::of(other) == PackedCall::of(broadcast));
}

// All words of a call are of one number: a reader that met a writer would find two.
TEST(CurrentCall, IsReadInOnePieceWhileItIsWritten) {
  CurrentCall current;
  current.set({{0, 0, 0}});
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (uint64_t n = 1; n <= 200'000; ++n) current.set({{n, n, n}});
    done = true;
  });
  uint64_t last = 0;
  while (!done) {
    const PackedCall call = current.get();
    ASSERT_TRUE(call.words[0] == call.words[1] && call.words[1] == call.words[2]);
    ASSERT_GE(call.words[0], last);
    last = call.words[0];
  }
  writer.join();
  EXPECT_EQ(current.get().words[0], 200'000u);
}

}  // namespace
}  // namespace polyreme
