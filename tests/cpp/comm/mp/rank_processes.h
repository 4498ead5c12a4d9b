#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "comm/tcp_store.h"

namespace polyreme {

// What became of a forked rank.
struct RankResult {
  pid_t pid = 0;
  std::string outcome;                   // "ok", "<class>: <message>", or "" if the process could not say
  int status = 0;                        // of waitpid
  std::chrono::milliseconds elapsed{0};  // from the fork, or the last RankProcesses::kill, to its end
};

// Ranks as processes: forked from the test, joined by a TcpStore that rank 0 serves on a socket
// that was opened before. A test that hangs is ended here, by the pids of its own children.
class RankProcesses {
 public:
  // In the child: `self` is for ready() and job_id().
  using RankMain = std::function<void(RankProcesses& self, Store& store, int rank)>;
  // A child runs `rank_main`, reports how it ended, and leaves with _exit.
  RankProcesses(int size, const RankMain& rank_main);
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  const std::string& job_id() const { return job_id_; }
  pid_t pid(int rank) const { return ranks_[static_cast<size_t>(rank)].pid; }
  // Signals a rank; the time of the others counts from the last call.
  void kill(int rank, int signal);
  // Waits for a child to call `ready`.
  void wait_until_ready(int rank);
  // In a child: of the job's store, for a second connection.
  TcpStoreOptions store_options() const;
  // In a child: lets wait_until_ready return.
  void ready() const;
  // Waits for all; kills what is left at `limit`.
  std::vector<RankResult> wait(std::chrono::seconds limit);

 private:
  [[noreturn]] void run_child(int rank, const RankMain& rank_main, int listener);

  struct Child {
    pid_t pid = -1;
    int outcome_fd = -1;
    int ready_fd = -1;
  };
  std::string job_id_;
  std::vector<Child> ranks_;
  int own_outcome_fd_ = -1, own_ready_fd_ = -1;  // in a child
  int port_ = 0;
  std::chrono::steady_clock::time_point start_;
};

// Names in /dev/shm that begin with the prefix of a job's segments.
std::vector<std::string> segments_left(const std::string& job_id);

}  // namespace polyreme
