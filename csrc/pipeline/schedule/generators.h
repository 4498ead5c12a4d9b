#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "pipeline/schedule/schedule.h"

namespace polyreme::pipeline {

// Which published schedule. All generators number micro-batches upwards, and run the backward of the weights
// of every chunk in that order (README.md says where this departs from the source).
enum class ScheduleKind : uint8_t {
  // All forwards, then all backwards. Huang et al. 2019, "GPipe", sections 2.2 and 2.3.
  kGPipe,
  // One forward, one backward. Narayanan et al. 2021 (SC), "Efficient Large-Scale Language Model Training on
  // GPU
  // Clusters Using Megatron-LM", section 2.2.1 (PipeDream-Flush).
  kOneForwardOneBackward,
  // The same over several chunks per rank, chunk c on rank c mod stages. The same paper, section 2.2.2.
  kInterleaved,
  // Backward split in two; the weights' half fills bubbles. Qi et al. 2024 (ICLR), "Zero Bubble Pipeline
  // Parallelism", section 2.1.
  kZbH1,
  // The same with two chunks per rank, placed in a V, so that the first and the last chunk are on rank 0. The
  // same paper, section 6.
  kZbV,
  // DualPipe (DeepSeek-V3 technical report 2024, section 3.2.1) without its second copy of the weights, by
  // the
  // "cut-in-half" of Qi et al. 2025 ("DualPipe could be better without the Dual"); the steps are those of
  // DeepSeek's dualpipev.py. Two chunks in a V.
  kDualPipeV
};

struct ScheduleRequest {
  ScheduleKind kind = ScheduleKind::kOneForwardOneBackward;
  int stages = 1;  // ranks
  int micro_batches = 1;
  int chunks = 1;  // per rank; the kinds in a V have 2, and those that are not interleaved 1
};

// "gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v", "dual_pipe_v".
const char* name(ScheduleKind kind);
// Throws InvalidArgument for an unknown name, listing the known ones.
ScheduleKind schedule_kind_of_name(std::string_view name);

// The computations alone. Throws InvalidArgument with the rule and the nearest sizes that work if the kind
// does not allow these, or they are out of bounds.
Schedule generate_compute(const ScheduleRequest& request);

// With its transfers, for the default costs (all three computations take as long). Always valid.
Schedule generate(const ScheduleRequest& request);

// Forwards alone, for chunks that are dealt out in any way: every rank runs what can run, the latest chunk
// first. With its transfers.
Schedule generate_forward_only(const std::vector<std::vector<int>>& chunks, int micro_batches);

// [rank]: the chunks of `kind` on it.
std::vector<std::vector<int>> place_chunks(ScheduleKind kind, int stages, int chunks);

}  // namespace polyreme::pipeline
