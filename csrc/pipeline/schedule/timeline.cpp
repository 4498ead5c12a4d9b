#include "pipeline/schedule/timeline.h"

#include <algorithm>
#include <cmath>
#include <deque>

#include "base/error.h"
#include "pipeline/schedule/validate.h"

namespace polyreme::pipeline {
namespace {

double at(const std::vector<double>& costs, int chunk) {
  return costs.size() == 1 ? costs[0] : costs[static_cast<size_t>(chunk)];
}

// When each tensor of (chunk, micro-batch) is there.
class Times {
 public:
  explicit Times(const Schedule& schedule)
      : micro_batches_(schedule.micro_batches),
        values_(static_cast<size_t>(schedule.num_chunks()) * static_cast<size_t>(schedule.micro_batches), 0) {
  }
  double& operator()(const Action& a) { return (*this)(a.chunk, a.micro_batch); }
  double& operator()(int chunk, int micro_batch) {
    return values_[static_cast<size_t>(chunk) * static_cast<size_t>(micro_batches_) +
                   static_cast<size_t>(micro_batch)];
  }

 private:
  int micro_batches_;
  std::vector<double> values_;
};

// Gives times to the actions of a strict run.
class Clock : public RunListener {
 public:
  Clock(const Schedule& schedule, const Costs& costs)
      : schedule_(schedule),
        costs_(costs),
        tracks_(schedule.actions.size()),
        gathered_(static_cast<size_t>(schedule.num_chunks()), 0),
        activation_(schedule),
        gradient_(schedule),
        forward_end_(schedule),
        backward_end_(schedule) {
    for (const std::vector<Action>& list : schedule.actions) timeline_.spans.emplace_back(list.size());
    timeline_.busy.resize(schedule.actions.size(), 0);
  }

  void on_action(Place place) override {
    const Action& a = action(place);
    Tracks& own = tracks(place);
    if (is_compute(a.kind)) return compute(place, a, own);
    // A reduction needs the gradients, a release that the weights are no longer used.
    double start = a.kind == ActionKind::kGather ? own.last_compute_start : own.compute;
    start = std::max(start, own.collective);
    if (!costs_.overlap) start = std::max(start, own.previous);
    own.collective = finish(place, start, cost_of(costs_, a));
    if (a.kind == ActionKind::kGather) gathered_[static_cast<size_t>(a.chunk)] = own.collective;
  }

  void on_batch_begin(Place place, int end) override {
    const Tracks& own = tracks(place);
    for (; place.position < end; ++place.position) {
      const Action& a = action(place);
      double ready = std::max(own.transfer, own.last_compute_start);
      if (a.kind == ActionKind::kSendActivation) ready = std::max(ready, forward_end_(a));
      if (a.kind == ActionKind::kSendGradient) ready = std::max(ready, backward_end_(a));
      span(place).start = costs_.overlap ? ready : std::max(ready, own.previous);
    }
  }

  void on_transfer(Place send, Place receive) override {
    const Action& a = action(receive);
    const bool forward = a.kind == ActionKind::kReceiveActivation;
    const double start = std::max(span(send).start, span(receive).start);
    const double end = start + at(costs_.transfer, forward ? a.chunk : a.chunk + 1);
    span(send) = span(receive) = {start, end};
    (forward ? activation_ : gradient_)(a) = end;
  }

  void on_batch_end(Place place, int end) override {
    Tracks& own = tracks(place);
    for (; place.position < end; ++place.position) own.transfer = std::max(own.transfer, span(place).end);
    own.previous = std::max(own.previous, own.transfer);
    timeline_.makespan = std::max(timeline_.makespan, own.transfer);
  }

  void on_step(const std::vector<int>& positions) override {
    double start = 0;
    for (const Tracks& own : tracks_) start = std::max({start, own.compute, own.transfer, own.collective});
    for (size_t r = 0; r < positions.size(); ++r)
      finish({static_cast<int>(r), positions[r]}, start, costs_.step);
  }

  Timeline take() { return std::move(timeline_); }

 private:
  struct Tracks {  // when each of a rank's tracks is free
    double compute = 0, transfer = 0, collective = 0;
    double previous = 0;  // the end of all before
    double last_compute_start = 0;
  };

  void compute(Place place, const Action& a, Tracks& own) {
    const bool forward = a.kind == ActionKind::kForward;
    double start = std::max(own.compute, gathered_[static_cast<size_t>(a.chunk)]);
    if (forward) start = std::max(start, activation_(a));
    if (a.kind == ActionKind::kBackward || a.kind == ActionKind::kBackwardInput)
      start = std::max(start, gradient_(a));
    if (!costs_.overlap) start = std::max(start, own.previous);
    const double cost = cost_of(costs_, a);
    own.last_compute_start = start;
    own.compute = finish(place, start, cost);
    timeline_.busy[static_cast<size_t>(place.rank)] += cost;
    if (a.kind != ActionKind::kBackwardWeight) (forward ? forward_end_ : backward_end_)(a) = own.compute;
  }

  double finish(Place place, double start, double cost) {
    const double end = start + cost;
    span(place) = {start, end};
    tracks(place).previous = std::max(tracks(place).previous, end);
    timeline_.makespan = std::max(timeline_.makespan, end);
    return end;
  }

