#include "pipeline/schedule/schedule.h"

#include <array>
#include <sstream>

#include "base/error.h"

namespace polyreme::pipeline {
namespace {

struct KindText {
  const char* name;
  const char* letters;
};

constexpr std::array<KindText, kNumActionKinds> kTexts{{{"forward", "F"},
                                                        {"backward", "B"},
                                                        {"backward_input", "I"},
                                                        {"backward_weight", "W"},
                                                        {"send_activation", "SA"},
                                                        {"recv_activation", "RA"},
                                                        {"send_gradient", "SG"},
                                                        {"recv_gradient", "RG"},
                                                        {"gather", "gather"},
                                                        {"release", "release"},
                                                        {"reduce", "reduce"},
                                                        {"step", "step"}}};

}  // namespace

int Schedule::num_chunks() const {
  size_t count = 0;
  for (const std::vector<int>& held : chunks) count += held.size();
  return static_cast<int>(count);
}

bool Schedule::has_transfers() const {
  for (const std::vector<Action>& list : actions)
    for (const Action& action : list)
      if (is_transfer(action.kind)) return true;
  return false;
}

bool is_compute(ActionKind kind) { return kind <= ActionKind::kBackwardWeight; }

bool is_transfer(ActionKind kind) {
  return kind >= ActionKind::kSendActivation && kind <= ActionKind::kReceiveGradient;
}

bool is_send(ActionKind kind) {
  return kind == ActionKind::kSendActivation || kind == ActionKind::kSendGradient;
}

bool is_collective(ActionKind kind) { return kind >= ActionKind::kGather && kind <= ActionKind::kReduce; }

const char* name(ActionKind kind) { return kTexts[static_cast<size_t>(kind)].name; }

ActionKind kind_of_name(std::string_view name) {
  std::string known;
  for (size_t i = 0; i < kTexts.size(); ++i) {
    if (name == kTexts[i].name) return static_cast<ActionKind>(i);
    known += concat(i == 0 ? "" : ", ", kTexts[i].name);
  }
  throw InvalidArgument(concat("unknown kind of action '", name.substr(0, 40), "'; expected ", known));
}

int neighbour(const Action& action) {
  switch (action.kind) {
    case ActionKind::kForward:
    case ActionKind::kReceiveActivation:
    case ActionKind::kSendGradient:
      return action.chunk - 1;
    default:
      return action.chunk + 1;
  }
}

ActionKind counterpart(ActionKind transfer) {
  switch (transfer) {
    case ActionKind::kSendActivation:
      return ActionKind::kReceiveActivation;
    case ActionKind::kReceiveActivation:
      return ActionKind::kSendActivation;
    case ActionKind::kSendGradient:
      return ActionKind::kReceiveGradient;
    default:
      return ActionKind::kSendGradient;
  }
}

std::vector<int> rank_of_chunk(const Schedule& schedule) {
  const auto& held = schedule.chunks;
  require(!held.empty() && held.size() <= kMaxRanks, "schedule: ", held.size(), " stages; expected 1 to ",
          kMaxRanks);
  require(schedule.micro_batches >= 1 && schedule.micro_batches <= kMaxMicroBatches,
          "schedule: ", schedule.micro_batches, " micro-batches; expected 1 to ", kMaxMicroBatches);
  require(schedule.actions.size() == held.size(), "schedule: ", schedule.actions.size(), " lists for ",
          held.size(), " ranks; expected one list for each");
  size_t num_chunks = 0;
  for (size_t r = 0; r < held.size(); ++r) {
    require(!held[r].empty(), "schedule: rank ", r, " holds no chunk; give it one, or use fewer stages");
    num_chunks += held[r].size();
  }
  require(num_chunks <= kMaxChunks, "schedule: ", num_chunks, " chunks; expected at most ", kMaxChunks);
  std::vector<int> rank_of(num_chunks, -1);
  for (size_t r = 0; r < held.size(); ++r)
    for (const int chunk : held[r]) {
      require(chunk >= 0 && chunk < static_cast<int>(num_chunks), "schedule: rank ", r, " holds chunk ",
              chunk, "; expected the chunks 0 to ", num_chunks - 1, ", each on one rank");
      int& owner = rank_of[static_cast<size_t>(chunk)];
      require(owner < 0, "schedule: chunk ", chunk, " is held by rank ", owner, " and by rank ", r,
              "; expected the chunks 0 to ", num_chunks - 1, ", each on one rank");
      owner = static_cast<int>(r);
    }
  int64_t num_actions = 0;
  for (const std::vector<Action>& list : schedule.actions) num_actions += static_cast<int64_t>(list.size());
  require(static_cast<int64_t>(num_chunks) * schedule.micro_batches <= kMaxPairs, "schedule: ", num_chunks,
          " chunks x ", schedule.micro_batches, " micro-batches; expected at most ", kMaxPairs, " of both");
  require(num_actions <= kMaxActions, "schedule: ", num_actions, " actions; expected at most ", kMaxActions);
  return rank_of;
}

const char* letters(ActionKind kind) { return kTexts[static_cast<size_t>(kind)].letters; }

std::string token(const Action& action, bool with_chunk) {
  std::ostringstream text;
  text << letters(action.kind);
  if (action.micro_batch >= 0) text << action.micro_batch;
  if (with_chunk && action.chunk >= 0) text << '@' << action.chunk;
  if (action.peer >= 0) text << (is_send(action.kind) ? '>' : '<') << action.peer;
  return std::move(text).str();
}

std::string token(const Schedule& schedule, int rank, int position) {
  const auto r = static_cast<size_t>(rank);
  return token(schedule.actions[r][static_cast<size_t>(position)], schedule.chunks[r].size() > 1);
}

size_t batch_end(const std::vector<Action>& list, size_t begin) {
  size_t end = begin + 1;
  while (end < list.size() && list[end].with_previous) ++end;
  return end;
}

}  // namespace polyreme::pipeline
