// The executor over thread ranks: every schedule gives the bits of the unsplit chain, and failures name their
// place.
#include "pipeline/executor.h"

#include <gtest/gtest.h>

#include <random>

#include "comm/rank_threads.h"
#include "common/error_text.h"
#include "pipeline/schedule/complete.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/issue_order.h"
#include "pipeline/schedule/memory.h"
#include "pipeline/schedule/text.h"
#include "pipeline/toy_runner.h"

namespace polyreme::pipeline {
namespace {

using namespace polyreme::testing;
using enum ScheduleKind;
using Outcomes = std::vector<std::string>;

constexpr ScheduleKind kKinds[] = {kGPipe, kOneForwardOneBackward, kInterleaved, kZbH1, kZbV, kDualPipeV};

const CpuDeviceOptions kImmediate{};
CpuDeviceOptions deferred(uint64_t seed) {
  return {.executor = CpuExecutor::kDeferred, .schedule_seed = seed};
}

CommOptions comm_options() {
  CommOptions options;
  options.name = "pp";
  options.timeout = std::chrono::seconds(20);
  return options;
}

// Runs `schedule` on a thread per stage and compares what every stage computed with the unsplit chain.
Outcomes run(const Schedule& schedule, const CpuDeviceOptions& device_options, const ExecutorOptions& options,
             const ToyHooks& hooks = {}, int repeats = 1) {
  const ToyResult expected =
      toy_reference(schedule.num_chunks(), schedule.micro_batches, schedule.forward_only);
  const std::vector<int> peaks = peak_activations(schedule);
  return run_on_threads(
      schedule.num_ranks(), comm_options(), device_options, [&](Communicator& group, Device& device) {
        const auto stream = device.create_stream("compute");
        Executor executor(schedule, group, *stream, options);
        for (int i = 0; i < repeats; ++i) {
          ToyRunner runner(*stream, schedule, hooks);
          executor.run(runner);
          executor.wait();
          const ToyResult result = runner.result();
          const auto& chunks = schedule.chunks[static_cast<size_t>(group.rank())];
          for (const int chunk : chunks) {
            if (!schedule.forward_only) {
              EXPECT_EQ(result.weight_grads.at(chunk), expected.weight_grads.at(chunk)) << "chunk " << chunk;
            }
            if (chunk == schedule.num_chunks() - 1) {
              EXPECT_EQ(result.outputs, expected.outputs);
            }
          }
          EXPECT_EQ(runner.peak(), peaks[static_cast<size_t>(group.rank())]);
          EXPECT_TRUE(runner.is_empty());
        }
      });
}

// Calls body(schedule) for every kind, 1, 2 and 4 stages, and 1 to 9 micro-batches as far as the kind has
// them.
void for_schedules(const std::function<void(const Schedule&)>& body) {
  for (const ScheduleKind kind : kKinds)
    for (const int stages : {1, 2, 4})
      for (int micro_batches = 1; micro_batches <= 9; ++micro_batches) {
        const int chunks = kind == kInterleaved || kind == kZbV || kind == kDualPipeV ? 2 : 1;
        if (kind == kInterleaved && micro_batches % stages != 0) continue;
        if (kind == kDualPipeV && micro_batches < 2 * stages) continue;
        SCOPED_TRACE(concat(name(kind), " stages=", stages, " micro_batches=", micro_batches));
        body(generate({kind, stages, micro_batches, chunks}));
      }
}

Outcomes all_ok(const Schedule& schedule) {
  return Outcomes(static_cast<size_t>(schedule.num_ranks()), "ok");
}

TEST(Executor, EveryKindHasTheBitsOfTheUnsplitChain) {
  for_schedules([](const Schedule& schedule) { EXPECT_EQ(run(schedule, kImmediate, {}), all_ok(schedule)); });
}

TEST(Executor, OneThingAfterTheOther) {
  for_schedules([](const Schedule& schedule) {
    EXPECT_EQ(run(schedule, kImmediate, {.overlap = false}), all_ok(schedule));
  });
}

constexpr int64_t kTensorBytes = 64;

// As bytes of the device: what runs one after the other holds exactly what peak_bytes says.
TEST(Executor, HoldsWhatTheSchedulePredicts) {
  for_schedules([](const Schedule& schedule) {
    const auto last = static_cast<size_t>(schedule.num_chunks() - 1);
    const MemorySizes sizes{.activation = {kTensorBytes},
                            .kept = std::vector<int64_t>(last + 1, 2 * kTensorBytes),
                            .boundary = {kTensorBytes}};
    const std::vector<int64_t> expected = peak_bytes(schedule, sizes);
    const auto rank_main = [&](Communicator& group, Device& device) {
      const auto stream = device.create_stream("compute");
      const auto start = device.memory().in_use_bytes;
      int64_t live = 0, peak = 0;
      {
        Executor executor(schedule, group, *stream, {.overlap = false});
        ToyRunner runner(*stream, schedule);
        runner.counted_memory = [&](int micro_batch) {
          auto* memory = new float[kTensorBytes / sizeof(float)];
          const std::shared_ptr<void> owner(memory, [&live](void* address) {
            live -= kTensorBytes;
            delete[] static_cast<float*>(address);
          });
          peak = std::max(peak, live += kTensorBytes);
          return Tensor(device.wrap_host(memory, kTensorBytes, owner), DType::kF32, {toy_rows(micro_batch)});
        };
        executor.run(runner);
        executor.wait();
        EXPECT_EQ(live, 0);
        EXPECT_EQ(peak, expected[static_cast<size_t>(group.rank())]);
      }
      EXPECT_EQ(device.memory().in_use_bytes, start);
    };
    EXPECT_EQ(run_on_threads(schedule.num_ranks(), comm_options(), kImmediate, rank_main), all_ok(schedule));
  });
}

// Streams in random order, fresh memory poisoned: a wait that is missing is an error.
TEST(Executor, OnTheDeferredDevice) {
  uint64_t seed = 0;
  for_schedules(
      [&](const Schedule& schedule) { EXPECT_EQ(run(schedule, deferred(++seed), {}), all_ok(schedule)); });
}

TEST(Executor, WithRandomDelaysAndAgain) {
  std::atomic<uint32_t> seed = 1;
  ToyHooks hooks;
  hooks.in_operation = [&](const char*, int, int) {
    thread_local std::minstd_rand random(seed++);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
  };
  for (const ScheduleKind kind : kKinds)
    for (const int stages : {2, 4}) {
      const int chunks = kind == kInterleaved || kind == kZbV || kind == kDualPipeV ? 2 : 1;
      const Schedule schedule = generate({kind, stages, 8, chunks});
      EXPECT_EQ(run(schedule, kImmediate, {}, hooks, 3), all_ok(schedule)) << name(kind);
    }
}

TEST(Executor, ForwardOnly) {
  for (const ScheduleKind kind : {kOneForwardOneBackward, kInterleaved, kZbV})
    for (const int stages : {1, 2, 4})
      for (const int micro_batches : {1, 2, 5}) {
        const Schedule schedule = generate_forward_only(
            place_chunks(kind, stages, kind == kOneForwardOneBackward ? 1 : 2), micro_batches);
        EXPECT_EQ(run(schedule, kImmediate, {}), all_ok(schedule));
        EXPECT_EQ(run(schedule, deferred(3), {}), all_ok(schedule));
      }
}

// Chunks dealt out by hand: stage 0 has the middle.
TEST(Executor, AListOfTheUser) {
  const Schedule schedule =
      add_transfers(from_text("micro_batches: 3\n"
                              "chunks: 1 | 0 2\n"
                              "0: F0 F1 F2 I0 I1 I2 W0 W1 W2\n"
                              "1: F0@0 F1@0 F0@2 F2@0 I0@2 F1@2 I1@2 F2@2 I2@2 "
                              "W0@2 B0@0 W1@2 W2@2 B1@0 B2@0\n"));
  EXPECT_EQ(run(schedule, kImmediate, {}), all_ok(schedule));
  EXPECT_EQ(run(schedule, deferred(5), {}), all_ok(schedule));
}

// ---- What goes wrong ----

std::string outcome(const Outcomes& outcomes, int rank) { return outcomes[static_cast<size_t>(rank)]; }

TEST(Executor, ARankThatFailsIsNamedOnAll) {
  const Schedule schedule = generate({kOneForwardOneBackward, 4, 6});
  for (const bool in_operation : {false, true})
    for (const bool is_deferred : {false, true}) {
      SCOPED_TRACE(concat("in_operation=", in_operation, " deferred=", is_deferred));
      const auto boom = [](const char* what, int chunk, int micro_batch) {
        if (std::string(what) == "forward" && chunk == 2 && micro_batch == 3) throw DeviceError("boom");
      };
      ToyHooks hooks;
      (in_operation ? hooks.in_operation : hooks.at_call) = boom;
      const Outcomes outcomes = run(schedule, is_deferred ? deferred(7) : kImmediate, {}, hooks);
      expect_parts(outcome(outcomes, 2), {"DeviceError: ", "boom"});
      if (!in_operation)
        expect_parts(outcome(outcomes, 2), {"pipeline stage 2 of 4: forward, chunk 2, micro-batch 3: boom"});
      for (const int rank : {0, 1, 3}) {
        EXPECT_TRUE(outcome(outcomes, rank).starts_with("PeerLost: pipeline stage "))
            << outcome(outcomes, rank);
        expect_parts(outcome(outcomes, rank), {"micro-batch ", "boom"});
      }
    }
}

TEST(Executor, AStageThatHangsIsNamedWithTheTransfer) {
  CommOptions options = comm_options();
  options.timeout = std::chrono::milliseconds(300);
  const Schedule schedule = generate({kGPipe, 3, 2});
  const Outcomes outcomes = run_on_threads(3, options, kImmediate, [&](Communicator& group, Device& device) {
    if (group.rank() == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(900));
    const auto stream = device.create_stream("compute");
    Executor executor(schedule, group, *stream);
    ToyRunner runner(*stream, schedule);
    executor.run(runner);
    executor.wait();
  });
  expect_parts(
      outcome(outcomes, 0),
      {"Timeout: pipeline stage 0 of 3: send activation, chunk 0, micro-batch 0, to stage 1", "rank 1"});
  expect_parts(outcome(outcomes, 2),
               {"pipeline stage 2 of 3: recv activation, chunk 2, micro-batch ", "rank 1"});
}

TEST(Executor, RefusesWhatCannotRun) {
  const auto group = std::move(make_local_communicators(1, comm_options())[0]);
  const auto device = make_cpu_device({});
  const auto stream = device->create_stream("compute");
  const auto refusal = [&](Schedule schedule, const ExecutorOptions& options = {}) {
    return error_text<InvalidArgument>([&] { Executor(std::move(schedule), *group, *stream, options); });
  };
  expect_parts(refusal(generate({kGPipe, 2, 2})), {"for 2 stages", "pp axis has 1 ranks", "stages=1"});
  expect_parts(refusal(generate_compute({kGPipe, 2, 2})), {"schedule: rank"});
}

// ---- The order of issue ----

TEST(IssueOrder, OnlyMovesTransfersOverOneComputation) {
  for_schedules([](const Schedule& schedule) {
    for (const std::vector<Action>& list : schedule.actions) {
      const std::vector<Action> order = issue_order(list);
      ASSERT_EQ(order.size(), list.size());
      const auto only = [](const std::vector<Action>& actions, bool transfers) {
        std::vector<Action> kept;
        for (const Action& a : actions)
          if (is_transfer(a.kind) == transfers) kept.push_back(a);
        return kept;
      };
      EXPECT_EQ(only(order, true), only(list, true));
      EXPECT_EQ(only(order, false), only(list, false));
      for (size_t i = 0, computations = 0, seen = 0; i < order.size(); ++i) {
        if (!is_transfer(order[i].kind)) {
          ++seen;
          continue;
        }
        // The computations in front of the same transfer in the list: at most one more.
        const size_t at = static_cast<size_t>(std::find(list.begin(), list.end(), order[i]) - list.begin());
        computations = 0;
        for (size_t k = 0; k < at; ++k) computations += !is_transfer(list[k].kind);
        EXPECT_LE(computations - seen, 1u);
      }
    }
  });
}

TEST(IssueOrder, AReceiveGoesAheadAndASendStays) {
  const Schedule schedule = generate({kOneForwardOneBackward, 2, 3});
  const auto text = [](const std::vector<Action>& list) {
    std::string line;
    for (const Action& a : list) line += token(a, false) + " ";
    return line;
  };
  EXPECT_EQ(text(schedule.actions[0]), "F0 SA0>1 F1 SA1>1 RG0<1 B0 F2 SA2>1 RG1<1 B1 RG2<1 B2 ");
  EXPECT_EQ(text(issue_order(schedule.actions[0])), "F0 SA0>1 F1 SA1>1 RG0<1 B0 F2 SA2>1 RG1<1 RG2<1 B1 B2 ");
}

}  // namespace
}  // namespace polyreme::pipeline
