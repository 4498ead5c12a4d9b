#include "pipeline/schedule/validate.h"

#include "base/error.h"
#include "pipeline/schedule/timeline.h"

namespace polyreme::pipeline {
namespace {

// What has happened to a chunk's micro-batch on its rank.
enum Done : uint8_t {
  kForwardDone = 1,
  kInputDone = 2,
  kWeightDone = 4,
  kActivationSent = 8,
  kActivationReceived = 16,
  kGradientSent = 32,
  kGradientReceived = 64
};

struct Violation {
  std::string reason;
};

template <typename... Args>
void demand(bool condition, const Args&... args) {
  if (!condition) throw Violation{concat(args...)};
}

// The rules that one rank's list can break on its own: every computation once, each after what it needs.
class ListCheck {
 public:
  ListCheck(const Schedule& schedule, const std::vector<int>& rank_of, const ValidateOptions& options,
            int rank)
      : schedule_(schedule),
        rank_of_(rank_of),
        options_(options),
        rank_(rank),
        list_(schedule.actions[static_cast<size_t>(rank)]),
        num_chunks_(schedule.num_chunks()),
        lane_size_(schedule.micro_batches / options.lanes),
        slot_(static_cast<size_t>(num_chunks_), -1) {
    for (const int chunk : schedule.chunks[static_cast<size_t>(rank)]) {
      slot_[static_cast<size_t>(chunk)] = static_cast<int>(chunks_.size());
      chunks_.push_back({chunk, std::vector<int>(static_cast<size_t>(options.lanes), -1)});
    }
    done_.resize(chunks_.size() * static_cast<size_t>(schedule.micro_batches), 0);
    for (const Action& a : list_)
      if (is_collective(a.kind) && a.chunk >= 0 && a.chunk < num_chunks_ && holds(a.chunk)) {
        chunk_state(a).gathers |= a.kind == ActionKind::kGather;
        chunk_state(a).reduces |= a.kind == ActionKind::kReduce;
      }
  }

  std::optional<Problem> run() {
    size_t i = 0;
    try {
      for (; i < list_.size(); ++i) check(i);
      check_end();
    } catch (const Violation& violation) {
      const Place place{rank_, static_cast<int>(i)};
      return Problem{place,
                     i < list_.size() ? token(schedule_, rank_, place.position) : "the end",
                     violation.reason,
                     {}};
    }
    return std::nullopt;
  }

 private:
  struct ChunkState {
    int chunk = 0;
    std::vector<int> last_weight;  // [lane]: the micro-batch of the last backward-weight
    bool gathers = false, reduces = false;
    bool gathered = false;  // the weights are whole now
    bool dirty = false;     // gradients that no kReduce has seen
  };

  bool holds(int chunk) const { return rank_of_[static_cast<size_t>(chunk)] == rank_; }
  ChunkState& chunk_state(const Action& a) {
    return chunks_[static_cast<size_t>(slot_[static_cast<size_t>(a.chunk)])];
  }
  uint8_t& done(int chunk, int micro_batch) {
    return done_[static_cast<size_t>(slot_[static_cast<size_t>(chunk)]) *
                     static_cast<size_t>(schedule_.micro_batches) +
                 static_cast<size_t>(micro_batch)];
  }
  std::string text(const char* letter, int chunk, int micro_batch) const {
    return concat(letter, micro_batch, "@", chunk);
  }

  void check(size_t i) {
    const Action& a = list_[i];
    check_form(a, i);
    if (is_compute(a.kind)) return check_compute(a);
    if (is_transfer(a.kind)) return check_transfer(a);
    if (a.kind == ActionKind::kStep) return;
    ChunkState& state = chunk_state(a);
    if (a.kind == ActionKind::kGather) {
      demand(!state.gathered, "the weights of chunk ", a.chunk, " are gathered already; release them first");
      state.gathered = true;
    } else if (a.kind == ActionKind::kRelease) {
      demand(state.gathered, "the weights of chunk ", a.chunk, " are not gathered");
      state.gathered = false;
    } else {
      demand(state.dirty, "chunk ", a.chunk, " has no gradients that were not reduced yet");
      state.dirty = false;
    }
  }

