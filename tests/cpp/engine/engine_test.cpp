// Whole training steps: equal bits for every split of the work, right sums where tokens are ignored,
// and nothing changed where a step fails.
#include "engine/engine.h"

#include <filesystem>
#include <fstream>

#include "engine/engine_rig.h"

namespace polyreme::testing {
namespace {

// What a run leaves: everything that must have the same bits on every layout.
struct Trace {
  std::vector<double> losses, norms;
  std::vector<float> weights, grads, moments;
};

void expect_same(const Trace& got, const Trace& expected, const std::string& where) {
  EXPECT_EQ(got.losses, expected.losses) << where;
  EXPECT_EQ(got.norms, expected.norms) << where;
  expect_same_bits(got.weights, expected.weights, where + ": weights");
  expect_same_bits(got.grads, expected.grads, where + ": gradients");
  expect_same_bits(got.moments, expected.moments, where + ": moments");
}

// Three steps of the tiny GPT. Rank 0's trace; the others must have the same.
Trace train_tiny(int ranks, const EngineOptions& options, const CpuDeviceOptions& device = {},
                 const GptConfig& config = tiny_config()) {
  std::vector<Trace> traces(static_cast<size_t>(ranks));
  run_ranks(ranks, device, [&](World& world) {
    EngineRig rig(world, build_gpt(config), options);
    Trace& trace = traces[static_cast<size_t>(world.rank())];
    for (uint32_t step = 0; step < 3; ++step) {
      const StepStats stats = rig.step(tiny_batch(step), kLr);
      EXPECT_EQ(stats.tokens, kBatch * kSeq);
      EXPECT_EQ(stats.valid_tokens, 39);
      trace.losses.push_back(stats.loss);
      trace.norms.push_back(stats.grad_norm);
    }
    EXPECT_EQ(rig.engine.applied_steps(), 3);
    trace.weights = rig.read("weight");
    trace.grads = rig.read("grad");
    trace.moments = rig.read("exp_avg");
    append(trace.moments, rig.read("exp_avg_sq"));
  });
  for (const Trace& trace : traces) expect_same(trace, traces[0], "another rank");
  return traces[0];
}

TEST(Engine, NoLayoutChangesABit) {
  const Trace one = train_tiny(1, tiny_options(4, 2));
  EXPECT_GT(one.norms[0], 0.5);  // so that clipping is at work
  EXPECT_NE(one.losses[0], one.losses[2]);
  for (const int64_t micro_batch : {1, 3, 64})
    expect_same(train_tiny(1, tiny_options(4, micro_batch)), one, "cut");
  for (const int zero : {0, 1, 2, 3}) {
    EngineOptions options = tiny_options(4, 1);
    options.zero.stage = zero;
    for (const int ranks : {1, 2, 4}) {
      options.micro_batch = ranks == 2 ? 2 : 1;
      expect_same(train_tiny(ranks, options), one, concat(ranks, " ranks, zero=", zero));
    }
  }
  for (const ZeroOptions& zero : {ZeroOptions{.stage = 0, .bucket_bytes = 1},
                                  {.stage = 1, .bucket_bytes = 1000, .overlap = false},
                                  {.stage = 2, .bucket_bytes = 1},
                                  {.stage = 2, .overlap = false},
                                  {.stage = 3, .bucket_bytes = 1, .prefetch = 0},
                                  {.stage = 3, .prefetch = 3},
                                  {.stage = 3, .overlap = false, .persist_below = 100},
                                  {.stage = 1, .shard_size = 2},
                                  {.stage = 2, .shard_size = 2},
                                  {.stage = 3, .shard_size = 2, .bucket_bytes = 500},
                                  {.stage = 3, .shard_size = 1}}) {
    EngineOptions options = tiny_options(4, 1);
    options.zero = zero;
    expect_same(
        train_tiny(4, options), one,
        concat("stage ", zero.stage, ", shard_size ", zero.shard_size, ", bucket ", zero.bucket_bytes));
  }
  expect_same(train_tiny(2, tiny_options(4, 2), {.num_threads = 2}), one, "two threads each");
  expect_same(train_tiny(1, tiny_options(4, 2), {.isa = "avx2"}), one, "avx2");
  GptConfig recompute = tiny_config();
  recompute.recompute = Recomputation::kBlocks;
  expect_same(train_tiny(1, tiny_options(4, 2), {}, recompute), one, "recompute");
  // Lanes are what may: else this test would see nothing.
  EXPECT_NE(train_tiny(1, tiny_options(1, 2)).grads, one.grads);
}

TEST(Engine, ThreeRanksWithALaneEach) {
  std::vector<std::vector<float>> weights(12);
  for (const int zero : {0, 1, 2, 3}) {
    EngineOptions options = tiny_options(0, 1);
    options.global_batch = 6;
    options.zero.stage = zero;
    run_ranks(3, {}, [&](World& world) {
      EngineRig rig(world, build_gpt(tiny_config()), options);
      EXPECT_EQ(rig.engine.options().lanes_dp, 3);
      rig.step(part_of(tiny_batch(1), 0, 6), kLr);
      weights[static_cast<size_t>(3 * zero + world.rank())] = rig.read("weight");
    });
  }
  for (const std::vector<float>& other : weights) expect_same_bits(other, weights[0]);
}

TEST(Engine, EveryScheduleOfTheDeferredDeviceHasTheBitsOfTheImmediateOne) {
  for (const bool tied : {true, false}) {
    GptConfig config = tiny_config();
    config.tied = tied;
    const Trace immediate = train_tiny(1, tiny_options(2, 2), {}, config);
    for (uint64_t seed = 0; seed < (tied ? 20 : 3); ++seed)
      expect_same(train_tiny(1, tiny_options(2, 2),
                             {.executor = CpuExecutor::kDeferred, .schedule_seed = seed}, config),
                  immediate, concat("schedule ", seed));
  }
  const Trace immediate = train_tiny(1, tiny_options(4, 2));
  for (uint64_t seed = 0; seed < 12; ++seed) {
    EngineOptions options = tiny_options(4, 2);
    options.zero.stage = static_cast<int>(seed % 4);
    expect_same(train_tiny(2, options, {.executor = CpuExecutor::kDeferred, .schedule_seed = seed}),
                immediate, concat("two ranks, schedule ", seed));
  }
}

TEST(Engine, TheLossIsTheMeanOverValidTokens) {
  const HostBatch batch = tiny_batch(1);
  GptConfig config = tiny_config();
  config.dropout = 0;
  run_ranks(1, {}, [&](World& world) {
    double sum = 0;
    int64_t count = 0;
    for (int64_t sample = 0; sample < kBatch; ++sample) {
      EngineOptions options = tiny_options(1, 1);
      options.global_batch = 1;
      EngineRig alone(world, build_gpt(config), options);
      const StepStats stats = alone.engine.train_step(part_of(batch, sample, sample + 1), 0);
      sum += stats.loss * static_cast<double>(stats.valid_tokens);
      count += stats.valid_tokens;
    }
    for (const int64_t micro_batch : {1, 3, 8}) {
      EngineRig rig(world, build_gpt(config), tiny_options(1, micro_batch));
      const StepStats stats = rig.engine.train_step(batch, 0);
      EXPECT_EQ(stats.valid_tokens, count);
      EXPECT_NEAR(stats.loss, sum / static_cast<double>(count), 1e-14 * stats.loss);
    }
  });
}

// ---- the scenarios of accumulation and normalisation ----

// One step of the linear model, w = 1, on `ranks` ranks in every ZeRO stage: all report this loss and
// gradient.
void expect_linear(int ranks, int64_t micro_batch, const HostBatch& batch, double loss, float gradient) {
  for (const int zero : {0, 1, 2, 3, 4}) {
    run_ranks(ranks, {}, [&](World& world) {
      EngineOptions options = linear_options(batch.num_samples, micro_batch);
      options.zero.stage = std::min(zero, 3);
      options.zero.round_first = zero == 4;
      EngineRig rig(world, linear_model(batch.seq_len), options);
      const StepStats stats = rig.step(batch, 0.5);
      EXPECT_EQ(stats.loss, loss);
      EXPECT_EQ(stats.grad_norm, static_cast<double>(gradient));
      EXPECT_EQ(rig.read("grad"), std::vector<float>{gradient});
      EXPECT_EQ(rig.read("weight"), std::vector<float>{1.0f - 0.5f * gradient});
    });
  }
}

TEST(Engine, OGa01TokenMeanOverTheWholeWindow) {
  for (const int ranks : {1, 2})
    for (const int64_t micro_batch : {1, 2})
      expect_linear(ranks, micro_batch, token_batch({{1, 2, 3}, {10}}, 3), 4.0, 4.0f);
}

TEST(Engine, OGa02UnevenValidTokens) {
  const HostBatch batch = token_batch({{1, 1, 1, 1, 1}, {9}, {2, 2}, {}}, 5);
  const HostBatch swapped = token_batch({{2, 2}, {}, {1, 1, 1, 1, 1}, {9}}, 5);
  for (const int ranks : {1, 2})
    for (const int64_t micro_batch : {1, 2, 4}) {
      expect_linear(ranks, micro_batch, batch, 2.25, 2.25f);
      expect_linear(ranks, micro_batch, swapped, 2.25, 2.25f);
    }
}

TEST(Engine, OGa03ARankWithoutAValidToken) {
  GptConfig config = tiny_config();
  config.dropout = 0;
  EngineOptions options = tiny_options(2, 2);
  options.optimizer.rule = "sgd";
  options.clip_norm = 0;
  HostBatch half_masked = tiny_batch(1), masked = tiny_batch(2);
  std::fill(half_masked.targets.begin() + kBatch / 2 * kSeq, half_masked.targets.end(), kIgnoreIndex);
  std::fill(masked.targets.begin(), masked.targets.end(), kIgnoreIndex);
  const HostBatch batches[] = {half_masked, masked, tiny_batch(3)};

  struct Record {
    std::vector<StepStats> stats;
    std::vector<std::vector<float>> weights, grads;
  };
  const auto train = [&](int ranks, int zero) {
    options.zero.stage = zero;
    std::vector<Record> records(static_cast<size_t>(ranks));
    run_ranks(ranks, {}, [&](World& world) {
      EngineRig rig(world, build_gpt(config), options);
      Record& record = records[static_cast<size_t>(world.rank())];
      for (const HostBatch& batch : batches) {
        record.stats.push_back(rig.step(batch, kLr));
        record.weights.push_back(rig.read("weight"));
        record.grads.push_back(rig.read("grad"));
      }
      EXPECT_EQ(rig.engine.applied_steps(), 2);
    });
    return records;
  };
  const Record one = train(1, 0)[0];
  for (const int zero : {0, 1, 2, 3}) {
    for (const Record& record : train(2, zero)) {
      for (size_t step = 0; step < 3; ++step) {
        EXPECT_EQ(record.stats[step].loss, one.stats[step].loss);
        EXPECT_EQ(record.stats[step].grad_norm, one.stats[step].grad_norm);
        expect_same_bits(record.weights[step], one.weights[step]);
      }
    }
  }
  EXPECT_EQ(one.stats[1].loss, 0.0);
  EXPECT_EQ(one.stats[1].grad_norm, 0.0);
  EXPECT_EQ(one.stats[1].valid_tokens, 0);
  for (const float value : one.grads[1]) ASSERT_EQ(value, 0.0f);
  expect_same_bits(one.weights[1], one.weights[0]);
  EXPECT_NE(one.weights[2], one.weights[1]);

  // The first step is the one of a single process on rank 0's samples alone.
  run_ranks(1, {}, [&](World& world) {
    EngineOptions alone = options;
    alone.global_batch = kBatch / 2;
    alone.lanes_dp = 1;
    EngineRig rig(world, build_gpt(config), alone);
    EXPECT_EQ(rig.engine.train_step(part_of(half_masked, 0, kBatch / 2), kLr).loss, one.stats[0].loss);
    expect_same_bits(rig.read("weight"), one.weights[0]);
  });
}

TEST(Engine, AMaskedBatchDoesNotEvenDecay) {
  run_ranks(1, {}, [&](World& world) {
    EngineOptions options = tiny_options(1, 2);
    Model model = build_gpt(tiny_config());
    options.optimizer.weight_decay.assign(model.registry.specs().size(), 0.5);
    EngineRig rig(world, std::move(model), options);
    rig.step(tiny_batch(1), kLr);
    const std::vector<float> weights = rig.read("weight"), moments = rig.read("exp_avg");
    HostBatch masked = tiny_batch(2);
    std::fill(masked.targets.begin(), masked.targets.end(), kIgnoreIndex);
    EXPECT_EQ(rig.step(masked, kLr).loss, 0.0);
    expect_same_bits(rig.read("weight"), weights);
    expect_same_bits(rig.read("exp_avg"), moments);
    EXPECT_EQ(rig.engine.applied_steps(), 1);
  });
}

TEST(Engine, OGa04EveryMicroBatchCounts) {
  const HostBatch batch = token_batch({{1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}}, 1);
  for (const int ranks : {1, 2, 4})
    for (const int64_t micro_batch : {1, 2}) expect_linear(ranks, micro_batch, batch, 4.5, 4.5f);
}

TEST(Engine, OGa06LaterStepsAccumulateAsTheFirst) {
  const HostBatch batch = token_batch({{1}, {2}, {3}, {4}, {1}, {2}, {3}, {4}}, 1);
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, {}, [&](World& world) {
      EngineRig rig(world, linear_model(1), linear_options(8, 1));
      rig.engine.write_param("w", {0.0f});
      for (const float expected : {-2.5f, -5.0f, -7.5f}) {
        rig.step(batch, 1.0);
        EXPECT_EQ(rig.read("weight"), std::vector<float>{expected});
      }
    });
  }
}

