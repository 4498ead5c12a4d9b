#pragma once

#include "pipeline/schedule/schedule.h"
#include "pipeline/schedule/timeline.h"

namespace polyreme::pipeline {

// Adds the transfers to lists without any: a tensor is sent when, by `costs`, the computation that makes it
// ends, and both of its ranks have it at that moment in their order of things. All transfers of one moment
// run at once. This order exists for all ranks together, so no rank can wait in a circle (README.md,
// "Transfers"). The costs of computations must be above 0; others are not used.
//
// Throws InvalidArgument with the first problem if the lists are not valid without transfers.
Schedule add_transfers(const Schedule& compute, const Costs& costs = {});

// The schedule without its transfers.
Schedule remove_transfers(const Schedule& schedule);

enum class Gather : uint8_t {
  kNone,
  kStep,  // from the first use in the step to the last
  kUse    // around every run of computations on one chunk: least memory, most traffic
};

struct Collectives {
  Gather gather = Gather::kNone;
  bool reduce = false;  // once per chunk, when its last weight gradient is there
  bool step = false;
};

// Adds collectives along other axes to a schedule without any. Throws InvalidArgument if it has some.
Schedule add_collectives(const Schedule& schedule, const Collectives& collectives);

}  // namespace polyreme::pipeline
