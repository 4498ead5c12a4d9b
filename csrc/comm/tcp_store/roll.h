#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "comm/shared_memory/process.h"

namespace polyreme {

// A process that is watched, as it introduces itself.
struct Watched {
  ProcessIdentity process;
  std::string boot_id;
  std::string host;
  std::chrono::milliseconds heartbeat_interval{0};
  std::chrono::milliseconds peer_timeout{0};
};
Watched this_watched(std::chrono::milliseconds heartbeat_interval, std::chrono::milliseconds peer_timeout);
// One line of words. Nothing if it is malformed.
std::string encode(const Watched& watched);
std::optional<Watched> decode_watched(std::string_view text);

// "rank 2 (host a, pid 123)"
std::string watched_text(int rank, const Watched& watched);
// "3 s", "0.5 s"
std::string seconds_text(std::chrono::milliseconds time);
// What /proc says, as in "; the process is stopped"; empty if nothing can be found out from here.
std::string state_text(const Watched& watched);

// Time that passes only while somebody looks: a process that was stopped must not take its own absence for
// that of the others.
class AwakeClock {
 public:
  using Clock = std::chrono::steady_clock;
  // Called at least about every `most`; a longer pause counts as that.
  std::chrono::nanoseconds advance(std::chrono::nanoseconds most) {
    const Clock::time_point now = Clock::now();
    awake_ += std::min<std::chrono::nanoseconds>(now - seen_, most);
    seen_ = now;
    return awake_;
  }
  std::chrono::nanoseconds now() const { return awake_; }

 private:
  Clock::time_point seen_ = Clock::now();
  std::chrono::nanoseconds awake_{0};
};

// Who of the ranks lives, at the store, and the first failure of the job. Belongs to the store's thread.
// `now` is of the store's AwakeClock.
class Roll {
 public:
  using Time = std::chrono::nanoseconds;

  // False if the rank is there already.
  bool join(int rank, const Watched& watched, Time now);
  // Returns how long nothing was heard of the rank, if that was longer than two intervals; else 0.
  std::chrono::milliseconds beat(int rank, Time now);
  // The rank ends in order, and is not missed.
  void leave(int rank) { ranks_.erase(rank); }
  // Its connection was closed without that.
  void close(int rank, Time now);
  // Names the ranks that are lost: closed 200 ms ago (their processes are given this time to end, for the
  // text), or silent for longer than their peer timeout.
  void look(Time now);

  // The first one stays.
  void fail(const std::string& text) {
    if (failure_.empty()) failure_ = text;
  }
  // Empty: none yet.
  const std::string& failure() const { return failure_; }
  bool empty() const { return ranks_.empty(); }

 private:
  struct Entry {
    Watched watched;
    Time heard;
    std::optional<Time> closed;
  };
  std::map<int, Entry> ranks_;
  std::string failure_;
};

}  // namespace polyreme
