#pragma once

#include <string>
#include <vector>

#include "pipeline/schedule/schedule.h"

namespace polyreme::pipeline {

// A place in the lists.
struct Place {
  int rank = 0;
  int position = 0;
};

// Rank `place.rank` waits at the action at `place.position` for `for_rank`.
struct Wait {
  Place place;
  int for_rank = 0;
};

// "rank 0 waits at action 3 (SA1>1) for rank 1, which waits at action 2 (SG0>0) for rank 0".
std::string describe_cycle(const Schedule& schedule, const std::vector<Wait>& cycle);
// The circle that following `waits` ends in; waits[r] is what rank r waits for, for_rank -1 if it does not.
std::vector<Wait> find_cycle(const std::vector<Wait>& waits);

// For every transfer the place of the transfer that completes it: the n-th send from a to b and the n-th
// receive of b from a. {-1, -1} elsewhere and where there is no n-th.
std::vector<std::vector<Place>> match_transfers(const Schedule& schedule);

// Is told what a strict execution does. The calls come in an order in which it may happen, so everything that
// an action depends on has been told before it.
class RunListener {
 public:
  virtual ~RunListener() = default;
  // A computation or a collective along another axis.
  virtual void on_action(Place) {}
  // The transfers [place, end) start to run at once; each completes with on_transfer, all with on_batch_end.
  virtual void on_batch_begin(Place, int /*end*/) {}
  virtual void on_transfer(Place /*send*/, Place /*receive*/) {}
  virtual void on_batch_end(Place, int /*end*/) {}
  // All ranks, each at positions[rank].
  virtual void on_step(const std::vector<int>& /*positions*/) {}
};

// Executes the lists under the strict model of README.md: every rank does one thing after the other, and a
// send completes only together with its receive. Returns the ranks that wait in a circle if it gets stuck,
// else nothing. The lists have passed the other checks of the validator.
std::vector<Wait> run_strictly(const Schedule& schedule, RunListener& listener);

}  // namespace polyreme::pipeline
