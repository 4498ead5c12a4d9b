#include "pipeline/schedule/strict_run.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "base/error.h"

namespace polyreme::pipeline {

std::string describe_cycle(const Schedule& schedule, const std::vector<Wait>& cycle) {
  std::string text;
  for (const Wait& wait : cycle)
    text += concat(text.empty() ? concat("rank ", wait.place.rank) : ", which", " waits at action ",
                   wait.place.position, " (", token(schedule, wait.place.rank, wait.place.position),
                   ") for rank ", wait.for_rank);
  return text;
}

std::vector<Wait> find_cycle(const std::vector<Wait>& waits) {
  const auto next = [&](int rank) { return waits[static_cast<size_t>(rank)].for_rank; };
  int rank = 0;
  while (next(rank) < 0) ++rank;
  // After as many steps as there are ranks one is in the circle.
  for (size_t i = 0; i < waits.size(); ++i) rank = next(rank);
  int first = rank;
  for (int r = next(rank); r != rank; r = next(r)) first = std::min(first, r);
  std::vector<Wait> cycle{waits[static_cast<size_t>(first)]};
  while (cycle.back().for_rank != first) cycle.push_back(waits[static_cast<size_t>(cycle.back().for_rank)]);
  return cycle;
}

std::vector<std::vector<Place>> match_transfers(const Schedule& schedule) {
  struct Ends {
    std::vector<Place> sends, receives;
  };
  std::map<std::pair<int, int>, Ends> channels;  // by (from, to)
  std::vector<std::vector<Place>> partners;
  for (int r = 0; r < schedule.num_ranks(); ++r) {
    const std::vector<Action>& list = schedule.actions[static_cast<size_t>(r)];
    partners.emplace_back(list.size(), Place{-1, -1});
    for (size_t i = 0; i < list.size(); ++i) {
      const Place place{r, static_cast<int>(i)};
      if (!is_transfer(list[i].kind)) continue;
      if (is_send(list[i].kind))
        channels[{r, list[i].peer}].sends.push_back(place);
      else
        channels[{list[i].peer, r}].receives.push_back(place);
    }
  }
  const auto partner = [&](Place place) -> Place& {
    return partners[static_cast<size_t>(place.rank)][static_cast<size_t>(place.position)];
  };
  for (const auto& [ranks, ends] : channels)
    for (size_t n = 0; n < std::min(ends.sends.size(), ends.receives.size()); ++n) {
      partner(ends.sends[n]) = ends.receives[n];
      partner(ends.receives[n]) = ends.sends[n];
    }
  return partners;
}

namespace {

class Run {
 public:
  Run(const Schedule& schedule, RunListener& listener)
      : schedule_(schedule),
        listener_(listener),
        partners_(match_transfers(schedule)),
        next_(schedule.actions.size(), 0),
        end_(schedule.actions.size(), 0) {
    for (const std::vector<Action>& list : schedule.actions) done_.emplace_back(list.size(), false);
    for (int r = 0; r < schedule.num_ranks(); ++r) runnable_.push_back(r);
  }

  std::vector<Wait> run() {
    while (!runnable_.empty()) {
      const int rank = runnable_.front();
      runnable_.pop_front();
      while (advance(rank)) {
      }
    }
    return waits();
  }

 private:
  const std::vector<Action>& list(int rank) const { return schedule_.actions[static_cast<size_t>(rank)]; }
  int& next(int rank) { return next_[static_cast<size_t>(rank)]; }
  int& end(int rank) { return end_[static_cast<size_t>(rank)]; }
  bool finished(int rank) { return next(rank) == static_cast<int>(list(rank).size()); }
  const Action& current(int rank) { return list(rank)[static_cast<size_t>(next(rank))]; }
  std::vector<bool>::reference done(Place place) {
    return done_[static_cast<size_t>(place.rank)][static_cast<size_t>(place.position)];
  }
  Place partner(Place place) const {
    return partners_[static_cast<size_t>(place.rank)][static_cast<size_t>(place.position)];
  }

  // Does the rank's next thing; false if it has to wait, or is through.
  bool advance(int rank) {
    if (finished(rank)) return false;
    if (is_transfer(current(rank).kind)) return advance_batch(rank);
    if (current(rank).kind == ActionKind::kStep) return advance_step();
    listener_.on_action({rank, next(rank)});
    ++next(rank);
    return true;
  }

  bool advance_batch(int rank) {
    const int begin = next(rank);
    if (end(rank) <= begin) {
      end(rank) = static_cast<int>(batch_end(list(rank), static_cast<size_t>(begin)));
      listener_.on_batch_begin({rank, begin}, end(rank));
    }
    bool all_done = true;
    for (int i = begin; i < end(rank); ++i) {
      const Place own{rank, i};
      if (!done(own)) all_done = try_transfer(own) && all_done;
    }
    if (!all_done) return false;
    listener_.on_batch_end({rank, begin}, end(rank));
    next(rank) = end(rank);
    return true;
  }

  bool try_transfer(Place own) {
    const Place other = partner(own);
    const bool running =
        other.rank >= 0 && other.position >= next(other.rank) && other.position < end(other.rank);
    if (!running) return false;
    done(own) = done(other) = true;
    const bool sends = is_send(list(own.rank)[static_cast<size_t>(own.position)].kind);
    listener_.on_transfer(sends ? own : other, sends ? other : own);
    runnable_.push_back(other.rank);
    return true;
  }

  bool advance_step() {
    for (int r = 0; r < schedule_.num_ranks(); ++r)
      if (finished(r) || current(r).kind != ActionKind::kStep) return false;
    listener_.on_step(next_);
    for (int r = 0; r < schedule_.num_ranks(); ++r) {
      ++next(r);
      runnable_.push_back(r);
    }
    return true;
  }

  std::vector<Wait> waits() {
    std::vector<Wait> all;
    bool stuck = false;
    for (int r = 0; r < schedule_.num_ranks(); ++r) {
      all.push_back(finished(r) ? Wait{{r, -1}, -1} : wait_of(r));
      stuck = stuck || !finished(r);
    }
    return stuck ? find_cycle(all) : std::vector<Wait>{};
  }

  Wait wait_of(int rank) {
    int position = next(rank);
    if (current(rank).kind == ActionKind::kStep) {
      int other = 0;
      while (!finished(other) && current(other).kind == ActionKind::kStep) ++other;
      return {{rank, position}, other};
    }
    while (done({rank, position})) ++position;
    return {{rank, position}, list(rank)[static_cast<size_t>(position)].peer};
  }

  const Schedule& schedule_;
  RunListener& listener_;
  const std::vector<std::vector<Place>> partners_;
  std::vector<int> next_;                // [rank]: its position
  std::vector<int> end_;                 // [rank]: the end of the batch it is in; <= next_ if in none
  std::vector<std::vector<bool>> done_;  // [rank][position]: transfers that have completed
  std::deque<int> runnable_;
};

}  // namespace

std::vector<Wait> run_strictly(const Schedule& schedule, RunListener& listener) {
  return Run(schedule, listener).run();
}

}  // namespace polyreme::pipeline
