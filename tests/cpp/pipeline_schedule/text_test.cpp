// The text form: both ways for everything that is generated, and what is refused where.
#include "pipeline/schedule/text.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "common/error_text.h"
#include "pipeline/schedule/complete.h"
#include "pipeline/schedule/generators.h"

namespace polyreme::pipeline {
namespace {

using polyreme::testing::error_text;
using polyreme::testing::expect_parts;

TEST(ScheduleText, WhatIsWrittenIsReadBack) {
  for (const ScheduleKind kind :
       {ScheduleKind::kGPipe, ScheduleKind::kOneForwardOneBackward, ScheduleKind::kInterleaved,
        ScheduleKind::kZbH1, ScheduleKind::kZbV, ScheduleKind::kDualPipeV})
    for (const int stages : {1, 2, 4}) {
      const bool one_chunk = kind == ScheduleKind::kGPipe || kind == ScheduleKind::kOneForwardOneBackward ||
                             kind == ScheduleKind::kZbH1;
      const Schedule schedule = generate({kind, stages, 12, one_chunk ? 1 : 2});
      EXPECT_EQ(from_text(to_text(schedule)), schedule);
      const Schedule full = add_collectives(schedule, {Gather::kUse, true, true});
      EXPECT_EQ(from_text(to_text(full)), full);
      const Schedule forward = generate_forward_only(schedule.chunks, 5);
      EXPECT_EQ(from_text(to_text(forward)), forward);
    }
}

TEST(ScheduleText, BlanksCommentsContinuationsAndPeersAreFree) {
  const Schedule plain = from_text(
      "micro_batches: 2\n0: F0 SA0>1 F1 [SA1>1 RG0<1] B0 RG1<1 B1\n1: RA0<0 F0 B0 [SG0>0 RA1<0] F1 B1 "
      "SG1>0\n");
  const Schedule free = from_text(
      "# by hand\n\nmicro_batches:2 # two\r\nforward_only: false\nchunks: 0|1\n"
      "0: F0  SA0 F1\t[ SA1 RG0 ]\n   B0 # then\n\n  RG1 B1\n"
      "1:RA0@1<0 F0@1 B0[SG0 RA1]F1 B1 SG1");
  EXPECT_EQ(plain, free);
}

TEST(ScheduleText, WhatCannotBeReadIsNamedByLineAndToken) {
  const std::string head = "micro_batches: 2\n";
  const struct {
    std::string text;
    std::vector<std::string> parts;
  } cases[] = {
      {"", {"'the end'", "no rank has a list"}},
      {head, {"'the end'", "no rank has a list"}},
      {"0: F0\n", {"line 1, '0'", "expected 'micro_batches: N' before"}},
      {"micro_batches: 0\n0: F0", {"line 1, '0'", "1 to 65536"}},
      {"micro_batches: 02\n0: F0", {"line 1, '02'"}},
      {"micro_batches: -1\n0: F0", {"'-1'"}},
      {"micro_batches: 99999999999999999999\n0: F0", {"'99999999999999999999'"}},
      {"micro_batches:\n0: F0", {"line 1, 'micro_batches'", "has no value"}},
      {"micro_batches: 2 3\n0: F0", {"'3'", "only one number"}},
      {head + head, {"line 2, 'micro_batches'", "a second time"}},
      {head + "0: F0\nforward_only: true\n", {"line 3, 'forward_only'", "put it before"}},
      {head + "forward_only: yes\n", {"line 2, 'yes'", "true or false"}},
      {head + "chunks: 0 | x\n0: F0", {"line 2, 'x'", "expected a chunk"}},
      {head + "chunks: 0 | 4096\n", {"'4096'", "0 to 4095"}},
      {head + "chunks: 0 | 1\n0: F0\n", {"1 lists", "names 2 ranks"}},
      {head + "chunks: 0\n0: F0\n1: F0\n", {"line 4, '1'", "names 1 ranks"}},
      {head + "chunks: 0 | 0\n0: F0\n1: F0\n", {"chunk 0 is held by rank 0 and by rank 1"}},
      {head + "chunks: 0 | 2\n0: F0\n1: F0\n", {"rank 1 holds chunk 2", "0 to 1"}},
      {head + "chunks: 0 1 |\n0: F0@0\n1:\n", {"rank 1 holds no chunk"}},
      {head + "1: F0\n", {"line 2, '1'", "expected rank 0 here"}},
      {head + "0: F0\n0: F0\n", {"line 3, '0'", "expected rank 1 here"}},
      {head + "rank 0: F0\n", {"line 2, 'rank 0'", "a rank from 0"}},
      {head + "F0 B0\n", {"line 2, 'F0'", "a rank and a colon"}},
      {"  F0\n", {"line 1, 'F0", "no rank's list came before"}},
      {head + "0: F2\n", {"line 2, 'F2'", "0 to 1"}},
      {head + "0: F\n", {"'F'", "expected a micro-batch"}},
      {head + "0: F00\n", {"'F00'"}},
      {head + "0: F-1\n", {"'F-1'"}},
      {head + "0: f0\n", {"'f0'", "expected F, B, I, W"}},
      {head + "0: X0\n", {"'X0'", "expected F, B, I, W"}},
      {head + "0: F0x\n", {"'F0x'", "cannot read 'x'"}},
      {head + "0: F0>1\n", {"'F0>1'", "cannot read '>1'"}},
      {head + "0: SA0<1\n", {"'SA0<1'", "cannot read '<1'"}},
      {head + "0: SA0>\n", {"'SA0>'", "expected a rank after '>'"}},
      {head + "0: F0@\n", {"'F0@'", "expected a chunk after '@'"}},
      {head + "0: step1\n", {"'step1'", "cannot read '1'"}},
      {head + "0: step@0\n", {"'step@0'"}},
      {head + "chunks: 0 1\n0: F0\n", {"'F0'", "one of the 2 chunks"}},
      {head + "0: [F0]\n", {"'F0'", "only transfers run at once"}},
      {head + "0: []\n", {"']'", "an empty group"}},
      {head + "0: ]\n", {"']'", "no group is open"}},
      {head + "0: [SA0 [SA1]]\n", {"'['", "a group within a group"}},
      {head + "0: [SA0\n  SA1]\n", {"line 2, '['", "not closed on its line"}},
      {head + "0: F0\x01\xff\n", {"line 2, 'F0?", "?'"}},
      {head + "0: " + std::string(100, 'F') + "\n", {"line 2, '" + std::string(40, 'F') + "...'"}},
  };
  for (const auto& [text, parts] : cases) {
    SCOPED_TRACE(text.substr(0, 60));
    const std::string& input = text;
    expect_parts(error_text<InvalidArgument>([&] { from_text(input); }), parts);
  }
  expect_parts(error_text<InvalidArgument>([] { from_text(std::string(kMaxTextBytes + 1, ' ')); }),
               {"67108865 bytes"});
}

// Cut anywhere, or with any one byte changed: read, or refused in words.
TEST(ScheduleText, DamagedTextIsReadOrRefused) {
  const std::string text = to_text(generate({ScheduleKind::kZbV, 2, 3, 2}));
  for (size_t i = 0; i < text.size(); ++i) {
    std::vector<std::string> damaged{text.substr(0, i)};
    for (const char c : {'\0', '\n', '0', '9', '@', '[', ':', '|', 'F'}) {
      damaged.push_back(text);
      damaged.back()[i] = c;
    }
    for (const std::string& candidate : damaged) try {
        EXPECT_LE(from_text(candidate).num_ranks(), 2);
      } catch (const InvalidArgument& error) {
        EXPECT_STRNE(error.what(), "");
      }
  }
}

}  // namespace
}  // namespace polyreme::pipeline
