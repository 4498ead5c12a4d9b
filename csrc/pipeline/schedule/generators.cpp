#include "pipeline/schedule/generators.h"

#include <algorithm>
#include <array>
#include <deque>

#include "base/error.h"
#include "pipeline/schedule/complete.h"

namespace polyreme::pipeline {
namespace {

constexpr std::array<const char*, 6> kNames{"gpipe", "one_f_one_b", "interleaved",
                                            "zb_h1", "zb_v",        "dual_pipe_v"};

bool in_a_v(ScheduleKind kind) { return kind == ScheduleKind::kZbV || kind == ScheduleKind::kDualPipeV; }

// The list of one rank in the making: each kind of computation of each chunk counts its micro-batches up.
class ListBuilder {
 public:
  // Micro-batches from `micro_batches` on are left out.
  ListBuilder(std::vector<int> chunks, int micro_batches)
      : chunks_(std::move(chunks)), micro_batches_(micro_batches), counts_(chunks_.size()) {}

  // `slot` is the index of the chunk on this rank.
  void forward(int slot = 0) { put(ActionKind::kForward, slot, counts(slot).forward++); }
  void backward(int slot = 0) {
    put(ActionKind::kBackward, slot, counts(slot).input++);
    ++counts(slot).weight;
  }
  void backward_input(int slot = 0) { put(ActionKind::kBackwardInput, slot, counts(slot).input++); }
  void backward_weight(int slot = 0) { put(ActionKind::kBackwardWeight, slot, counts(slot).weight++); }
  int num_forward(int slot = 0) { return counts(slot).forward; }
  int num_weight_pending(int slot = 0) { return counts(slot).input - counts(slot).weight; }
  std::vector<Action> take() { return std::move(list_); }

 private:
  struct Counts {
    int forward = 0, input = 0, weight = 0;
  };
  Counts& counts(int slot) { return counts_[static_cast<size_t>(slot)]; }
  void put(ActionKind kind, int slot, int micro_batch) {
    if (micro_batch < micro_batches_)
      list_.push_back({kind, chunks_[static_cast<size_t>(slot)], micro_batch});
  }

