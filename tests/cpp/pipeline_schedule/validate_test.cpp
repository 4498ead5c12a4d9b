// What the validator refuses, and how it says so: one edit of a valid schedule at a time, and deadlocks.
#include "pipeline/schedule/validate.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "common/error_text.h"
#include "pipeline/schedule/text.h"

namespace polyreme::pipeline {
namespace {

using polyreme::testing::error_text;
using polyreme::testing::expect_parts;

const std::string kValid =
    "micro_batches: 2\n"
    "0: F0 SA0 F1 SA1 RG0 B0 RG1 I1 W1\n"
    "1: RA0 F0 RA1 F1 B0 SG0 B1 SG1\n";

std::string edited(const std::string& from, const std::string& to) {
  std::string text = kValid;
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string problem_text(const std::string& text, const ValidateOptions& options = {}) {
  const auto problem = find_problem(from_text(text), options);
  return problem ? describe(*problem) : "valid";
}

TEST(Validate, OneEditMakesAProblemThatIsNamed) {
  EXPECT_EQ(problem_text(kValid), "valid");
  const struct {
    const char *from, *to, *place, *reason;
  } cases[] = {
      {"F1 SA1", "SA1", "rank 0, action 2 (SA1>1)", "comes before F1@0"},
      {"I1 W1", "I1", "rank 0, action 8 (the end)", "W1@0 is missing"},
      {"I1 W1", "W1 I1", "rank 0, action 7 (W1)", "comes before I1@0"},
      {"I1 W1", "I1 W1 W1", "rank 0, action 9 (W1)", "weights runs a second time"},
      {"I1 W1", "B1 I1", "rank 0, action 8 (I1)", "input runs a second time"},
      {"F0 SA0", "F0 F0 SA0", "rank 0, action 1 (F0)", "runs a second time"},
      {"RG0 B0", "B0 RG0", "rank 0, action 4 (B0)", "comes before RG0@0"},
      {"RG0 B0 ", "", "rank 0, action 6 (W1)", ""},
      {"RA0 F0", "F0 RA0", "rank 1, action 0 (F0)", "comes before RA0@1"},
      {"F1 B0 SG0 B1 SG1", "B1 F1 B0 SG0 SG1", "rank 1, action 3 (B1)", "comes before F1@1"},
      {"B0 SG0 B1 SG1", "B1 SG1 B0 SG0", "rank 1, action 6 (B0)", "in ascending order within a chunk,"},
      {"SA0 F1", "SA0 SA0 F1", "rank 0, action 2 (SA0>1)", "is sent a second time"},
      {"RA0 F0", "RA0 RA0 F0", "rank 1, action 1 (RA0<0)", "is received a second time"},
      {"B0 SG0 B1", "B0 B1", "rank 1, action 7 (the end)", "SG0@1 is missing"},
      {"F0 SA0 F1", "F0 F1", "rank 0, action 8 (the end)", "SA0@0 is missing"},
      {"F0 SA0", "F0 SA0>0", "rank 0, action 1 (SA0>0)", "has the peer 0; chunk 1 is on rank 1"},
      {"F0 SA0", "F0 SG0>1", "rank 0, action 1 (SG0>1)", "chunk 0 is the first"},
      {"F1 B0", "F1 SA1>0 B0", "rank 1, action 4 (SA1>0)", "chunk 1 is the last"},
      {"F0 SA0", "F0@1 SA0", "rank 0, action 0 (F0)", "chunk 1 is on rank 1, not on rank 0"},
      {"F0 SA0", "F0@9 SA0", "rank 0, action 0 (F0)", "chunk 9; expected 0 to 1"},
      {"RA0 F0 RA1 F1", "RA1 F1 RA0 F0", "rank 1, action 0 (RA1<0)", "is SA0>1 (its action 1)"},
      {"F0 SA0 F1", "gather F0 SA0 release F1", "rank 0, action 4 (F1)",
       "weights of chunk 0 are not gathered"},
      {"F0 SA0", "gather gather F0 SA0", "rank 0, action 1 (gather)", "gathered already"},
      {"F0 SA0", "gather F0 SA0", "rank 0, action 10 (the end)", "still gathered"},
      {"F0 SA0", "release F0 SA0", "rank 0, action 0 (release)", "are not gathered"},
      {"I1 W1", "I1 reduce W1", "rank 0, action 10 (the end)", "gradients after its last reduce"},
      {"I1 W1", "I1 W1 reduce reduce", "rank 0, action 10 (reduce)", "has no gradients"},
      {"I1 W1", "I1 W1 step", "rank 1, action 8 (the end)", "the step is missing"},
      {"I1 W1", "I1 step W1", "rank 0, action 9 (W1)", "comes after the step"},
      {"micro_batches: 2", "micro_batches: 2\nforward_only: true", "rank 0, action 4 (RG0<1)", "no place"},
  };
  for (const auto& [from, to, place, reason] : cases) {
    SCOPED_TRACE(concat(from, " -> ", to));
    if (std::string(reason).empty()) {
      EXPECT_NE(problem_text(edited(from, to)), "valid");
      continue;
    }
    expect_parts(problem_text(edited(from, to)), {place, reason});
  }
}

TEST(Validate, ActionsThatNoTextCanSay) {
  const auto changed = [](const auto& change) {
    Schedule schedule = from_text(kValid);
    change(schedule.actions[0]);
    const auto problem = find_problem(schedule);
    return problem ? describe(*problem) : "valid";
  };
  using List = std::vector<Action>;
  expect_parts(changed([](List& list) { list[2].with_previous = true; }),
               {"action 2 (F1)", "only transfers"});
  expect_parts(changed([](List& list) { list[1].with_previous = true; }),
               {"action 1 (SA0>1)", "only transfers"});
  expect_parts(changed([](List& list) { list[0].peer = 1; }), {"action 0", "has a peer"});
  expect_parts(changed([](List& list) { list[0].micro_batch = 2; }), {"action 0 (F2)", "micro-batch 2"});
  expect_parts(changed([](List& list) { list[0].micro_batch = -1; }), {"action 0 (F)", "micro-batch -1"});
  expect_parts(changed([](List& list) { list[0].chunk = -1; }), {"action 0", "chunk -1"});
}

// Both send first, and none receives: without buffers nothing moves.
TEST(Validate, TwoRanksThatSendToEachOtherWaitInACircle) {
  const std::string text =
      "micro_batches: 2\n"
      "0: F0 SA0 F1 SA1 RG0 B0 RG1 B1\n"
      "1: RA0 F0 B0 SG0 RA1 F1 B1 SG1\n";
  const auto problem = find_problem(from_text(text));
  ASSERT_TRUE(problem);
  EXPECT_EQ(
      problem->reason,
      "deadlock: rank 0 waits at action 3 (SA1>1) for rank 1, which waits at action 3 (SG0>0) for rank 0");
  ASSERT_EQ(problem->cycle.size(), 2u);
  EXPECT_EQ(problem->cycle[1].place.position, 3);

  // The same transfers at once: no order between them, so both can go.
  EXPECT_EQ(problem_text("micro_batches: 2\n"
                         "0: F0 SA0 F1 [SA1 RG0] B0 RG1 B1\n"
                         "1: RA0 F0 B0 [SG0 RA1] F1 B1 SG1\n"),
            "valid");
}

TEST(Validate, ACircleOfThreeIsNamedWithoutThoseWhoWaitForIt) {
  // Chunks go around: 0 -> 1 -> 2 -> 0. Every rank sends one micro-batch more than the next one takes. Rank 3
  // waits too, but is not part of the circle.
  const std::string text =
      "micro_batches: 3\n"
      "forward_only: true\n"
      "chunks: 0 3 | 1 4 | 2 5 | 6\n"
      "0: F0@0 SA0@0 F1@0 SA1@0 F2@0 SA2@0 RA0@3 F0@3 SA0@3 RA1@3 F1@3 SA1@3 RA2@3 F2@3 SA2@3\n"
      "1: RA0@1 F0@1 SA0@1 RA1@1 F1@1 SA1@1 RA2@1 F2@1 SA2@1\n"
      "   RA0@4 F0@4 SA0@4 RA1@4 F1@4 SA1@4 RA2@4 F2@4 SA2@4\n"
      "2: RA0@2 F0@2 SA0@2 RA1@2 F1@2 SA1@2 RA2@2 F2@2 SA2@2\n"
      "   RA0@5 F0@5 SA0@5 RA1@5 F1@5 SA1@5 RA2@5 F2@5 SA2@5\n"
      "3: RA0 F0 RA1 F1 RA2 F2\n";
  expect_parts(
      problem_text(text),
      {"rank 0, action 5 (SA2@0>1): deadlock: rank 0 waits at action 5 (SA2@0>1) for rank 1, which waits "
       "at action 5 (SA1@1>2) for rank 2, which waits at action 2 (SA0@2>0) for rank 0"});
}

TEST(Validate, AGroupIsPassedOnlyWhenAllOfItIsDone) {
  // Rank 0 takes the gradient of micro-batch 0 in one group with sending micro-batch 1, but rank 1 wants
  // micro-batch 1 only after that gradient has gone by.
  expect_parts(problem_text("micro_batches: 2\n"
                            "0: F0 SA0 F1 [SA1 RG0] B0 RG1 B1\n"
                            "1: RA0 F0 RA1 F1 B0 SG0 B1 SG1\n"),
               {"valid"});
  expect_parts(problem_text("micro_batches: 2\n"
                            "0: F0 F1 [SA0 RG1] SA1 RG0 B0 B1\n"
                            "1: RA0 F0 RA1 F1 B0 B1 SG1 SG0\n"),
               {"rank 0 waits at action 3 (RG1<1) for rank 1, which waits at action 2 (RA1<0) for rank 0"});
}

TEST(Validate, ComputationsAloneCanWaitInACircleToo) {
  const std::string text =
      "micro_batches: 2\n"
      "0: F0 B0 F1 B1\n"
      "1: F1 F0 B0 B1\n";
  expect_parts(
      problem_text(text, {.implied_transfers = true}),
      {"deadlock: rank 0 waits at action 1 (B0) for rank 1, which waits at action 0 (F1) for rank 0"});
  expect_parts(problem_text(text), {"rank 0, action 1 (B0)", "comes before RG0@0"});
  expect_parts(problem_text(kValid, {.implied_transfers = true}), {"action 1 (SA0>1)", "computations alone"});
}

TEST(Validate, LanesOrderOnlyTheirOwnMicroBatches) {
  const std::string text = "micro_batches: 4\n0: F0 F1 F2 F3 B2 B3 B0 B1\n";
  expect_parts(problem_text(text), {"action 6 (B0)", "weight gradients of micro-batch 3"});
  EXPECT_EQ(problem_text(text, {.lanes = 2}), "valid");
  expect_parts(problem_text("micro_batches: 4\n0: F0 F1 F2 F3 B2 B0 B3 B1\n", {.lanes = 4}), {"valid"});
  expect_parts(problem_text("micro_batches: 4\n0: F0 F1 F2 F3 B3 B2 B0 B1\n", {.lanes = 2}),
               {"action 5 (B2)", "within a chunk and lane"});
  expect_parts(error_text<InvalidArgument>([&] { problem_text(text, {.lanes = 3}); }),
               {"3 lanes", "divisor of the 4"});
}

}  // namespace
}  // namespace polyreme::pipeline
