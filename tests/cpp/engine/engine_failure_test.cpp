// Steps that fail, and calls that are refused: the error names the culprit and nothing has changed.
#include "engine/engine_rig.h"
#include "nn/compose.h"

namespace polyreme::testing {
namespace {

// ---- what is not finite ----

TEST(Engine, ANanWeightIsNamedAndNothingChanges) {
  for (const auto& [ranks, zero] : {std::pair{1, 0}, {2, 0}, {2, 1}, {2, 2}, {2, 3}}) {
    EngineOptions options = tiny_options(2, 2);
    options.zero.stage = zero;
    run_ranks(ranks, {}, [&](World& world) {
      EngineRig rig(world, build_gpt(tiny_config()), options);
      EngineRig undisturbed(world, build_gpt(tiny_config()), tiny_options(2, 2));
      rig.step(tiny_batch(1), kLr);
      undisturbed.step(tiny_batch(1), kLr);
      const std::vector<float> good = rig.engine.read_param("h.1.mlp.fc.weight", "weight");
      std::vector<float> bad = good;
      bad[5] = kNan;
      rig.engine.write_param("h.1.mlp.fc.weight", bad);
      const std::vector<float> weights = rig.read("weight"), m = rig.read("exp_avg"),
                               v = rig.read("exp_avg_sq");
      const std::string text = error_text<NumericError>([&] { rig.step(tiny_batch(2), kLr); });
      expect_parts(text, {"step 2", "'h.1.mlp.fc.weight'", "weight", "Nothing was updated"});
      expect_same_bits(rig.read("weight"), weights);
      expect_same_bits(rig.read("exp_avg"), m);
      expect_same_bits(rig.read("exp_avg_sq"), v);
      EXPECT_EQ(rig.engine.applied_steps(), 1);
      // Repaired, the run goes on as if nothing had been.
      rig.engine.write_param("h.1.mlp.fc.weight", good);
      EXPECT_EQ(rig.step(tiny_batch(2), kLr).loss, undisturbed.step(tiny_batch(2), kLr).loss);
      expect_same_bits(rig.read("weight"), undisturbed.read("weight"));
    });
  }
}

TEST(Engine, AGradientThatOverflowsIsNamed) {
  run_ranks(1, {}, [&](World& world) {
    EngineRig rig(world, linear_model(1, 1e38f), linear_options(2, 1));
    rig.engine.write_param("w", {0.0f});  // the loss is 0, its gradient 1e41
    const std::string text = error_text<NumericError>([&] { rig.step(token_batch({{999}, {999}}, 1), 1.0); });
    expect_parts(text, {"step 1", "gradient of 'w'", "Nothing was updated"});
    EXPECT_EQ(rig.read("weight"), std::vector<float>{0.0f});
  });
}

// The loss overflows (1e30 * 1e10), its gradient (1e10) does not.
TEST(Engine, ALossThatOverflowsUpdatesNothing) {
  for (const auto& [ranks, zero] : {std::pair{1, 0}, {2, 0}, {2, 1}, {2, 2}, {2, 3}}) {
    EngineOptions options = linear_options(2, 1);
    options.zero.stage = zero;
    run_ranks(ranks, {}, [&](World& world) {
      EngineRig rig(world, linear_model(1, 1e10f), options);
      for (const float weight : {1e30f, -1e30f}) {
        rig.engine.write_param("w", {weight});
        const std::string text = error_text<NumericError>([&] {
          rig.step(token_batch({{1}, {0}}, 1), 1e20);
        });
        expect_parts(text, {"step 1", "inf", "the loss of a token", "Nothing was updated"});
        EXPECT_EQ(rig.read("weight"), std::vector<float>{weight});
      }
      EXPECT_EQ(rig.engine.applied_steps(), 0);
    });
  }
}

// ---- errors in the middle of a step ----

// Fails in its n-th forward, once.
class FailsOnce final : public Layer {
 public:
  FailsOnce(int forward, bool in_operation) : left_(forward), in_operation_(in_operation) {}
  Tensor forward(const Context& context, const Tensor& x, Saved*) const override {
    if (left_-- == 1) {
      if (!in_operation_) throw OutOfMemory("no memory for this forward");
      as_cpu(context.stream).enqueue({"fails"}, {}, [](const CpuContext&) {
        throw OutOfMemory("no memory in an operation");
      });
    }
    return x;
  }
  Tensor backward_input(const Context&, const Tensor& dy, Saved&) const override { return dy; }
  Cost cost(int64_t, int64_t) const override { return {}; }

