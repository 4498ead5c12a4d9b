#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/schedule/schedule.h"

namespace polyreme::pipeline {

// Bytes of one micro-batch, one number for all chunks or one for each.
struct MemorySizes {
  std::vector<int64_t> activation{0};  // saved by the forward, freed by the backward of the input
  std::vector<int64_t> kept{0};      // what of it, and of gradients, stays until the backward of the weights
  std::vector<int64_t> boundary{0};  // [chunk]: the tensor between chunk - 1 and chunk, either way
};

// The most activations that a rank holds at once, in units of one chunk and micro-batch: live from the
// forward to the end of the backward of the weights. 0 for forward-only schedules, which save none.
std::vector<int> peak_activations(const Schedule& schedule);

// The most bytes that a rank holds at once. A boundary tensor counts from its receive (or computation) to its
// use (or send). Throws InvalidArgument for negative sizes and lists of another length. The schedule is
// valid.
std::vector<int64_t> peak_bytes(const Schedule& schedule, const MemorySizes& sizes);

}  // namespace polyreme::pipeline