TEST(Engine, OCl04TheNormIsOfTheMeanGradient) {
  const HostBatch batch = token_batch({{8}, {8}}, 1);
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, {}, [&](World& world) {
      EngineOptions options = linear_options(2, 1);
      options.clip_norm = 1.0f;
      EngineRig rig(world, linear_model(1, 0.1f), options);
      const StepStats stats = rig.step(batch, 1.0);
      EXPECT_NEAR(stats.grad_norm, 0.8, 1e-7);
      EXPECT_NEAR(static_cast<double>(rig.read("weight")[0]), 0.2, 1e-7);
      // Above the limit the step is as long as the limit.
      options.clip_norm = 0.25f;
      EngineRig clipped(world, linear_model(1, 0.1f), options);
      EXPECT_NEAR(clipped.step(batch, 1.0).grad_norm, 0.8, 1e-7);
      EXPECT_NEAR(static_cast<double>(clipped.read("weight")[0]), 0.75, 1e-7);
    });
  }
}

TEST(Engine, MemoryDoesNotGrow) {
  run_ranks(1, {}, [&](World& world) {
    EngineRig rig(world, build_gpt(tiny_config()), tiny_options(4, 1));
    rig.step(tiny_batch(1), kLr);
    const int64_t in_use = world.device().memory().in_use_bytes;
    world.device().reset_peak_memory();
    rig.step(tiny_batch(2), kLr);
    const int64_t peak = world.device().memory().peak_bytes;
    for (uint32_t step = 0; step < 3; ++step) rig.step(tiny_batch(step), kLr);
    EXPECT_EQ(world.device().memory().in_use_bytes, in_use);
    EXPECT_EQ(world.device().memory().peak_bytes, peak);
  });
}

