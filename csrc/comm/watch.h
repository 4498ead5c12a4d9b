#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/journal.h"
#include "comm/tcp_store.h"

namespace polyreme {

struct WatchOptions {
  TcpStoreOptions store;  // host, port and secret of the job's store
  int rank = 0;
  std::chrono::milliseconds heartbeat_interval{std::chrono::seconds(2)};
  // How long a rank, or the store, may be silent. At least twice the interval.
  std::chrono::milliseconds peer_timeout{std::chrono::seconds(30)};
  // Called at most once, from a thread of the watch, with the first failure of the job: the same text on all
  // ranks, unless the store itself was lost. Must not throw, nor wait for the watch.
  std::function<void(const std::string&)> on_failure;
  std::shared_ptr<Journal> journal;  // gets stalls and the failure; may be null
};

// One rank's part in watching the job. A thread tells the store of rank 0 in every interval that this rank
// lives, and learns at once when one has failed: it reported a failure, its process ended without a goodbye,
// or it was silent for the peer timeout (stopped, its host gone). The first failure wins.
//
// A rank that was silent for more than two intervals, and is back, is a stall: it is noted, and nothing else.
// A rank that ends in order says goodbye and is not missed. When the store ends in order, the watch is over.
//
// A second thread watches the first: if it does not run for twice the peer timeout, that is a failure here;
// the others see this rank as silent.
class Watch {
 public:
  // Throws as TcpStore::connect does; InvalidArgument for intervals that make no sense.
  explicit Watch(WatchOptions options);
  // Says goodbye. After a failure that another rank reported it first gives that rank 300 ms to end.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // This rank has failed: `text`, cut to 4 KiB, is told to all ranks at once, this one included. Returns when
  // the store has it, or after a second. From any thread but the watch's own; nothing in a forked child.
  void report(const std::string& text) noexcept;
  // "rank 2 (host a, pid 123)", this one.
  const std::string& self_text() const { return self_text_; }
  // The first failure of the job, as far as known here; empty while there is none.
  std::string failure() const;
  int64_t num_stalls() const { return num_stalls_.load(std::memory_order_relaxed); }
  // For tests: the thread does nothing any more.
  void freeze() { frozen_.store(true); }

 private:
  class Connection;
  enum class Phase { kWatching, kLeaving, kOver };

  void end_thread();
  void run();
  // What has come from the store. False if the watch is over.
  bool take_replies(std::chrono::nanoseconds now);
  // What this rank has to say. False if the watch is over.
  bool speak(std::chrono::nanoseconds now);
  void check_thread();
  void fail(const std::string& text);
  bool enter(Phase phase);
  void note_stall(const std::string& text, std::chrono::nanoseconds silent);

  const WatchOptions options_;
  const std::string self_text_;
  const int owner_pid_;
  std::unique_ptr<Connection> connection_;
  std::chrono::nanoseconds heard_{0}, beaten_{0};  // of the thread's AwakeClock
  bool reported_ = false;                          // of the thread

  mutable std::mutex mutex_;
  std::condition_variable over_;  // the phase is another
  Phase phase_ = Phase::kWatching;
  std::string report_, failure_;
  std::chrono::steady_clock::time_point failed_at_;
  std::atomic<bool> frozen_{false};
  std::atomic<uint64_t> num_rounds_{0};
  std::atomic<int64_t> num_stalls_{0};
  std::thread thread_, checker_;
};

}  // namespace polyreme
