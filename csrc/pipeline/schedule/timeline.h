#pragma once

#include <vector>

#include "pipeline/schedule/schedule.h"
#include "pipeline/schedule/strict_run.h"

namespace polyreme::pipeline {

// How long things take, in any one unit of time. A list has one number for all chunks, or one for each.
struct Costs {
  std::vector<double> forward{1};
  std::vector<double> backward_input{1};
  std::vector<double> backward_weight{1};  // the whole backward takes the sum of the two
  std::vector<double> transfer{0};         // [chunk]: of the tensors between chunk - 1 and chunk, either way
  double gather = 0, reduce = 0, step = 0;
  // Transfers and collectives run beside computations, each kind on a track of its own per rank, in the order
  // of the list, and no earlier than the computation before them in the list begins (which bounds the buffers
  // of what is received ahead). False: one thing after the other, the strict model itself.
  bool overlap = true;
};

// Throws InvalidArgument unless all costs are finite and >= 0 and the lists have 1 or num_chunks numbers;
// `positive` asks for computations > 0.
void check_costs(const Costs& costs, int num_chunks, bool positive = false);
// The duration of a computation or a collective.
double cost_of(const Costs& costs, const Action& action);

struct Span {
  double start = 0;
  double end = 0;
};

struct Timeline {
  std::vector<std::vector<Span>> spans;  // [rank][position]
  double makespan = 0;
  std::vector<double> busy;  // [rank]: time in computations
  // The share of the makespan in which the rank computes nothing; 0 if everything took no time.
  double bubble(int rank) const;
};

// Runs the lists in the order of the strict model and gives each action its times. Throws InvalidArgument if
// the schedule is not valid (validate.h) or the costs are not.
Timeline simulate(const Schedule& schedule, const Costs& costs = {});

// The times of the computations of lists without transfers, as if what one rank computes were at once on all.
// If the lists wait for each other in a circle, `cycle` says how and the times are of no use.
struct ComputeTimes {
  std::vector<std::vector<Span>> spans;  // [rank][position]; collectives take no time
  std::vector<Wait> cycle;
};
ComputeTimes time_computations(const Schedule& schedule, const Costs& costs);

}  // namespace polyreme::pipeline