  std::vector<int> chunks_;
  int micro_batches_;
  std::vector<Counts> counts_;
  std::vector<Action> list_;
};

template <typename Body>
void repeat(int count, Body&& body) {
  for (int i = 0; i < count; ++i) body();
}

void gpipe(ListBuilder& list, int /*rank*/, int /*stages*/, int micro_batches) {
  repeat(micro_batches, [&] { list.forward(); });
  repeat(micro_batches, [&] { list.backward(); });
}

void one_forward_one_backward(ListBuilder& list, int rank, int stages, int micro_batches) {
  const int warm_up = std::min(stages - 1 - rank, micro_batches);
  repeat(warm_up, [&] { list.forward(); });
  repeat(micro_batches - warm_up, [&] {
    list.forward();
    list.backward();
  });
  repeat(warm_up, [&] { list.backward(); });
}

// Virtual micro-batch k of a rank: `stages` micro-batches go through its first chunk, then its second, ...;
// then the next ones.
void interleaved(ListBuilder& list, int rank, int stages, int micro_batches, int chunks) {
  const int total = micro_batches * chunks;
  const int warm_up = std::min((stages - rank - 1) * 2 + (chunks - 1) * stages, total);
  const auto slot = [&](int k) { return k / stages % chunks; };
  int forward = 0, backward = 0;
  const auto run_forward = [&] { list.forward(slot(forward++)); };
  const auto run_backward = [&] { list.backward(chunks - 1 - slot(backward++)); };
  repeat(warm_up, run_forward);
  repeat(total - warm_up, [&] {
    run_forward();
    run_backward();
  });
  repeat(warm_up, run_backward);
}

// 1F1B whose rank r runs the backward of the weights r micro-batches late.
void zb_h1(ListBuilder& list, int rank, int stages, int micro_batches) {
  const int warm_up = std::min(stages - 1 - rank, micro_batches);
  repeat(warm_up, [&] { list.forward(); });
  repeat(micro_batches - warm_up, [&] {
    list.forward();
    list.backward_input();
    if (list.num_weight_pending() > rank) list.backward_weight();
  });
  repeat(warm_up, [&] {
    list.backward_input();
    list.backward_weight();
  });
  while (list.num_weight_pending() > 0) list.backward_weight();
}

// Slot 0 is the descending half of the V, slot 1 the ascending one. Planned for at least 2 * stages - 1
// micro-batches, which fill the pipeline; without those that are not there the order is still right.
void zb_v(ListBuilder& list, int rank, int stages, int micro_batches) {
  const int planned = std::max(micro_batches, 2 * stages - 1);
  const auto whole_backward = [&](int slot) {
    list.backward_input(slot);
    list.backward_weight(slot);
  };
  repeat(2 * (stages - rank) - 1, [&] { list.forward(0); });
  repeat(rank, [&] {
    list.forward(1);
    list.forward(0);
  });
  repeat(stages - rank, [&] {
    list.forward(1);
    whole_backward(1);
  });
  while (list.num_forward(1) < planned) {
    if (list.num_forward(0) < planned) list.forward(0);
    whole_backward(0);
    list.forward(1);
    whole_backward(1);
  }
  repeat(rank, [&] {
    list.backward_input(0);
    list.backward_input(1);
  });
  repeat(stages - rank, [&] { whole_backward(0); });
  for (const int slot : {1, 0})
    while (list.num_weight_pending(slot) > 0) list.backward_weight(slot);
}

// The eight steps of DeepSeek's DualPipeV. What it overlaps (F&B) is here a forward and then a backward.
void dual_pipe_v(ListBuilder& list, int rank, int stages, int micro_batches) {
  std::deque<int> pending;  // slots whose backward of the weights is due, in order
  bool split = false;       // late backwards leave the weights for the bubbles at the end
  const auto backward = [&](int slot) {
    if (!split) return list.backward(slot);
    list.backward_input(slot);
    pending.push_back(slot);
  };
  const auto weight = [&] {
    list.backward_weight(pending.front());
    pending.pop_front();
  };
  const int after = stages - 1 - rank;  // ranks further down the V
  repeat(2 * after, [&] { list.forward(0); });
  repeat(rank + 1, [&] {
    list.forward(0);
    list.forward(1);
  });
  repeat(after, [&] {
    list.backward_input(1);
    list.backward_weight(1);
    list.forward(1);
  });
  repeat(micro_batches - 2 * stages + rank + 1, [&] {
    list.forward(0);
    backward(1);
    list.forward(1);
    backward(0);
  });
  repeat(after, [&] {
    backward(1);
    list.forward(1);
    backward(0);
  });
  for (int i = 0; i <= rank; ++i) {
    split = split || (i == (rank + 1) / 2 && rank % 2 == 1);
    backward(1);
    split = split || (i == (rank + 1) / 2 && rank % 2 == 0);
    backward(0);
  }
  repeat(after, [&] {
    weight();
    backward(0);
  });
  while (!pending.empty()) weight();
}

void check_request(const ScheduleRequest& request) {
  const auto [kind, stages, micro_batches, chunks] = request;
  const char* what = name(kind);
  const bool v = in_a_v(kind);
  require(stages >= 1 && stages <= kMaxRanks, what, ": stages=", stages, "; expected 1 to ", kMaxRanks);
  require(micro_batches >= 1 && micro_batches <= kMaxMicroBatches, what, ": micro_batches=", micro_batches,
          "; expected 1 to ", kMaxMicroBatches);
  require(chunks >= 1 && chunks <= kMaxChunks, what, ": chunks=", chunks, " per rank; expected 1 to ",
          kMaxChunks);
  if (kind != ScheduleKind::kInterleaved)
    require(chunks == (v ? 2 : 1), what, ": chunks=", chunks, " per rank; expected ",
            v ? "2, one for each half of the V" : "1; use interleaved for more");
  const int64_t num_chunks = int64_t{stages} * chunks;
  require(num_chunks <= kMaxChunks && num_chunks * micro_batches <= kMaxPairs, what, ": ", num_chunks,
          " chunks x ", micro_batches, " micro-batches; expected at most ", kMaxChunks, " chunks and ",
          kMaxPairs, " of both");
  if (kind == ScheduleKind::kDualPipeV)
    require(micro_batches >= 2 * stages, what, ": micro_batches=", micro_batches, " for ", stages,
            " stages; it needs at least two for each stage: use micro_batches=", 2 * stages,
            micro_batches >= 2 ? concat(" or more, or at most ", micro_batches / 2, " stages") : " or more");
  if (kind == ScheduleKind::kInterleaved && chunks > 1) {
    const int below = micro_batches / stages * stages;
    require(micro_batches % stages == 0, what, ": micro_batches=", micro_batches, " for ", stages,
            " stages; it needs a multiple of the stages: use micro_batches=",
            below > 0 ? concat(below, " or ") : "", below + stages);
  }
}

}  // namespace

const char* name(ScheduleKind kind) { return kNames[static_cast<size_t>(kind)]; }

ScheduleKind schedule_kind_of_name(std::string_view name) {
  std::string known;
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<ScheduleKind>(i);
    known += concat(i == 0 ? "" : ", ", kNames[i]);
  }
  throw InvalidArgument(concat("unknown kind of schedule '", name.substr(0, 40), "'; expected ", known));
}

