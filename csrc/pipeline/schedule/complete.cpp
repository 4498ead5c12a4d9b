#include "pipeline/schedule/complete.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "pipeline/schedule/validate.h"

namespace polyreme::pipeline {
namespace {

// The transfers of one rank by the moment at which they happen.
using Moments = std::map<double, std::vector<Action>>;

void add_transfer(std::vector<Moments>& moments, const std::vector<int>& rank_of, const Action& producer,
                  double time) {
  const bool forward = producer.kind == ActionKind::kForward;
  const int other = forward ? producer.chunk + 1 : producer.chunk - 1;
  if (other < 0 || other >= static_cast<int>(rank_of.size())) return;
  const int from = rank_of[static_cast<size_t>(producer.chunk)];
  const int to = rank_of[static_cast<size_t>(other)];
  if (from == to) return;
  const ActionKind send = forward ? ActionKind::kSendActivation : ActionKind::kSendGradient;
  moments[static_cast<size_t>(from)][time].push_back({send, producer.chunk, producer.micro_batch, to});
  moments[static_cast<size_t>(to)][time].push_back({counterpart(send), other, producer.micro_batch, from});
}

std::vector<Action> merge(const std::vector<Action>& list, const std::vector<Span>& spans,
                          const Moments& moments) {
  std::vector<Action> merged;
  auto moment = moments.begin();
  for (size_t i = 0; i <= list.size(); ++i) {
    // A computation that starts at the moment or later comes after the transfers. What takes no time goes
    // with the computation before it.
    const bool timed = i < list.size() && is_compute(list[i].kind);
    const bool last = i == list.size() || list[i].kind == ActionKind::kStep;
    for (; (timed || last) && moment != moments.end() && (last || moment->first <= spans[i].start); ++moment)
      for (const Action& transfer : moment->second) {
        merged.push_back(transfer);
        merged.back().with_previous = &transfer != &moment->second.front();
      }
    if (i < list.size()) merged.push_back(list[i]);
  }
  return merged;
}

bool uses_weights(ActionKind kind) { return is_compute(kind) && kind != ActionKind::kBackwardWeight; }

// Adds to the list of one rank.
class CollectiveAdder {
 public:
  CollectiveAdder(const std::vector<Action>& list, const Collectives& collectives)
      : list_(list), collectives_(collectives) {
    for (size_t i = 0; i < list.size(); ++i) {
      const Action& a = list[i];
      if (uses_weights(a.kind)) last_use_[a.chunk] = i;
      if (a.kind == ActionKind::kBackward || a.kind == ActionKind::kBackwardWeight)
        last_gradient_[a.chunk] = i;
    }
  }

  std::vector<Action> run() {
    for (size_t i = 0; i < list_.size(); ++i) {
      const Action& a = list_[i];
      if (!is_transfer(a.kind)) reduce_pending();
      if (uses_weights(a.kind)) gather(a.chunk);
      result_.push_back(a);
      if (uses_weights(a.kind) && (i == last_use_[a.chunk] || leaves(i))) release(a.chunk);
      if (collectives_.reduce && is_compute(a.kind) && last_gradient_.count(a.chunk) &&
          last_gradient_[a.chunk] == i)
        pending_.push_back(a.chunk);
    }
    reduce_pending();
    if (collectives_.step) result_.push_back({.kind = ActionKind::kStep});
    return std::move(result_);
  }

 private:
  // With Gather::kUse: the next use on this rank is of another chunk.
  bool leaves(size_t i) const {
    if (collectives_.gather != Gather::kUse) return false;
    size_t next = i + 1;
    while (next < list_.size() && !uses_weights(list_[next].kind)) ++next;
    return next == list_.size() || list_[next].chunk != list_[i].chunk;
  }

  void gather(int chunk) {
    if (collectives_.gather == Gather::kNone || gathered_[chunk]) return;
    gathered_[chunk] = true;
    result_.push_back({ActionKind::kGather, chunk});
  }

  void release(int chunk) {
    if (!gathered_[chunk]) return;
    gathered_[chunk] = false;
    result_.push_back({ActionKind::kRelease, chunk});
  }

  // After the transfers that follow the last gradient, so that no other rank waits for the reduction.
  void reduce_pending() {
    for (const int chunk : pending_) result_.push_back({ActionKind::kReduce, chunk});
    pending_.clear();
  }

  const std::vector<Action>& list_;
  const Collectives& collectives_;
  std::map<int, size_t> last_use_, last_gradient_;  // by chunk
  std::map<int, bool> gathered_;
  std::vector<int> pending_;  // chunks
  std::vector<Action> result_;
};

}  // namespace

Schedule add_transfers(const Schedule& compute, const Costs& costs) {
  // Lanes are the caller's to check.
  validate(compute, {.lanes = std::max(compute.micro_batches, 1), .implied_transfers = true});
  check_costs(costs, compute.num_chunks(), true);
  const std::vector<int> rank_of = rank_of_chunk(compute);
  const ComputeTimes times = time_computations(compute, costs);
  std::vector<Moments> moments(compute.actions.size());
  for (size_t r = 0; r < compute.actions.size(); ++r)
    for (size_t i = 0; i < compute.actions[r].size(); ++i) {
      const Action& a = compute.actions[r][i];
      if (uses_weights(a.kind)) add_transfer(moments, rank_of, a, times.spans[r][i].end);
    }
  Schedule complete = compute;
  for (size_t r = 0; r < compute.actions.size(); ++r)
    complete.actions[r] = merge(compute.actions[r], times.spans[r], moments[r]);
  return complete;
}

Schedule remove_transfers(const Schedule& schedule) {
  Schedule compute = schedule;
  for (std::vector<Action>& list : compute.actions)
    std::erase_if(list, [](const Action& a) { return is_transfer(a.kind); });
  return compute;
}

Schedule add_collectives(const Schedule& schedule, const Collectives& collectives) {
  rank_of_chunk(schedule);  // throws for sizes that are not right
  require(!schedule.forward_only || (!collectives.reduce && !collectives.step),
          "schedule: a forward-only schedule has no gradients to reduce and no step; ask for gather alone");
  Schedule complete = schedule;
  for (std::vector<Action>& list : complete.actions) {
    for (const Action& a : list)
      require(!is_collective(a.kind) && a.kind != ActionKind::kStep, "schedule: has collectives already (",
              token(a, true), "); expected computations and transfers alone");
    list = CollectiveAdder(std::vector<Action>(list), collectives).run();
  }
  return complete;
}

}  // namespace polyreme::pipeline