  const Action& action(Place place) const {
    return schedule_.actions[static_cast<size_t>(place.rank)][static_cast<size_t>(place.position)];
  }
  Span& span(Place place) {
    return timeline_.spans[static_cast<size_t>(place.rank)][static_cast<size_t>(place.position)];
  }
  Tracks& tracks(Place place) { return tracks_[static_cast<size_t>(place.rank)]; }

  const Schedule& schedule_;
  const Costs& costs_;
  std::vector<Tracks> tracks_;    // [rank]
  std::vector<double> gathered_;  // [chunk]: when its weights are whole
  Times activation_, gradient_;   // received: of the chunk's input, and for its output
  Times forward_end_, backward_end_;
  Timeline timeline_;
};

}  // namespace

void check_costs(const Costs& costs, int num_chunks, bool positive) {
  const auto check = [&](const char* what, const std::vector<double>& values, bool above) {
    require(values.size() == 1 || values.size() == static_cast<size_t>(num_chunks), "costs: ", what, " has ",
            values.size(), " numbers; expected 1, or one for each of ", num_chunks, " chunks");
    for (const double value : values)
      require(std::isfinite(value) && (above ? value > 0 : value >= 0), "costs: ", what, " is ", value,
              "; expected a finite number ", above ? "above 0" : "of at least 0");
  };
  check("forward", costs.forward, positive);
  check("backward_input", costs.backward_input, positive);
  check("backward_weight", costs.backward_weight, positive);
  check("transfer", costs.transfer, false);
  check("gather", {costs.gather}, false);
  check("reduce", {costs.reduce}, false);
  check("step", {costs.step}, false);
}

double cost_of(const Costs& costs, const Action& action) {
  switch (action.kind) {
    case ActionKind::kForward:
      return at(costs.forward, action.chunk);
    case ActionKind::kBackward:
      return at(costs.backward_input, action.chunk) + at(costs.backward_weight, action.chunk);
    case ActionKind::kBackwardInput:
      return at(costs.backward_input, action.chunk);
    case ActionKind::kBackwardWeight:
      return at(costs.backward_weight, action.chunk);
    case ActionKind::kGather:
      return costs.gather;
    case ActionKind::kReduce:
      return costs.reduce;
    case ActionKind::kStep:
      return costs.step;
    default:
      return 0;
  }
}

double Timeline::bubble(int rank) const {
  return makespan > 0 ? 1 - busy[static_cast<size_t>(rank)] / makespan : 0;
}

Timeline simulate(const Schedule& schedule, const Costs& costs) {
  // Lanes only relax the order of the sums, which takes no time.
  validate(schedule, {.lanes = std::max(schedule.micro_batches, 1)});
  check_costs(costs, schedule.num_chunks());
  Clock clock(schedule, costs);
  run_strictly(schedule, clock);
  return clock.take();
}

ComputeTimes time_computations(const Schedule& schedule, const Costs& costs) {
  const std::vector<int> rank_of = rank_of_chunk(schedule);
  const int num_chunks = schedule.num_chunks();
  Times forward(schedule), backward(schedule);
  for (int c = 0; c < num_chunks; ++c)
    for (int m = 0; m < schedule.micro_batches; ++m) forward(c, m) = backward(c, m) = -1;  // not yet
  // The time at which the input of `a` is there; -1 if it is not known yet.
  const auto input = [&](const Action& a) {
    const int other = neighbour(a);
    if (!is_compute(a.kind) || a.kind == ActionKind::kBackwardWeight || other < 0 || other == num_chunks)
      return 0.0;
    return (a.kind == ActionKind::kForward ? forward : backward)(other, a.micro_batch);
  };
  ComputeTimes times;
  for (const std::vector<Action>& list : schedule.actions) times.spans.emplace_back(list.size());
  std::vector<size_t> next(schedule.actions.size(), 0);
  std::vector<double> now(schedule.actions.size(), 0);
  std::deque<size_t> runnable;
  for (size_t r = 0; r < next.size(); ++r) runnable.push_back(r);
  while (!runnable.empty()) {
    const size_t r = runnable.front();
    runnable.pop_front();
    for (; next[r] < schedule.actions[r].size(); ++next[r]) {
      const Action& a = schedule.actions[r][next[r]];
      const double ready = input(a);
      if (ready < 0) break;
      const double start = std::max(now[r], ready);
      if (is_compute(a.kind)) now[r] = start + cost_of(costs, a);
      times.spans[r][next[r]] = {start, now[r]};
      if (!is_compute(a.kind) || a.kind == ActionKind::kBackwardWeight) continue;
      (a.kind == ActionKind::kForward ? forward : backward)(a) = now[r];
      const int consumer = a.kind == ActionKind::kForward ? a.chunk + 1 : a.chunk - 1;
      if (consumer >= 0 && consumer < num_chunks)
        runnable.push_back(static_cast<size_t>(rank_of[static_cast<size_t>(consumer)]));
    }
  }
  std::vector<Wait> waits;
  bool stuck = false;
  for (size_t r = 0; r < next.size(); ++r) {
    const bool waiting = next[r] < schedule.actions[r].size();
    Wait wait{{static_cast<int>(r), static_cast<int>(next[r])}, -1};
    if (waiting) wait.for_rank = rank_of[static_cast<size_t>(neighbour(schedule.actions[r][next[r]]))];
    stuck = stuck || waiting;
    waits.push_back(wait);
  }
  if (stuck) times.cycle = find_cycle(waits);
  return times;
}

}  // namespace polyreme::pipeline
