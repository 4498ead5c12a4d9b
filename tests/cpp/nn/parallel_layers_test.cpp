// Layers in which lanes meet. Whole models are compared over layouts in tests/python/test_layouts.py.
#include "nn/parallel_layers.h"

#include <map>

#include "common/thread_ranks.h"
#include "nn/compose.h"
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

// Parts of parameters and accumulators of this rank, by parameter and lane.
class Parts final : public ParamStorage {
 public:
  Parts(Device& device, Stream& stream, const ParamRegistry& registry, const LaneRange& lanes) {
    for (size_t i = 0; i < registry.specs().size(); ++i) {
      const Shape shape = local_shape(registry.specs()[i], "tp", lanes.lanes);
      for (int lane = 0; lane < lanes.count; ++lane) {
        const Tensor weight = empty(device, DType::kF32, shape, "weight"),
                     grad = empty(device, DType::kF32, shape, "grad");
        fill(stream, weight, 0.5f);
        fill(stream, grad, 0.0f);
        tensors_[{static_cast<int>(i), lane}] = {weight, grad};
      }
    }
  }
  Tensor weight(const ParamUse& use) const override { return tensors_.at({use.param, use.lane}).first; }
  Tensor grad(const ParamUse& use) const override { return tensors_.at({use.param, use.lane}).second; }

 private:
  std::map<std::pair<int, int>, std::pair<Tensor, Tensor>> tensors_;
};

// O-TP-01: a row-parallel layer 4 -> 3 with a bias, 4 rows, loss = sum of the outputs: the bias has the
// gradient 4.
TEST(ParallelLayers, OTP01TheBiasOfASumHasItsWholeGradientOnce) {
  for (const CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred})
    for (const int ranks : {1, 2, 4})
      run_ranks(ranks, {.executor = executor}, [&](World& world) {
        const auto stream = world.device().create_stream("compute");
        const TensorParallel tp(world.communicator(), 4);
        const TensorLanes lanes{4, ranks};
        ParamRegistry registry;
        auto row = std::make_unique<Linear>(registry, "row", 4, 3,
                                            LinearOptions{.cut = LinearCut::kRow, .lanes = 4});
        ASSERT_NE(row->row_bias(), nullptr);
        const ParamUse bias = *row->row_bias();
        const LaneBranch layer(std::move(row), {.lanes = lanes, .features = 3, .bias = bias});
        const Parts parts(world.device(), *stream, registry, tp.lanes());
        const Tensor tokens = empty(world.device(), DType::kI32, {1, 4}, "tokens");
        Context context{.stream = *stream, .params = parts, .batch = {tokens, {}, 0}};
        context.tp = &tp;
        // The branch's input is what all lanes read; here one lane's share of the 4 inputs, alike for all.
        const Tensor x = empty(world.device(), DType::kF32, {4 / ranks, 1}, "x");
        const Tensor dy = empty(world.device(), DType::kF32, {4 / ranks, 3}, "dy");
        fill(*stream, x, 1.0f);
        fill(*stream, dy, 1.0f);
        Saved saved;
        const Tensor y = layer.forward(context, x, &saved);
        EXPECT_EQ(y.shape(), (Shape{4 / ranks, 3}));
        layer.backward_input(context, dy, saved);
        layer.backward_weight(context, saved);
        LaneSum sum = tp.new_sum(world.device(), {3});
        for (int lane = 0; lane < tp.lanes().count; ++lane)
          sum.add_lane(*stream, parts.grad({bias.param, bias.use, lane}));
        const Tensor total = tp.finish_everywhere(*stream, sum);
        std::vector<float> gradient(3), outputs(static_cast<size_t>(y.numel()));
        copy_to_host(*stream, total, gradient.data());
        copy_to_host(*stream, y, outputs.data());
        stream->synchronize();
        EXPECT_EQ(gradient, (std::vector<float>{4, 4, 4}));
        for (const float output : outputs) EXPECT_EQ(output, 4 * 0.5f + 0.5f);  // the bias once
      });
}

// O-RN-02: an element's mask follows from its place in the global batch, whoever has it.
TEST(ParallelLayers, ORN02RanksOfTpHaveTheMasksOfTheirOwnTokens) {
  constexpr int64_t kSamples = 2, kTokens = 64, kFeatures = 16;
  const auto masks = [&](int ranks) {
    std::vector<float> all;
    run_ranks(ranks, {}, [&](World& world) {
      const auto stream = world.device().create_stream("compute");
      const TensorParallel tp(world.communicator(), 4);
      const Parts parts(world.device(), *stream, ParamRegistry(), tp.lanes());
      const Tensor tokens = empty(world.device(), DType::kI32, {kSamples, kTokens}, "tokens");
      Context context{.stream = *stream, .params = parts, .batch = {tokens, {}, 6}, .training = true};
      context.tp = &tp;
      const Tensor x = empty(world.device(), DType::kF32, {kSamples * kTokens / ranks, kFeatures}, "x");
      fill(*stream, x, 1.0f);
      const Dropout layer(kFeatures, 0.5f, 3);
      const Tensor y = tp.gather_tokens(*stream, layer.forward(context, x, nullptr), kSamples);
      std::vector<float> values(static_cast<size_t>(y.numel()));
      copy_to_host(*stream, y, values.data());
      stream->synchronize();
      if (world.rank() == 0) all = values;
    });
    return all;
  };
  const std::vector<float> expected = masks(1);
  expect_same_bits(masks(2), expected);
  expect_same_bits(masks(4), expected);
  int64_t same = 0;
  const int64_t half = kTokens / 2 * kFeatures;
  for (int64_t i = 0; i < half; ++i) same += expected[i] == expected[half + i];
  EXPECT_NEAR(static_cast<double>(same) / static_cast<double>(half), 0.5, 0.07);
}

TEST(ParallelLayers, ARankCostsItsShare) {
  const auto inner = [](ParamRegistry& registry) {
    return sequential(
        std::make_unique<Linear>(registry, "up", 8, 16, LinearOptions{.cut = LinearCut::kColumn, .lanes = 4}),
        std::make_unique<Linear>(registry, "down", 16, 8,
                                 LinearOptions{.bias = false, .cut = LinearCut::kRow, .lanes = 4}));
  };
  ParamRegistry one, two;
  const LaneBranch whole(inner(one), {.lanes = {4, 1}, .features = 8});
  const LaneBranch half(inner(two), {.lanes = {4, 2}, .features = 8});
  const Cost all = whole.cost(3, 8), own = half.cost(3, 4);  // of own tokens
  EXPECT_EQ(all.forward_flops, 2.0 * 24 * 2 * 8 * 16);
  EXPECT_EQ(own.forward_flops, all.forward_flops / 2);
  EXPECT_EQ(own.parameter_bytes, all.parameter_bytes / 2);
  EXPECT_EQ(all.comm_bytes, 0);
  EXPECT_EQ(own.comm_bytes, 2 * 24 * 8 * 4 / 2);  // half of the tokens gathered, half of the sums scattered
}

}  // namespace
}  // namespace polyreme::testing
