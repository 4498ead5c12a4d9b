// Stages of ZeRO, orders and overlap: the same bits on every schedule of the deferred device, where a missing
// wait faults; and communication that really runs beside computation.
#include <cstring>

#include "engine/engine_rig.h"

namespace polyreme::testing {
namespace {

// Losses, norms, weights and moments of two steps. Rank 0's; the others must have the same.
std::vector<float> train(int ranks, const EngineOptions& options, const CpuDeviceOptions& device,
                         const GptConfig& config = tiny_config()) {
  std::vector<std::vector<float>> traces(static_cast<size_t>(ranks));
  run_ranks(ranks, device, [&](World& world) {
    EngineRig rig(world, build_gpt(config), options);
    std::vector<float>& trace = traces[static_cast<size_t>(world.rank())];
    for (uint32_t step = 0; step < 2; ++step) {
      const StepStats stats = rig.step(tiny_batch(step), kLr);
      trace.push_back(static_cast<float>(stats.loss));
      trace.push_back(static_cast<float>(stats.grad_norm));
    }
    for (const char* kind : {"weight", "grad", "exp_avg", "exp_avg_sq"}) append(trace, rig.read(kind));
  });
  for (const std::vector<float>& trace : traces) expect_same_bits(trace, traces[0], "another rank");
  return traces[0];
}

EngineOptions with_zero(EngineOptions options, const ZeroOptions& zero) {
  options.zero = zero;
  return options;
}

TEST(Zero, EveryScheduleOfTheDeferredDeviceHasTheBitsOfOneRank) {
  GptConfig recompute = tiny_config();
  recompute.recompute = Recomputation::kBlocks;
  for (const bool round_first : {false, true}) {
    const ZeroOptions plain{.round_first = round_first};
    const std::vector<float> one = train(1, with_zero(tiny_options(4, 1), plain), {});
    uint64_t seed = 0;
    for (const int stage : {0, 1, 2, 3})
      for (const ZeroOptions& zero : {ZeroOptions{.bucket_bytes = 1},
                                      {.bucket_bytes = 3000, .prefetch = 2},
                                      {.shard_size = 2, .bucket_bytes = 3000, .prefetch = 0},
                                      {.overlap = false, .persist_below = 100}}) {
        if (stage < 2 && zero.bucket_bytes != 1) continue;  // they have nothing to gather or to release
        EngineOptions options = with_zero(tiny_options(4, 1), zero);
        options.zero.stage = stage;
        options.zero.round_first = round_first;
        const int ranks = zero.shard_size == 2 ? 4 : 2;
        expect_same_bits(train(ranks, options, {.executor = CpuExecutor::kDeferred, .schedule_seed = ++seed},
                               seed % 2 ? recompute : tiny_config()),
                         one, concat("stage ", stage, ", round_first ", round_first, ", schedule ", seed));
      }
  }
}

// The spans of rank 0 in the second of two steps.
std::vector<Span> spans_of_a_step(const ZeroOptions& zero) {
  std::vector<Span> spans;
  run_ranks(2, {}, [&](World& world) {
    EngineRig rig(world, build_gpt(tiny_config()), with_zero(tiny_options(2, 4), zero));
    rig.step(tiny_batch(1), kLr);
    world.device().recorder().enable(true);
    rig.step(tiny_batch(2), kLr);
    world.device().recorder().enable(false);
    if (world.rank() == 0) spans = world.device().recorder().spans();
  });
  return spans;
}

std::vector<Span> named(const std::vector<Span>& spans, const char* name) {
  std::vector<Span> found;
  std::copy_if(spans.begin(), spans.end(), std::back_inserter(found),
               [&](const Span& span) { return std::strcmp(span.name, name) == 0; });
  return found;
}

TEST(Zero, BucketsAreReducedWhileBackwardGoesOn) {
  // In stage 2 backward waits for the reduction of the bucket before the last one, so this is no race.
  for (const bool overlap : {true, false}) {
    const std::vector<Span> spans = spans_of_a_step({.stage = 2, .bucket_bytes = 1, .overlap = overlap});
    const std::vector<Span> reductions = named(spans, "reduce_scatter"), gemms = named(spans, "gemm");
    ASSERT_EQ(reductions.size(), 28u) << "one for each parameter";
    ASSERT_FALSE(gemms.empty());
    const auto during_backward = std::count_if(reductions.begin(), reductions.end(), [&](const Span& span) {
      return span.end_ns < gemms.back().start_ns;
    });
    EXPECT_GT(during_backward, 10);
    EXPECT_EQ(reductions[0].stream != gemms[0].stream, overlap);
  }
}

TEST(Zero, WeightsAreGatheredAheadAndReleased) {
  for (const int64_t prefetch : {0, 1, 2}) {
    const ZeroOptions zero{.stage = 3, .bucket_bytes = int64_t{1} << 30, .prefetch = prefetch};
    const std::vector<Span> spans = spans_of_a_step(zero);
    std::vector<Span> gathers;
    for (const Span& span : named(spans, "all_gather"))
      if (span.bytes > 1024) gathers.push_back(span);  // not the facts that ranks agree on
    // Units: wte with wpe, two blocks, ln_f (below 1 KiB of payload on two ranks it is padded to a block of
    // the norm). Forward and backward gather each; what backward begins with is still there unless nothing is
    // kept in sight, and the tied head uses wte again on both ways.
    EXPECT_GE(gathers.size(), 7u);
    EXPECT_LE(gathers.size(), 10u);
  }
}

TEST(Zero, MemoryDoesNotGrow) {
  for (const int stage : {0, 1, 2, 3})
    for (const bool round_first : {false, true})
      run_ranks(2, {}, [&](World& world) {
        const ZeroOptions zero{.stage = stage, .bucket_bytes = 1000, .round_first = round_first};
        EngineRig rig(world, build_gpt(tiny_config()), with_zero(tiny_options(4, 1), zero));
        rig.step(tiny_batch(1), kLr);
        const int64_t in_use = world.device().memory().in_use_bytes;
        for (uint32_t step = 0; step < 3; ++step) rig.step(tiny_batch(step), kLr);
        EXPECT_EQ(world.device().memory().in_use_bytes, in_use) << "stage " << stage;
      });
}

// Ranks whose samples do not divide, one of them without any, gather together.
TEST(Zero, LogitsOfAnyNumberOfSamplesInStage3) {
  std::vector<std::vector<float>> whole(1), parts(2);
  const HostBatch batch = part_of(tiny_batch(3), 0, 3);
  run_ranks(1, {}, [&](World& world) {
    whole[0] = EngineRig(world, build_gpt(tiny_config()), tiny_options(2, 1)).engine.logits(batch);
  });
  run_ranks(2, {}, [&](World& world) {
    EngineRig rig(world, build_gpt(tiny_config()), with_zero(tiny_options(2, 1), {.stage = 3}));
    const HostBatch own = world.rank() == 0 ? batch : part_of(batch, 0, 0);
    parts[static_cast<size_t>(world.rank())] = rig.engine.logits(own);
    HostBatch bad = own;
    if (world.rank() == 0) bad.tokens[0] = -1;
    const std::string text = error_text<InvalidArgument>([&] { rig.engine.logits(bad); });
    expect_parts(text, {world.rank() == 0 ? "token -1" : "rank 0 refused"});
  });
  expect_same_bits(parts[0], whole[0]);
  EXPECT_TRUE(parts[1].empty());
}

TEST(Zero, ShardSizesThatAreNoSubtreesAreRefused) {
  run_ranks(6, {}, [](World& world) {
    const auto text = [&](int64_t shard_size) {
      EngineOptions options = with_zero(tiny_options(0, 1), {.stage = 2, .shard_size = shard_size});
      options.global_batch = 6;
      return error_text<InvalidArgument>([&] { EngineRig(world, build_gpt(tiny_config()), options); });
    };
    expect_parts(text(3), {"shard_size=3", "dp=6", "power of two"});
    expect_parts(text(4), {"shard_size=4", "divides"});
    expect_parts(text(12), {"shard_size=12"});
    EXPECT_EQ(text(2), "(no error of the expected type)");
  });
}

}  // namespace
}  // namespace polyreme::testing
