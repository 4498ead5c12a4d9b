// Activations between the regions of tensor parallelism: every number of ranks has the same rows and the same
// bits.
#include "mesh/tensor_parallel.h"

#include "common/error_text.h"
#include "common/thread_ranks.h"
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

constexpr int64_t kSamples = 3, kTokens = 8, kCols = 5, kLanes = 4;

std::vector<float> lane_values(int64_t lane) {
  return random_floats(kSamples * kTokens * kCols, 10 + static_cast<uint32_t>(lane), 100.0f);
}

// The tree over all lanes, formed on one rank.
std::vector<float> expected_sum() {
  std::vector<float> sum = lane_values(0), right = lane_values(2);
  const std::vector<float> one = lane_values(1), three = lane_values(3);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] = (sum[i] + one[i]) + (right[i] + three[i]);
  return sum;
}

std::vector<float> on_host(Stream& stream, const Tensor& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.numel()));
  copy_to_host(stream, tensor, values.data());
  stream.synchronize();
  return values;
}

TEST(TensorParallel, SumsAndGathersHaveTheBitsOfOneRank) {
  const std::vector<float> expected = expected_sum();
  for (const CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred})
    for (const int ranks : {1, 2, 4})
      run_ranks(ranks, {.executor = executor}, [&](World& world) {
        const auto stream = world.device().create_stream("compute");
        const TensorParallel tp(world.communicator(), kLanes);
        EXPECT_EQ(tp.own_tokens(kTokens), kTokens / ranks);
        LaneSum sum = tp.new_sum(world.device(), {kSamples * kTokens, kCols});
        std::vector<std::vector<float>> values;
        for (int64_t lane = 0; lane < tp.lanes().count; ++lane)
          values.push_back(lane_values(tp.lanes().first + lane));
        for (const std::vector<float>& lane : values) {
          const Tensor partial = empty(world.device(), DType::kF32, {kSamples * kTokens, kCols}, "partial");
          copy_from_host(*stream, lane.data(), partial);
          sum.add_lane(*stream, partial);
        }
        const Tensor own = tp.finish_own_tokens(*stream, sum, kSamples);
        EXPECT_EQ(own.shape(), (Shape{kSamples * kTokens / ranks, kCols}));
        expect_same_bits(on_host(*stream, tp.gather_tokens(*stream, own, kSamples)), expected,
                         concat(ranks, " ranks, rank ", world.rank()));
      });
}

TEST(TensorParallel, LanesAreCheckedAgainstTheRanks) {
  run_ranks(2, {}, [&](World& world) {
    expect_parts(error_text<InvalidArgument>([&] { TensorParallel(world.communicator(), 6); }),
                 {"lanes.tp=6", "tp=2", "power of two"});
  });
}

}  // namespace
}  // namespace polyreme::testing