// ---- token files ----

class EngineData : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ =
        std::filesystem::path(::testing::TempDir()) /
        concat("polyreme-", getpid(), "-", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::vector<uint16_t> payload;
    std::mt19937 generator(3);
    for (int i = 0; i < 20 * kSeq + 1; ++i) payload.push_back(static_cast<uint16_t>(generator() % kVocab));
    std::ofstream file(path_, std::ios::binary);
    const auto put = [&](const auto& value) {
      file.write(reinterpret_cast<const char*>(&value), sizeof(value));
    };
    file.write("POLYTOK1", 8);
    put(uint32_t{1});
    put(uint32_t{2});
    put(uint64_t{payload.size()});
    put(uint64_t{kVocab});
    file.write(std::string(32, '\0').data(), 32);
    for (const uint16_t token : payload) put(token);
  }
  void TearDown() override { std::filesystem::remove(path_); }

  std::filesystem::path path_;
};

TEST_F(EngineData, StepsTakeTheGlobalOrder) {
  const TokenDataset data(path_.string());
  const SampleOrder order(data.num_samples(kSeq), 3, true);
  std::vector<double> expected;
  std::vector<float> weights;
  run_ranks(1, {}, [&](World& world) {
    EngineRig rig(world, build_gpt(tiny_config()), tiny_options(4, 2));
    for (int64_t step = 0; step < 4; ++step) {  // 32 samples: into the second epoch
      HostBatch batch{.num_samples = kBatch, .seq_len = kSeq};
      for (int64_t i = 0; i < kBatch; ++i) {
        int32_t tokens[kSeq], targets[kSeq];
        data.read_sample(order(step * kBatch + i), kSeq, kVocab, tokens, targets);
        batch.tokens.insert(batch.tokens.end(), tokens, tokens + kSeq);
        batch.targets.insert(batch.targets.end(), targets, targets + kSeq);
      }
      expected.push_back(rig.step(batch, kLr).loss);
    }
    weights = rig.read("weight");
  });
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, {}, [&](World& world) {
      EngineRig rig(world, build_gpt(tiny_config()), tiny_options(4, 1));
      for (int64_t step = 0; step < 4; ++step)
        EXPECT_EQ(rig.engine.train_step(data, order, step, kLr).loss, expected[static_cast<size_t>(step)]);
      expect_same_bits(rig.read("weight"), weights);
    });
  }
}

