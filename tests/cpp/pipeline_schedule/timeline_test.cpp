// Times, bytes, added transfers and added collectives of small schedules, by hand.
#include "pipeline/schedule/timeline.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "common/error_text.h"
#include "pipeline/schedule/complete.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/memory.h"
#include "pipeline/schedule/text.h"
#include "pipeline/schedule/validate.h"

namespace polyreme::pipeline {
namespace {

using polyreme::testing::error_text;
using polyreme::testing::expect_parts;

void expect_span(const Timeline& timeline, Place place, double start, double end) {
  const Span span = timeline.spans[static_cast<size_t>(place.rank)][static_cast<size_t>(place.position)];
  EXPECT_DOUBLE_EQ(span.start, start) << "rank " << place.rank << ", action " << place.position;
  EXPECT_DOUBLE_EQ(span.end, end) << "rank " << place.rank << ", action " << place.position;
}

TEST(Timeline, TransfersTakeTimeAtBothEnds) {
  const Schedule schedule = from_text("micro_batches: 1\n0: F0 SA0 RG0 B0\n1: RA0 F0 B0 SG0\n");
  const Timeline timeline =
      simulate(schedule, {.forward = {1, 2}, .backward_weight = {3}, .transfer = {9, 0.5}});
  expect_span(timeline, {0, 1}, 1, 1.5);
  expect_span(timeline, {1, 0}, 1, 1.5);
  expect_span(timeline, {1, 1}, 1.5, 3.5);
  expect_span(timeline, {1, 2}, 3.5, 7.5);
  expect_span(timeline, {0, 2}, 7.5, 8);
  expect_span(timeline, {0, 3}, 8, 12);
  EXPECT_DOUBLE_EQ(timeline.makespan, 12);
  EXPECT_DOUBLE_EQ(timeline.bubble(0), 7.0 / 12);
  EXPECT_DOUBLE_EQ(timeline.bubble(1), 6.0 / 12);
}

TEST(Timeline, TransfersRunBesideComputationsUnlessAskedNotTo) {
  const Schedule schedule =
      from_text("micro_batches: 2\nforward_only: true\n0: F0 SA0 F1 SA1\n1: RA0 F0 RA1 F1\n");
  const Timeline overlapped = simulate(schedule, {.transfer = {1}});
  expect_span(overlapped, {0, 2}, 1, 2);
  expect_span(overlapped, {1, 2}, 2, 3);
  EXPECT_DOUBLE_EQ(overlapped.makespan, 4);
  const Timeline strict = simulate(schedule, {.transfer = {1}, .overlap = false});
  expect_span(strict, {0, 2}, 2, 3);
  expect_span(strict, {1, 2}, 3, 4);
  EXPECT_DOUBLE_EQ(strict.makespan, 5);
}

TEST(Timeline, NothingIsReceivedBeforeTheComputationListedBeforeItBegins) {
  const Schedule schedule =
      from_text("micro_batches: 3\nforward_only: true\n0: F0 SA0 F1 SA1 F2 SA2\n1: RA0 F0 RA1 F1 RA2 F2\n");
  const Timeline timeline = simulate(schedule, {.forward = {1, 4}});
  expect_span(timeline, {1, 2}, 2, 2);  // F0 began at 1
  expect_span(timeline, {1, 4}, 5, 5);  // made at 3, but F1 begins at 5
  EXPECT_DOUBLE_EQ(timeline.makespan, 13);
}

TEST(Timeline, CollectivesHaveATrackOfTheirOwn) {
  const Schedule schedule = from_text("micro_batches: 2\n0: gather F0 F1 B0 B1 release reduce step\n");
  const Timeline timeline = simulate(schedule, {.gather = 5, .reduce = 3, .step = 2});
  expect_span(timeline, {0, 0}, 0, 5);
  expect_span(timeline, {0, 1}, 5, 6);
  expect_span(timeline, {0, 6}, 11, 14);
  expect_span(timeline, {0, 7}, 14, 16);
  EXPECT_DOUBLE_EQ(timeline.bubble(0), 10.0 / 16);
}

TEST(Timeline, BadCostsAndSchedulesAreRefused) {
  const Schedule schedule = from_text("micro_batches: 1\n0: F0 B0\n");
  const auto text = [&](const Costs& costs) {
    return error_text<InvalidArgument>([&] { simulate(schedule, costs); });
  };
  expect_parts(text({.forward = {1, 2}}), {"forward has 2 numbers", "1 chunks"});
  expect_parts(text({.backward_input = {}}), {"backward_input has 0 numbers"});
  expect_parts(text({.backward_weight = {-1}}), {"backward_weight is -1"});
  expect_parts(text({.step = 1.0 / 0.0}), {"step is inf", "finite"});
  expect_parts(error_text<InvalidArgument>([] { simulate(from_text("micro_batches: 1\n0: B0 F0\n")); }),
               {"action 0 (B0)"});
  EXPECT_EQ(simulate(schedule, {.forward = {0}, .backward_input = {0}, .backward_weight = {0}}).bubble(0), 0);
}

TEST(Memory, BytesFollowTensorsFromMakingToUse) {
  const Schedule schedule = from_text("micro_batches: 1\n0: F0 SA0 RG0 I0 W0\n1: RA0 F0 I0 SG0 W0\n");
  using Bytes = std::vector<int64_t>;
  EXPECT_EQ(peak_bytes(schedule, {.activation = {10}}), (Bytes{10, 10}));
  // The output until it is sent; the input until it is used.
  EXPECT_EQ(peak_bytes(schedule, {.activation = {10}, .boundary = {99, 1}}), (Bytes{11, 11}));
  // Rank 0: activation, what it keeps, received gradient. Rank 1: with the gradient that it makes.
  EXPECT_EQ(peak_bytes(schedule, {.activation = {10, 20}, .kept = {4, 5}, .boundary = {99, 1}}),
            (Bytes{15, 26}));
  const Schedule grouped =
      from_text("micro_batches: 2\n0: F0 SA0 F1 [SA1 RG0] B0 RG1 B1\n1: RA0 F0 B0 [SG0 RA1] F1 B1 SG1\n");
  EXPECT_EQ(peak_bytes(grouped, {.activation = {0}, .boundary = {1}}), (Bytes{2, 2}));
  expect_parts(error_text<InvalidArgument>([&] {
                 peak_bytes(schedule, {.kept = {1, 2, 3}});
               }),
               {"kept has 3 numbers"});
  expect_parts(error_text<InvalidArgument>([&] { peak_bytes(schedule, {.activation = {-1}}); }),
               {"activation is -1"});
}

TEST(Complete, TransfersHappenWhenTheirTensorsAreMade) {
  const Schedule schedule = add_transfers(from_text("micro_batches: 2\n0: F0 F1 B0 B1\n1: F0 B0 F1 B1\n"));
  // Micro-batch 1 is ready when rank 1 starts B0, and comes before it.
  EXPECT_EQ(to_text(schedule),
            "micro_batches: 2\nchunks: 0 | 1\n"
            "0: F0 SA0>1 F1 SA1>1 RG0<1 B0 RG1<1 B1\n"
            "1: RA0<0 F0 RA1<0 B0 SG0>0 F1 B1 SG1>0\n");
  EXPECT_EQ(to_text(remove_transfers(schedule)),
            "micro_batches: 2\nchunks: 0 | 1\n0: F0 F1 B0 B1\n1: F0 B0 F1 B1\n");
  // With a slow first stage it is ready only after B0.
  const Schedule slow = add_transfers(remove_transfers(schedule), {.forward = {4, 1}});
  EXPECT_EQ(token(slow, 1, 4), "RA1<0");
  EXPECT_FALSE(find_problem(slow));
}

TEST(Complete, TransfersOfAnyCostsAreValid) {
  for (const ScheduleKind kind : {ScheduleKind::kZbV, ScheduleKind::kDualPipeV, ScheduleKind::kInterleaved})
    for (unsigned seed = 0; seed < 40; ++seed) {
      Costs costs{.forward = {}, .backward_input = {}, .backward_weight = {}};
      unsigned state = seed * 2654435761u + 1;
      for (std::vector<double>* list : {&costs.forward, &costs.backward_input, &costs.backward_weight})
        for (int c = 0; c < 8; ++c) list->push_back(1 + ((state = state * 1664525u + 1013904223u) >> 24) % 9);
      const Schedule schedule = add_transfers(generate_compute({kind, 4, 8, 2}), costs);
      const auto problem = find_problem(schedule);
      ASSERT_FALSE(problem) << describe(*problem);
    }
}

TEST(Complete, CollectivesGoWhereTheyAreNeeded) {
  const Schedule base = generate({ScheduleKind::kZbV, 2, 3, 2});
  for (const Gather gather : {Gather::kNone, Gather::kStep, Gather::kUse}) {
    const Schedule schedule = add_collectives(base, {gather, true, true});
    const auto problem = find_problem(schedule);
    ASSERT_FALSE(problem) << describe(*problem);
    EXPECT_EQ(schedule.actions[0].back().kind, ActionKind::kStep);
  }
  const Schedule one =
      from_text("micro_batches: 2\nchunks: 0 1\n0: F0@0 F0@1 B0@1 F1@0 F1@1 B1@1 B0@0 B1@0\n");
  EXPECT_EQ(
      to_text(add_collectives(one, {Gather::kStep, true, false})),
      "micro_batches: 2\nchunks: 0 1\n0: gather@0 F0@0 gather@1 F0@1 B0@1 F1@0 F1@1 B1@1 release@1 reduce@1 "
      "B0@0 B1@0 release@0 reduce@0\n");
  EXPECT_EQ(
      to_text(add_collectives(one, {Gather::kUse, false, true})),
      "micro_batches: 2\nchunks: 0 1\n0: gather@0 F0@0 release@0 gather@1 F0@1 B0@1 release@1 gather@0 F1@0 "
      "release@0 gather@1 F1@1 B1@1 release@1 gather@0 B0@0 B1@0 release@0 step\n");
  // No rank waits for the reduction of another: what it has to send goes first.
  const Schedule two =
      add_collectives(generate({ScheduleKind::kGPipe, 2, 1, 1}), {Gather::kNone, true, false});
  EXPECT_EQ(token(two, 1, 3), "SG0>0");
  EXPECT_EQ(token(two, 1, 4), "reduce");
  expect_parts(error_text<InvalidArgument>([&] { add_collectives(two, {}); }), {"has collectives already"});
  expect_parts(error_text<InvalidArgument>([] {
                 add_collectives(generate_forward_only({{0}}, 1), {Gather::kNone, false, true});
               }),
               {"forward-only"});
}

TEST(Complete, ListsThatAreNotValidAreRefused) {
  const auto text = [](const char* lists, const Costs& costs = {}) {
    return error_text<InvalidArgument>([&] { add_transfers(from_text(lists), costs); });
  };
  expect_parts(text("micro_batches: 1\n0: F0 B0\n1: F0\n"), {"rank 1, action 1 (the end)", "B0@1"});
  expect_parts(text("micro_batches: 1\n0: F0 SA0 B0\n1: F0 B0\n"), {"(SA0>1)", "computations alone"});
  expect_parts(text("micro_batches: 1\n0: F0 B0\n1: F0 B0\n", {.forward = {0}}), {"forward is 0", "above 0"});
}

}  // namespace
}  // namespace polyreme::pipeline
