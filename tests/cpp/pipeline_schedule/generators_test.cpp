// The published schedules, for every size of a grid: valid, with the peak and the bubble of their papers.
#include "pipeline/schedule/generators.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "base/error.h"
#include "common/error_text.h"
#include "pipeline/schedule/complete.h"
#include "pipeline/schedule/memory.h"
#include "pipeline/schedule/timeline.h"
#include "pipeline/schedule/validate.h"

namespace polyreme::pipeline {
namespace {

using polyreme::testing::error_text;
using polyreme::testing::expect_parts;
using enum ScheduleKind;

constexpr ScheduleKind kKinds[] = {kGPipe, kOneForwardOneBackward, kInterleaved, kZbH1, kZbV, kDualPipeV};

bool in_a_v(ScheduleKind kind) { return kind == kZbV || kind == kDualPipeV; }

// Calls body(request, schedule) for all that a kind allows.
void for_sizes(ScheduleKind kind, const std::function<void(const ScheduleRequest&, const Schedule&)>& body) {
  for (const int stages : {1, 2, 3, 4, 5, 6, 7, 8, 16})
    for (int micro_batches = 1; micro_batches <= 32; ++micro_batches)
      for (int chunks = 1; chunks <= 4; ++chunks) {
        const bool multiple = micro_batches % stages == 0 || chunks == 1;
        if (kind == kInterleaved ? !multiple : chunks != (in_a_v(kind) ? 2 : 1)) continue;
        if (kind == kDualPipeV && micro_batches < 2 * stages) continue;
        const ScheduleRequest request{kind, stages, micro_batches, chunks};
        SCOPED_TRACE(
            concat(name(kind), " stages=", stages, " micro_batches=", micro_batches, " chunks=", chunks));
        body(request, generate(request));
      }
}

// The most activations of a rank; below 0 where the papers do not say.
int expected_peak(const ScheduleRequest& request, int rank) {
  const int p = request.stages, m = request.micro_batches, v = request.chunks;
  switch (request.kind) {
    case kGPipe:
      return m;
    case kZbH1:  // the peak of 1F1B's first rank, on all
      return std::min(p, m);
    case kZbV:  // p whole stages, once the pipeline fills
      return m >= 2 * p - 1 ? 2 * p : -1;
    case kDualPipeV:  // p + 1/2 stages
      return 2 * p + 1;
    default:
      return v == 1 ? std::min(p - rank, m) : std::min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v);
  }
}

// The makespan with F, I and W for a chunk, and free transfers; below 0 where no closed form is known.
double closed_form(const ScheduleRequest& r, double f, double i, double w) {
  const int p = r.stages, m = r.micro_batches;
  const double all = m * r.chunks * (f + i + w);
  switch (r.kind) {
    case kZbH1:
      return m >= p && w <= f && w <= i ? all + (p - 1) * (f + i - w) : -1;
    case kZbV:
      return m >= 2 * p - 1 && f == i && i == w ? all + (p - 1) * f : -1;
    case kDualPipeV:
      return f == i && i == w ? all + (p - 1) * f : -1;
    default:  // also interleaved: f is that of a chunk, so the bubble shrinks with the chunks
      return all + (p - 1) * (f + i + w);
  }
}

// Of every size: valid, the published peak, and the closed form of the makespan for equal costs.
TEST(Generators, EverythingGeneratedIsValidAndAsPublished) {
  for (const ScheduleKind kind : kKinds) {
    int closed = 0;
    for_sizes(kind, [&](const ScheduleRequest& request, const Schedule& schedule) {
      const auto problem = find_problem(schedule);
      ASSERT_FALSE(problem) << describe(*problem);
      const Timeline timeline = simulate(schedule);
      const double expected = closed_form(request, 1, 1, 1);
      if (expected >= 0) {
        ++closed;
        EXPECT_DOUBLE_EQ(timeline.makespan, expected);
      }
      const double work = request.micro_batches * request.chunks * 3;
      const std::vector<int> peaks = peak_activations(schedule);
      for (int r = 0; r < request.stages; ++r) {
        EXPECT_NEAR(timeline.bubble(r), (timeline.makespan - work) / timeline.makespan, 1e-12);
        const int peak = expected_peak(request, r);
        const int most = 2 * std::min(request.stages, request.micro_batches);
        EXPECT_TRUE(peak >= 0 ? peaks[static_cast<size_t>(r)] == peak : peaks[static_cast<size_t>(r)] <= most)
            << peaks[static_cast<size_t>(r)] << " on rank " << r << ", expected " << peak;
      }
    });
    EXPECT_GT(closed, 80) << name(kind);
  }
}

// Transfers in the order that these costs ask for.
TEST(Generators, OtherCostsHaveTheirClosedFormToo) {
  const double cases[][3] = {{2, 3, 2}, {4, 5, 3}, {1, 0.5, 0.25}};
  for (const ScheduleKind kind : {kGPipe, kOneForwardOneBackward, kInterleaved, kZbH1})
    for (const int stages : {1, 2, 3, 4, 8, 16})
      for (const int rounds : {1, 2, 5})
        for (const auto& [f, i, w] : cases) {
          const ScheduleRequest request{kind, stages, rounds * stages, kind == kInterleaved ? 3 : 1};
          SCOPED_TRACE(concat(name(kind), " stages=", stages, " rounds=", rounds, " f=", f));
          const Costs costs{.forward = {f}, .backward_input = {i}, .backward_weight = {w}};
          const Schedule schedule = add_transfers(generate_compute(request), costs);
          EXPECT_DOUBLE_EQ(simulate(schedule, costs).makespan, closed_form(request, f, i, w));
        }
}

TEST(Generators, TheStrictModelCostsTheClassicSchedulesNothing) {
  for (const ScheduleKind kind : {kGPipe, kOneForwardOneBackward, kZbH1, kZbV})
    for (const int stages : {1, 2, 3, 4, 8})
      for (const int micro_batches : {1, 2, 7, 16}) {
        const Schedule schedule = generate({kind, stages, micro_batches, in_a_v(kind) ? 2 : 1});
        EXPECT_DOUBLE_EQ(simulate(schedule, {.overlap = false}).makespan, simulate(schedule).makespan);
      }
}

// DeepSeek's bubble, (p - 1)(F&B + B - 3W), counts a forward and the backward next to it as one.
TEST(Generators, DualPipeVIsWithinItsPublishedBubble) {
  for (const int stages : {1, 2, 3, 4, 8})
    for (const int micro_batches : {2 * stages, 2 * stages + 3}) {
      const double bubble = (stages - 1) * (3 + 2 - 3);
      EXPECT_LE(simulate(generate({kDualPipeV, stages, micro_batches, 2})).makespan,
                micro_batches * 6 + bubble);
    }
}

TEST(Generators, ForwardOnlyListsFollowAnyPlacement) {
  for (const ScheduleKind kind : kKinds)
    for (const int stages : {1, 2, 3, 4, 8})
      for (const int micro_batches : {1, 2, 3, 7, 16}) {
        const int chunks = kind == kInterleaved ? 3 : in_a_v(kind) ? 2 : 1;
        const Schedule schedule = generate_forward_only(place_chunks(kind, stages, chunks), micro_batches);
        const auto problem = find_problem(schedule);
        ASSERT_FALSE(problem) << describe(*problem);
        EXPECT_TRUE(schedule.forward_only);
        EXPECT_EQ(peak_activations(schedule), std::vector<int>(static_cast<size_t>(stages), 0));
        if (chunks == 1) {
          EXPECT_EQ(simulate(schedule).makespan, micro_batches + stages - 1);
        }
      }
}

TEST(Generators, SizesThatAKindDoesNotAllowAreRefusedWithTheNearestThatWork) {
  const auto text = [](ScheduleKind kind, int stages, int micro_batches, int chunks) {
    return error_text<InvalidArgument>([&] { generate({kind, stages, micro_batches, chunks}); });
  };
  expect_parts(text(kInterleaved, 4, 10, 2), {"interleaved", "micro_batches=10", "4 stages", "8 or 12"});
  expect_parts(text(kInterleaved, 4, 3, 2), {"micro_batches=4"});
  expect_parts(text(kDualPipeV, 4, 5, 2), {"dual_pipe_v", "micro_batches=8 or more", "at most 2 stages"});
  expect_parts(text(kDualPipeV, 4, 1, 2), {"micro_batches=8 or more"});
  expect_parts(text(kZbV, 2, 4, 1), {"zb_v", "chunks=1", "expected 2"});
  expect_parts(text(kZbH1, 2, 4, 2), {"zb_h1", "chunks=2", "expected 1", "interleaved"});
  expect_parts(text(kGPipe, 0, 4, 1), {"stages=0", "1 to 1024"});
  expect_parts(text(kGPipe, 2, 0, 1), {"micro_batches=0", "1 to 65536"});
  expect_parts(text(kGPipe, 2, -3, 1), {"micro_batches=-3"});
  expect_parts(text(kInterleaved, 1, 1, 0), {"chunks=0"});
  expect_parts(text(kGPipe, 1024, 65536, 1), {"1024 chunks x 65536 micro-batches"});
  expect_parts(error_text<InvalidArgument>([] { generate_forward_only({}, 1); }), {"0 stages"});
  expect_parts(error_text<InvalidArgument>([] {
                 generate_forward_only({{0}, {}}, 1);
               }),
               {"rank 1 holds no chunk"});
  expect_parts(error_text<InvalidArgument>([] { schedule_kind_of_name("zbv"); }),
               {"'zbv'", "zb_v, dual_pipe_v"});
}

}  // namespace
}  // namespace polyreme::pipeline