TEST_F(EngineData, EvaluationDependsOnNothingButTheSamples) {
  const TokenDataset data(path_.string());
  std::vector<double> losses;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int64_t micro_batch : {1, 4}) {
      run_ranks(ranks, {}, [&](World& world) {
        EngineOptions options = tiny_options(0, micro_batch);
        options.global_batch = 12;
        EngineRig rig(world, build_gpt(tiny_config()), options);
        const StepStats two = rig.engine.evaluate(data, 3, 2);  // fewer than four ranks have one
        EXPECT_EQ(two.tokens, 2 * kSeq);
        const StepStats stats = rig.engine.evaluate(data, 1, 19);
        EXPECT_EQ(stats.valid_tokens, 19 * kSeq);
        if (world.rank() == 0) losses.push_back(stats.loss + 1000 * two.loss);
      });
    }
  }
  for (const double loss : losses) EXPECT_EQ(loss, losses[0]);
  EXPECT_TRUE(std::isfinite(losses[0]));
}

// What only some ranks would notice, all of them must: the others would wait.
TEST_F(EngineData, EveryRankRefusesSamplesThatAreNotThere) {
  const TokenDataset data(path_.string());
  run_ranks(2, {}, [&](World& world) {
    EngineRig rig(world, build_gpt(tiny_config()), tiny_options(2, 1));
    const auto evaluate = [&](int64_t first, int64_t count) {
      return error_text<InvalidArgument>([&] { rig.engine.evaluate(data, first, count); });
    };
    expect_parts(evaluate(15, 6), {"[15, 15 + 6)", "20 samples"});
    expect_parts(evaluate(-1, 4), {"-1"});
    expect_parts(evaluate(21, 1), {"21"});
    expect_parts(evaluate(1, std::numeric_limits<int64_t>::max()), {"20 samples"});
    expect_parts(evaluate(0, 0), {"num_samples=0"});
    const SampleOrder order(21, 3, false);
    expect_parts(error_text<InvalidArgument>([&] { rig.engine.train_step(data, order, 2, kLr); }),
                 {"order has 21", "has 20"});
    EXPECT_TRUE(std::isfinite(rig.engine.evaluate(data, 0, 20).loss));
  });
}