  void check_form(const Action& a, size_t i) {
    const bool step = a.kind == ActionKind::kStep;
    const bool needs_micro_batch = is_compute(a.kind) || is_transfer(a.kind);
    demand(!stepped_, "comes after the step, which ends a list");
    stepped_ = step;
    demand(step ? a.chunk == -1 : a.chunk >= 0 && a.chunk < num_chunks_, "chunk ", a.chunk, "; expected ",
           step ? std::string("none") : concat("0 to ", num_chunks_ - 1));
    demand(step || holds(a.chunk), "chunk ", a.chunk, " is on rank ",
           step ? -1 : rank_of_[static_cast<size_t>(a.chunk)], ", not on rank ", rank_);
    demand(needs_micro_batch ? a.micro_batch >= 0 && a.micro_batch < schedule_.micro_batches
                             : a.micro_batch == -1,
           "micro-batch ", a.micro_batch, "; expected ",
           needs_micro_batch ? concat("0 to ", schedule_.micro_batches - 1) : std::string("none"));
    demand(is_transfer(a.kind) || a.peer == -1, "has a peer, rank ", a.peer, ", but transfers nothing");
    demand(!a.with_previous || (is_transfer(a.kind) && i > 0 && is_transfer(list_[i - 1].kind)),
           "runs with the action before it, but only transfers run at once");
    demand(!schedule_.forward_only || a.kind == ActionKind::kForward ||
               a.kind == ActionKind::kSendActivation || a.kind == ActionKind::kReceiveActivation ||
               a.kind == ActionKind::kGather || a.kind == ActionKind::kRelease,
           "has no place in a forward-only schedule");
  }

  void check_compute(const Action& a) {
    uint8_t& own = done(a.chunk, a.micro_batch);
    ChunkState& state = chunk_state(a);
    demand(a.kind == ActionKind::kBackwardWeight || !state.gathers || state.gathered, "the weights of chunk ",
           a.chunk, " are not gathered here");
    if (a.kind == ActionKind::kForward) {
      demand(!(own & kForwardDone), "runs a second time");
      check_input(a, kActivationReceived, kForwardDone, "F");
      own |= kForwardDone;
      return;
    }
    if (a.kind != ActionKind::kBackwardWeight) {
      demand(!(own & kInputDone), "the backward of its input runs a second time");
      demand(own & kForwardDone, "comes before ", text("F", a.chunk, a.micro_batch));
      check_input(a, kGradientReceived, kInputDone, "the backward ");
      own |= kInputDone;
    }
    if (a.kind == ActionKind::kBackwardInput) return;
    demand(!(own & kWeightDone), "the backward of its weights runs a second time");
    demand(own & kInputDone, "comes before ", text("I", a.chunk, a.micro_batch));
    int& last = state.last_weight[static_cast<size_t>(a.micro_batch / lane_size_)];
    demand(last<a.micro_batch, "comes after the weight gradients of micro-batch ", last,
                "; they must be in ascending order within a chunk", options_.lanes> 1
               ? " and lane"
               : "",
           ", for the order of the sum fixes its bits");
    last = a.micro_batch;
    own |= kWeightDone;
    state.dirty = true;
  }

  // The tensor that `a` takes from the neighbouring chunk has been computed here or received.
  void check_input(const Action& a, uint8_t received, uint8_t computed, const char* what) {
    const int other = neighbour(a);
    if (other < 0 || other == num_chunks_) return;
    if (holds(other))
      demand(done(other, a.micro_batch) & computed, "comes before ", text(what, other, a.micro_batch));
    else if (!options_.implied_transfers)
      demand(done(a.chunk, a.micro_batch) & received, "comes before ",
             text(a.kind == ActionKind::kForward ? "RA" : "RG", a.chunk, a.micro_batch));
  }

  void check_transfer(const Action& a) {
    demand(!options_.implied_transfers, "is a transfer; expected computations alone");
    const int other = neighbour(a);
    demand(other >= 0 && other < num_chunks_, "chunk ", a.chunk, " is the ", other < 0 ? "first" : "last",
           "; there is no chunk to exchange this with");
    demand(!holds(other), "chunk ", other, " is on this rank too; nothing is to be sent");
    const int peer = rank_of_[static_cast<size_t>(other)];
    demand(a.peer == peer, "has the peer ", a.peer, "; chunk ", other, " is on rank ", peer);
    uint8_t& own = done(a.chunk, a.micro_batch);
    const auto [flag, needed, before] = transfer_rule(a.kind);
    demand(!(own & flag), is_send(a.kind) ? "is sent" : "is received", " a second time");
    demand(!needed || own & needed, "comes before ", text(before, a.chunk, a.micro_batch));
    own |= flag;
  }

  struct TransferRule {
    uint8_t flag, needed;
    const char* before;
  };
  static TransferRule transfer_rule(ActionKind kind) {
    switch (kind) {
      case ActionKind::kSendActivation:
        return {kActivationSent, kForwardDone, "F"};
      case ActionKind::kReceiveActivation:
        return {kActivationReceived, 0, ""};
      case ActionKind::kSendGradient:
        return {kGradientSent, kInputDone, "the backward "};
      default:
        return {kGradientReceived, 0, ""};
    }
  }

