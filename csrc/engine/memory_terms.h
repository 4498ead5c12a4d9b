#pragma once

#include <span>
#include <vector>

#include "engine/unit_plan.h"
#include "optim/optimizer.h"

namespace polyreme {

// One part of the memory of a rank, from the shard map alone.
struct MemoryTerm {
  const char* name;
  int64_t bytes;
  bool stays;  // between steps; otherwise the most that a step has at once
  bool on_host = false;
};

struct MemoryQuestion {
  ZeroOptions zero;
  int64_t local_lanes = 1;
  int64_t tp_lanes = 1;       // of the rank
  int64_t micro_batches = 1;  // of a lane between two reductions
  int64_t ranks = 1;          // of dp
};

// weights, masters (fp32, of 16-bit weights), gradients, tied gradients (their further uses), lane buffers
// (partial sums of a rank's lanes of dp, and of tp where a parameter is not cut), moments; for a step: gather
// window (weights of stage 3), buckets (gradients of stage 2 until they are reduced), rounded gradients (what
// is communicated in 16 bits, if all buckets are on their way at once), visiting moments (of a unit, while
// offloaded ones are on the host). Without activations, and without the staging of the communicators, which
// is not device memory.
std::vector<MemoryTerm> memory_terms(const UnitPlan& plan, const ParamRegistry& registry,
                                     std::span<const OptimizerState> state, const MemoryQuestion& question);

}  // namespace polyreme