// ---- logits and parameters ----

TEST(Engine, LogitsNeedNoTargetsButNoWrongOnesEither) {
  run_ranks(1, {}, [&](World& world) {
    EngineRig rig(world, build_gpt(tiny_config()), tiny_options(1, 2));
    HostBatch batch = part_of(tiny_batch(1), 0, 3);
    const std::vector<float> logits = rig.engine.logits(batch);
    EXPECT_EQ(logits.size(), static_cast<size_t>(3 * kSeq * kVocab));
    batch.targets.clear();
    expect_same_bits(rig.engine.logits(batch), logits);
    batch.targets = {1};
    expect_parts(error_text<InvalidArgument>([&] { rig.engine.logits(batch); }), {"18 tokens", "1 targets"});
    EXPECT_TRUE(rig.engine.logits({.num_samples = 0, .seq_len = 1}).empty());
    // A sample alone has the bits that it has among others, and no later token shows.
    HostBatch last = part_of(tiny_batch(1), 2, 3);
    last.tokens.back() = (last.tokens.back() + 1) % kVocab;
    const std::vector<float> alone = rig.engine.logits(last);
    expect_same_bits({alone.begin(), alone.end() - kVocab},
                     {logits.begin() + 2 * kSeq * kVocab, logits.end() - kVocab});
  });
}