 private:
  mutable int left_;
  bool in_operation_;
};

TEST(Engine, AStepThatFailedMidwayLeavesNothing) {
  for (const CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred}) {
    run_ranks(1, {.executor = executor}, [&](World& world) {
      EngineRig undisturbed(world, build_gpt(tiny_config()), tiny_options(4, 1));
      const double loss = undisturbed.step(tiny_batch(1), kLr).loss;
      const std::vector<float> expected = undisturbed.read("weight");
      for (const bool in_operation : {false, true}) {
        for (const int forward : {1, 2, 4, 7}) {
          Model model = build_gpt(tiny_config());
          std::vector<LayerPtr> failing;
          failing.push_back(std::make_unique<FailsOnce>(forward, in_operation));
          failing.push_back(std::move(model.layers[2]));
          model.layers[2] = std::make_unique<Sequential>(std::move(failing));
          EngineRig rig(world, std::move(model), tiny_options(4, 1));
          const std::vector<float> start = rig.read("weight");
          {
            const auto batch = std::make_unique<HostBatch>(tiny_batch(9));  // gone before the next step
            EXPECT_THROW(rig.engine.train_step(*batch, kLr), OutOfMemory);
          }
          expect_same_bits(rig.read("weight"), start);
          // An operation that failed has kept a collective from running, so the group is broken.
          if (in_operation) continue;
          EXPECT_EQ(rig.step(tiny_batch(1), kLr).loss, loss);
          expect_same_bits(rig.read("weight"), expected, concat("after a failure in forward ", forward));
        }
      }
    });
  }
}

// ---- arguments ----

TEST(Engine, OptionsThatDoNotFitAreNamed) {
  const auto text = [](int ranks, const std::function<void(EngineOptions&)>& change) {
    std::string result;
    run_ranks(ranks, {}, [&](World& world) {
      EngineOptions options = tiny_options(0, 2);
      change(options);
      const std::string error =
          error_text<InvalidArgument>([&] { EngineRig(world, build_gpt(tiny_config()), options); });
      if (world.rank() == 0) result = error;
    });
    return result;
  };
  expect_parts(text(1, [](auto& o) { o.lanes_dp = 3; }), {"lanes.dp=3", "dp=1", "power of two"});
  expect_parts(text(1, [](auto& o) { o.lanes_dp = -2; }), {"lanes.dp=-2"});
  expect_parts(text(2, [](auto& o) { o.lanes_dp = 1; }), {"lanes.dp=1", "dp=2"});
  expect_parts(text(3, [](auto& o) { o.lanes_dp = 6; }), {"lanes.dp=6", "dp=3"});
  expect_parts(text(1, [](auto& o) { o.lanes_dp = 16; }), {"global_batch=8", "lanes.dp=16"});
  expect_parts(text(1, [](auto& o) { o.global_batch = 0; }), {"global_batch=0"});
  expect_parts(text(2, [](auto& o) { o.global_batch = 1; }), {"global_batch=1", "dp=2"});
  expect_parts(text(2, [](auto& o) { o.global_batch = 7; }), {"global_batch=7", "lanes.dp=2"});
  expect_parts(text(1, [](auto& o) { o.micro_batch = 0; }), {"micro_batch=0"});
  expect_parts(text(1, [](auto& o) { o.clip_norm = -1; }), {"clip_norm=-1"});
  expect_parts(text(1, [](auto& o) { o.clip_norm = kNan; }), {"clip_norm=nan"});
  expect_parts(text(1, [](auto& o) { o.optimizer.weight_decay = {0.1}; }), {"weight_decay has 1"});
  run_ranks(1, {}, [](World& world) {
    EngineOptions options = tiny_options(0, 2);
    options.zero.stage = 4;
    expect_parts(error_text<Error>([&] { EngineRig(world, build_gpt(tiny_config()), options); }),
                 {"zero=4", "0 (nothing", "3 (weights"});
  });
}

TEST(Engine, BatchesThatDoNotFitAreRefusedBeforeAnythingRuns) {
  run_ranks(1, {}, [&](World& world) {
    EngineRig rig(world, build_gpt(tiny_config()), tiny_options(1, 2));
    const auto text = [&](const std::function<void(HostBatch&)>& change) {
      HostBatch batch = tiny_batch(1);
      change(batch);
      return error_text<InvalidArgument>([&] { rig.engine.train_step(batch, kLr); });
    };
    const std::vector<float> weights = rig.read("weight");
    expect_parts(text([](auto& b) { b = part_of(b, 0, 7); }), {"7 samples", "expects 8", "global_batch=8"});
    expect_parts(text([](auto& b) { b.num_samples = -8; }), {"-8 samples"});
    expect_parts(text([](auto& b) { b.seq_len = 0; }), {"seq_len=0"});
    expect_parts(text([](auto& b) { b.seq_len = 7; }), {"seq_len=7", "1 to 6"});
    expect_parts(text([](auto& b) { b.tokens.pop_back(); }), {"[8, 6]", "47 tokens"});
    expect_parts(text([](auto& b) { b.targets.pop_back(); }), {"[8, 6]", "47 targets"});
    expect_parts(text([](auto& b) { b.targets.clear(); }), {"0 targets"});
    expect_parts(text([](auto& b) { b.tokens[13] = kVocab; }), {"token 13 at sample 2, position 1", "13"});
    expect_parts(text([](auto& b) { b.tokens[0] = -1; }), {"token -1"});
    expect_parts(text([](auto& b) { b.targets[47] = kVocab; }), {"target 13 at sample 7, position 5"});
    expect_parts(text([](auto& b) { b.targets[0] = -99; }), {"target -99", "-100"});
    for (const double lr : {-0.1, std::nan(""), 1e300, std::numeric_limits<double>::infinity()})
      expect_parts(error_text<InvalidArgument>([&] { rig.step(tiny_batch(1), lr); }), {"learning rate"});
    expect_same_bits(rig.read("weight"), weights);
    EXPECT_EQ(rig.engine.applied_steps(), 0);
    // Shorter sequences than the model's are fine.
    HostBatch shorter{.num_samples = kBatch, .seq_len = 2};
    shorter.tokens.assign(16, 1);
    shorter.targets.assign(16, 2);
    EXPECT_EQ(rig.engine.train_step(shorter, kLr).tokens, 16);
  });
}

}  // namespace
}  // namespace polyreme::testing
