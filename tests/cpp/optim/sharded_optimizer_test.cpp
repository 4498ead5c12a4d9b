// Gradients handed over one by one and reduced in the background, on the deferred device: what is not waited
// for faults there, and fresh memory is NaN.
#include "optim/sharded_optimizer.h"

#include "common/error_text.h"
#include "common/thread_ranks.h"
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

const std::vector<Shape> kShapes = {{30, 50}, {7}, {3000}, {40, 70}, {1}};
constexpr int64_t kMicroBatches = 4;  // over all ranks, one a lane

std::vector<ParamSpec> specs() {
  std::vector<ParamSpec> result;
  for (const Shape& shape : kShapes)
    result.push_back({.name = concat("p", result.size()), .shape = shape, .padded_shape = shape});
  return result;
}

Tensor upload(Device& device, Stream& stream, const std::vector<float>& values) {
  const Tensor tensor = empty(device, DType::kF32, {static_cast<int64_t>(values.size())}, "upload");
  copy_from_host(stream, values.data(), tensor);
  stream.synchronize();
  return tensor;
}

struct Trained {
  std::vector<float> weights;
  std::vector<double> norms;
};

// Two steps of four lanes; every second gradient of p1 is left out.
Trained train(int ranks, int stage, int64_t bucket_bytes, const std::string& rule, uint64_t seed) {
  std::vector<Trained> results(static_cast<size_t>(ranks));
  run_ranks(ranks, {.executor = CpuExecutor::kDeferred, .schedule_seed = seed}, [&](World& world) {
    ShardedOptimizer optimizer(
        world.device(), world.background(), world.communicator(), specs(),
        {.stage = stage,
         .lanes = kMicroBatches,
         .micro_batches = kMicroBatches / ranks,
         .bucket_bytes = bucket_bytes,
         .clip_norm = 1.0f,
         .rule = {.rule = rule, .weight_decay = std::vector<double>(kShapes.size(), 0.1)}});
    const auto stream = world.device().create_stream("test");
    const auto values = [](size_t param, uint32_t what) {
      return random_floats(static_cast<size_t>(kShapes[param].numel()),
                           100 * what + static_cast<uint32_t>(param));
    };
    for (size_t i = 0; i < kShapes.size(); ++i)
      optimizer.write("weight", static_cast<int>(i), upload(world.device(), *stream, values(i, 1)));
    Trained& result = results[static_cast<size_t>(world.rank())];
    const int64_t own = kMicroBatches / ranks;
    for (uint32_t step = 0; step < 2; ++step) {
      for (int64_t i = 0; i < own; ++i) {
        const auto micro_batch = static_cast<uint32_t>(world.rank() * own + i);
        for (size_t param = kShapes.size(); param-- > 0;) {
          if (param == 1 && micro_batch % 2 == 1) continue;
          optimizer.gradients().add(
              static_cast<int>(param),
              upload(world.device(), *stream, values(param, 2 + 8 * step + micro_batch)));
        }
        optimizer.gradients().end_micro_batch();
      }
      const ShardedStepResult done = optimizer.step({.lr = 0.01, .count = own});
      EXPECT_TRUE(done.applied);
      EXPECT_EQ(done.count, kMicroBatches);
      result.norms.push_back(done.grad_norm);
    }
    std::vector<Tensor> out;
    for (const Shape& shape : kShapes) out.push_back(empty(world.device(), DType::kF32, shape, "out"));
    optimizer.read("weight", out);
    for (const Tensor& tensor : out) {
      std::vector<float> host(static_cast<size_t>(tensor.numel()));
      copy_to_host(*stream, tensor, host.data());
      stream->synchronize();
      append(result.weights, host);
    }
  });
  for (const Trained& result : results) {
    expect_same_bits(result.weights, results[0].weights, "another rank");
    EXPECT_EQ(result.norms, results[0].norms);
  }
  return results[0];
}