  void check_end() {
    for (const ChunkState& state : chunks_) {
      const int c = state.chunk;
      const bool sends_on = c + 1 < num_chunks_ && !holds(c + 1) && !options_.implied_transfers;
      const bool sends_back = c > 0 && !holds(c - 1) && !options_.implied_transfers;
      for (int m = 0; m < schedule_.micro_batches; ++m) {
        const uint8_t own = done(c, m);
        demand(own & kForwardDone, text("F", c, m), " is missing");
        demand(!sends_on || own & kActivationSent, text("SA", c, m), " is missing");
        if (schedule_.forward_only) continue;
        demand(own & kInputDone, text("B", c, m), " (or I and W) is missing");
        demand(own & kWeightDone, text("W", c, m), " is missing");
        demand(!sends_back || own & kGradientSent, text("SG", c, m), " is missing");
      }
      demand(!state.gathered, "the weights of chunk ", c, " are still gathered; release them");
      demand(!state.reduces || !state.dirty, "chunk ", c, " has gradients after its last reduce");
    }
  }

  const Schedule& schedule_;
  const std::vector<int>& rank_of_;
  const ValidateOptions& options_;
  const int rank_;
  const std::vector<Action>& list_;
  const int num_chunks_;
  const int lane_size_;
  bool stepped_ = false;
  std::vector<int> slot_;  // [chunk]: its index in chunks_, or -1
  std::vector<ChunkState> chunks_;
  std::vector<uint8_t> done_;  // [slot][micro-batch]: Done
};

// Tensors from one rank to another arrive in the order in which they were sent.
std::optional<Problem> check_channels(const Schedule& schedule) {
  const std::vector<std::vector<Place>> partners = match_transfers(schedule);
  for (int r = 0; r < schedule.num_ranks(); ++r) {
    const std::vector<Action>& list = schedule.actions[static_cast<size_t>(r)];
    for (int i = 0; i < static_cast<int>(list.size()); ++i) {
      const Action& a = list[static_cast<size_t>(i)];
      if (!is_transfer(a.kind) || is_send(a.kind)) continue;
      const Place from = partners[static_cast<size_t>(r)][static_cast<size_t>(i)];
      const Action& sent =
          schedule.actions[static_cast<size_t>(from.rank)][static_cast<size_t>(from.position)];
      if (sent.kind == counterpart(a.kind) && sent.micro_batch == a.micro_batch && sent.chunk == neighbour(a))
        continue;
      return Problem{
          {r, i},
          token(schedule, r, i),
          concat("what rank ", from.rank, " sends to it here is ", token(schedule, from.rank, from.position),
                 " (its action ", from.position,
                 "); tensors from one rank to another arrive in the order in which they were sent"),
          {}};
    }
  }
  return std::nullopt;
}

std::optional<Problem> check_steps(const Schedule& schedule) {
  std::vector<int> with, without;
  for (int r = 0; r < schedule.num_ranks(); ++r) {
    const std::vector<Action>& list = schedule.actions[static_cast<size_t>(r)];
    const bool steps = !list.empty() && list.back().kind == ActionKind::kStep;
    (steps ? with : without).push_back(r);
  }
  if (with.empty() || without.empty()) return std::nullopt;
  const auto end = static_cast<int>(schedule.actions[static_cast<size_t>(without[0])].size());
  return Problem{
      {without[0], end},
      "the end",
      concat("the step is missing; it is a collective of all ranks, and rank ", with[0], " has it"),
      {}};
}

}  // namespace

std::optional<Problem> find_problem(const Schedule& schedule, const ValidateOptions& options) {
  const std::vector<int> rank_of = rank_of_chunk(schedule);
  require(options.lanes >= 1 && schedule.micro_batches % options.lanes == 0, "schedule: ", options.lanes,
          " lanes; expected a divisor of the ", schedule.micro_batches, " micro-batches");
  for (int r = 0; r < schedule.num_ranks(); ++r)
    if (auto problem = ListCheck(schedule, rank_of, options, r).run()) return problem;
  if (auto problem = check_steps(schedule)) return problem;
  std::vector<Wait> cycle;
  if (options.implied_transfers) {
    cycle = time_computations(schedule, {}).cycle;
  } else {
    if (auto problem = check_channels(schedule)) return problem;
    RunListener listener;
    cycle = run_strictly(schedule, listener);
  }
  if (cycle.empty()) return std::nullopt;
  const Place place = cycle[0].place;
  return Problem{place, token(schedule, place.rank, place.position),
                 concat("deadlock: ", describe_cycle(schedule, cycle)), cycle};
}

std::string describe(const Problem& problem) {
  return concat("schedule: rank ", problem.place.rank, ", action ", problem.place.position, " (",
                problem.action, "): ", problem.reason);
}

void validate(const Schedule& schedule, const ValidateOptions& options) {
  if (const auto problem = find_problem(schedule, options)) throw InvalidArgument(describe(*problem));
}

}  // namespace polyreme::pipeline