TEST(Engine, ParametersByName) {
  run_ranks(1, {}, [&](World& world) {
    EngineRig rig(world, build_gpt(tiny_config()), tiny_options(1, 2));
    Engine& engine = rig.engine;
    expect_parts(error_text<InvalidArgument>([&] { engine.read_param("wte.weight", "grad"); }),
                 {"before the first step"});
    expect_parts(error_text<InvalidArgument>([&] { engine.read_param("wte.weight", "v"); }),
                 {"'v'", "weight, master, grad, exp_avg, exp_avg_sq"});
    expect_parts(error_text<InvalidArgument>([&] { engine.read_param("wte", "weight"); }), {"'wte'"});
    expect_parts(error_text<InvalidArgument>([&] { engine.write_param("ln_f.bias", {1.0f}); }),
                 {"'ln_f.bias'", "[8]", "got 1"});
    const std::vector<float> values = random_floats(8, 1);
    engine.write_param("ln_f.bias", values);
    expect_same_bits(engine.read_param("ln_f.bias", "weight"), values);
    EXPECT_EQ(engine.read_param("ln_f.weight", "weight"), std::vector<float>(8, 1.0f));
  });
}

// Initial weights: the right spread, the same for one seed, and others for another parameter or seed.
TEST(Engine, InitialWeights) {
  run_ranks(1, {}, [&](World& world) {
    GptConfig config = tiny_config();
    config.hidden = 64;
    config.init_std = 0.02;
    config.tied = false;
    EngineRig rig(world, build_gpt(config), tiny_options(1, 2)),
        again(world, build_gpt(config), tiny_options(1, 2));
    expect_same_bits(rig.read("weight"), again.read("weight"));
    EngineOptions options = tiny_options(1, 2);
    options.seed += 1;
    EngineRig other(world, build_gpt(config), options);
    const auto weight = [](EngineRig& from, const char* name) {
      return from.engine.read_param(name, "weight");
    };
    EXPECT_NE(weight(rig, "wte.weight"), weight(other, "wte.weight"));
    EXPECT_NE(weight(rig, "wte.weight"), weight(rig, "lm_head.weight"));
    EXPECT_NE(weight(rig, "h.0.mlp.fc.weight"), weight(rig, "h.1.mlp.fc.weight"));
    EXPECT_EQ(weight(rig, "h.0.mlp.fc.bias"), std::vector<float>(256, 0.0f));
    for (const auto& [name, expected] : std::vector<std::pair<const char*, double>>{
             {"h.0.mlp.fc.weight", 0.02}, {"h.1.mlp.proj.weight", 0.02 / 2}}) {
      double squares = 0, sum = 0;
      const std::vector<float> values = weight(rig, name);
      for (const float value : values) {
        squares += static_cast<double>(value) * static_cast<double>(value);
        sum += static_cast<double>(value);
      }
      const auto n = static_cast<double>(values.size());  // 16384: the spread is good to 0.6 %
      EXPECT_NEAR(std::sqrt(squares / n), expected, 0.03 * expected) << name;
      EXPECT_NEAR(sum / n, 0.0, 5 * expected / std::sqrt(n)) << name;
    }
  });
}

}  // namespace
}  // namespace polyreme::testing