std::vector<std::vector<int>> place_chunks(ScheduleKind kind, int stages, int chunks) {
  std::vector<std::vector<int>> placed(static_cast<size_t>(stages));
  for (int r = 0; r < stages; ++r)
    for (int i = 0; i < chunks; ++i)
      placed[static_cast<size_t>(r)].push_back(in_a_v(kind) && i == 1 ? 2 * stages - 1 - r : i * stages + r);
  return placed;
}

Schedule generate_compute(const ScheduleRequest& request) {
  check_request(request);
  const auto [kind, stages, micro_batches, chunks] = request;
  Schedule schedule{micro_batches, false, place_chunks(kind, stages, chunks), {}};
  for (int r = 0; r < stages; ++r) {
    ListBuilder list(schedule.chunks[static_cast<size_t>(r)], micro_batches);
    switch (kind) {
      case ScheduleKind::kGPipe:
        gpipe(list, r, stages, micro_batches);
        break;
      case ScheduleKind::kOneForwardOneBackward:
        one_forward_one_backward(list, r, stages, micro_batches);
        break;
      case ScheduleKind::kInterleaved:
        if (chunks == 1)
          one_forward_one_backward(list, r, stages, micro_batches);
        else
          interleaved(list, r, stages, micro_batches, chunks);
        break;
      case ScheduleKind::kZbH1:
        zb_h1(list, r, stages, micro_batches);
        break;
      case ScheduleKind::kZbV:
        zb_v(list, r, stages, micro_batches);
        break;
      case ScheduleKind::kDualPipeV:
        dual_pipe_v(list, r, stages, micro_batches);
        break;
    }
    schedule.actions.push_back(list.take());
  }
  return schedule;
}

Schedule generate(const ScheduleRequest& request) { return add_transfers(generate_compute(request)); }

Schedule generate_forward_only(const std::vector<std::vector<int>>& chunks, int micro_batches) {
  Schedule schedule{micro_batches, true, chunks, std::vector<std::vector<Action>>(chunks.size())};
  const std::vector<int> rank_of = rank_of_chunk(schedule);
  // Every forward takes one tick; done[c] micro-batches of chunk c were through before this tick.
  std::vector<int> done(rank_of.size(), 0);
  while (done.back() < micro_batches) {
    std::vector<int> now = done;
    for (size_t r = 0; r < chunks.size(); ++r) {
      int chosen = -1;
      for (const int c : chunks[r]) {
        const auto i = static_cast<size_t>(c);
        const int available = c == 0 ? micro_batches : done[i - 1];
        if (done[i] < available) chosen = std::max(chosen, c);
      }
      if (chosen < 0) continue;
      schedule.actions[r].push_back({ActionKind::kForward, chosen, now[static_cast<size_t>(chosen)]++});
    }
    done = std::move(now);
  }
  return add_transfers(schedule);
}

}  // namespace polyreme::pipeline
