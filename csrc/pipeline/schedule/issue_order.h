#pragma once

#include <vector>

#include "pipeline/schedule/schedule.h"

namespace polyreme::pipeline {

// A rank's list in the order in which an executor issues it whose transfers run on a stream of their own:
// transfers come before the computation in front of them, unless they send what it makes, so that what they
// receive arrives while it runs. The order of the transfers, and that of all else, stays as it is; so every
// wait is one of the strict model, and what is valid stays free of deadlocks. A transfer moves over one
// computation only, which bounds what is received ahead; `peak_bytes` of the result counts it.
std::vector<Action> issue_order(const std::vector<Action>& list);

}  // namespace polyreme::pipeline