TEST(ShardedOptimizer, SameBitsInEveryFormOnTheDeferredDevice) {
  for (const char* rule : {"adamw", "muon"}) {
    const Trained reference = train(1, 0, int64_t{1} << 40, rule, 0);
    uint64_t seed = 1;
    for (const int ranks : {1, 2, 4})
      for (const int stage : {0, 1, 2})
        for (const int64_t bucket_bytes : {int64_t{1}, int64_t{7000}}) {
          const Trained got = train(ranks, stage, bucket_bytes, rule, seed++);
          const std::string where =
              concat(rule, ", ranks ", ranks, ", stage ", stage, ", buckets of ", bucket_bytes);
          expect_same_bits(got.weights, reference.weights, where);
          EXPECT_EQ(got.norms, reference.norms) << where;
        }
  }
}

TEST(ShardedOptimizer, NamesTheFirstGradientThatIsNotFinite) {
  run_ranks(2, {.executor = CpuExecutor::kDeferred}, [&](World& world) {
    ShardedOptimizer optimizer(
        world.device(), world.background(), world.communicator(), specs(),
        {.stage = 2, .rule = {.weight_decay = std::vector<double>(kShapes.size(), 0.1)}});
    const auto stream = world.device().create_stream("test");
    for (const bool bad : {true, false}) {
      for (size_t i = 0; i < kShapes.size(); ++i) {
        std::vector<float> grad(static_cast<size_t>(kShapes[i].numel()), 1.0f);
        if (bad && world.rank() == 1 && i >= 2) grad.back() = kInf;
        if (bad && world.rank() == 0 && i >= 3) grad.front() = kNan;
        optimizer.gradients().add(static_cast<int>(i), upload(world.device(), *stream, grad));
      }
      optimizer.gradients().end_micro_batch();
      const ShardedStepResult done = optimizer.step({.lr = 0.01, .count = 1});
      EXPECT_EQ(done.applied, !bad);
      EXPECT_EQ(done.culprit_param, bad ? 2 : -1);
      EXPECT_EQ(done.culprit_rank, bad ? 1 : -1);
      EXPECT_EQ(optimizer.rule().updates(), std::vector<int64_t>(kShapes.size(), bad ? 0 : 1));
    }
  });
}

TEST(UnitGradients, SayWhatIsWrong) {
  run_ranks(1, {.executor = CpuExecutor::kDeferred}, [&](World& world) {
    const auto make = [&](const ShardedOptimizerOptions& options) {
      return ShardedOptimizer(world.device(), world.background(), world.communicator(), specs(), options);
    };
    ShardedOptimizerOptions options{
        .lanes = 2, .micro_batches = 2, .rule = {.weight_decay = std::vector<double>(kShapes.size(), 0.1)}};
    ShardedOptimizer optimizer = make(options);
    const auto stream = world.device().create_stream("test");
    UnitGradients& gradients = optimizer.gradients();
    const Tensor seven = upload(world.device(), *stream, std::vector<float>(7, 1.0f));
    gradients.add(1, seven);
    EXPECT_THROW_WITH(gradients.add(1, seven), InvalidArgument, "already given");
    EXPECT_THROW_WITH(gradients.add(0, seven), InvalidArgument, "has 7 elements; the parameter 1500");
    gradients.end_micro_batch();
    EXPECT_THROW_WITH(gradients.finish(), InvalidArgument, "1 micro-batches of 2");
    gradients.end_micro_batch();
    EXPECT_THROW_WITH(gradients.add(1, seven), InvalidArgument, "all 2 micro-batches");
    EXPECT_TRUE(optimizer.step({.lr = 0.1, .count = 2}).applied);
    options.micro_batches = 3;
    EXPECT_THROW_WITH(make(options), InvalidArgument, "micro_batches=3 with 2 lanes");
    options.stage = 3;
    EXPECT_THROW_WITH(make(options), NotAvailable, "stage=3");
  });
}

}  // namespace
}  // namespace polyreme::testing
