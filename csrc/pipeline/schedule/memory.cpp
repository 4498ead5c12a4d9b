#include "pipeline/schedule/memory.h"

#include <algorithm>

#include "base/error.h"

namespace polyreme::pipeline {
namespace {

void check(const char* what, const std::vector<int64_t>& values, int num_chunks) {
  require(values.size() == 1 || values.size() == static_cast<size_t>(num_chunks), "memory sizes: ", what,
          " has ", values.size(), " numbers; expected 1, or one for each of ", num_chunks, " chunks");
  for (const int64_t value : values)
    require(value >= 0 && value <= int64_t{1} << 50, "memory sizes: ", what, " is ", value,
            "; expected 0 to 2^50 bytes");
}

int64_t at(const std::vector<int64_t>& values, int chunk) {
  return values.size() == 1 ? values[0] : values[static_cast<size_t>(chunk)];
}

// What running an action takes before anything of it is freed, and what it frees then.
struct Change {
  int64_t takes = 0;
  int64_t frees = 0;
};

Change change_of(const Schedule& schedule, const Action& a, const MemorySizes& sizes) {
  const int last = schedule.num_chunks() - 1;
  // The tensors at the two ends of the chunk; nothing comes in at the first, nothing goes out at the last.
  const int64_t below = a.chunk > 0 ? at(sizes.boundary, a.chunk) : 0;
  const int64_t above = a.chunk >= 0 && a.chunk < last ? at(sizes.boundary, a.chunk + 1) : 0;
  const int64_t saved = schedule.forward_only || a.chunk < 0 ? 0 : at(sizes.activation, a.chunk);
  const int64_t kept = schedule.forward_only || a.chunk < 0 ? 0 : at(sizes.kept, a.chunk);
  switch (a.kind) {
    case ActionKind::kForward:
      return {saved + above, below};
    case ActionKind::kBackward:
      return {below, saved + above};
    case ActionKind::kBackwardInput:
      return {below + kept, saved + above};
    case ActionKind::kBackwardWeight:
      return {0, kept};
    case ActionKind::kReceiveActivation:
      return {below, 0};
    case ActionKind::kReceiveGradient:
      return {above, 0};
    case ActionKind::kSendActivation:
      return {0, above};
    case ActionKind::kSendGradient:
      return {0, below};
    default:
      return {};
  }
}

}  // namespace

std::vector<int> peak_activations(const Schedule& schedule) {
  std::vector<int> peaks;
  for (const std::vector<Action>& list : schedule.actions) {
    int live = 0, peak = 0;
    for (const Action& a : list) {
      live += a.kind == ActionKind::kForward;
      live -= a.kind == ActionKind::kBackward || a.kind == ActionKind::kBackwardWeight;
      peak = std::max(peak, live);
    }
    peaks.push_back(schedule.forward_only ? 0 : peak);
  }
  return peaks;
}

std::vector<int64_t> peak_bytes(const Schedule& schedule, const MemorySizes& sizes) {
  const int num_chunks = schedule.num_chunks();
  check("activation", sizes.activation, num_chunks);
  check("kept", sizes.kept, num_chunks);
  check("boundary", sizes.boundary, num_chunks);
  std::vector<int64_t> peaks;
  for (const std::vector<Action>& list : schedule.actions) {
    int64_t held = 0, peak = 0;
    for (size_t i = 0; i < list.size();) {
      // Transfers that run at once hold all their buffers together.
      const size_t end = is_transfer(list[i].kind) ? batch_end(list, i) : i + 1;
      int64_t frees = 0;
      for (; i < end; ++i) {
        const Change change = change_of(schedule, list[i], sizes);
        held += change.takes;
        frees += change.frees;
      }
      peak = std::max(peak, held);
      held -= frees;
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace polyreme::pipeline
