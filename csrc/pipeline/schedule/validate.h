#pragma once

#include <optional>
#include <string>
#include <vector>

#include "pipeline/schedule/schedule.h"
#include "pipeline/schedule/strict_run.h"

namespace polyreme::pipeline {

// Why a schedule is not valid, and where. The position counts the actions of a list from 0; it is the length
// of the list for what is missing.
struct Problem {
  Place place;
  std::string action;  // its token; "the end" for what is missing
  std::string reason;
  std::vector<Wait> cycle;  // of a deadlock: who waits for whom
};

struct ValidateOptions {
  // The micro-batches of a chunk are cut into this many equal runs (the lanes of README.md); weight gradients
  // are in ascending order within each. Must divide the number of micro-batches.
  int lanes = 1;
  // The lists hold no transfers; every tensor is at once on the rank that needs it. What passes so is valid
  // after add_transfers.
  bool implied_transfers = false;
};

// The first violation of the rules of README.md, rank by rank and from the front, a deadlock last. Throws
// InvalidArgument only for sizes that are out of bounds, chunks that are not dealt out, and bad options.
std::optional<Problem> find_problem(const Schedule& schedule, const ValidateOptions& options = {});

// "schedule: rank 2, action 7 (W3): ..."
std::string describe(const Problem& problem);

// Throws InvalidArgument with the problem, if there is one.
void validate(const Schedule& schedule, const ValidateOptions& options = {});

}  // namespace polyreme::pipeline
