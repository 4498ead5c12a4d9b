#pragma once

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/tcp/connect.h"
#include "comm/tcp/control_links.h"
#include "comm/tcp/data_link.h"
#include "comm/tcp/endpoint.h"

namespace polyreme {

// What a group and its subgroups have in common.
struct TcpGroup {
  std::string secret;
  NetworkInterface interface;
  std::chrono::milliseconds peer_timeout;
  bool spins = false;
};

// A rank as the others know it.
struct TcpRank {
  std::string host;
  int64_t pid = 0;
  std::string address;
  int job_rank = 0;  // in the group that all others were made from
};

// As Endpoint::who.
std::string who_is(size_t rank, const TcpRank& is);

// One thread runs exchanges: what it finds wrong it throws, and `run_or_fail` makes of that a failure of the
// whole group. `broken_` is how `fail`, from any thread, and failures that peers tell reach it.
class SocketEndpoint final : public TcpEndpoint {
 public:
  SocketEndpoint(int rank, std::vector<TcpRank> ranks, std::string name,
                 std::shared_ptr<const TcpGroup> common, std::vector<LinkSockets> sockets,
                 int64_t num_refused);
  ~SocketEndpoint() override;
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  std::string who(int rank) const override {
    return who_is(static_cast<size_t>(rank), ranks_[static_cast<size_t>(rank)]);
  }
  void exchange(std::span<const Message> messages, std::chrono::milliseconds limit) override;
  void fail(FailureKind kind, const std::string& text) noexcept override;
  std::unique_ptr<Endpoint> make_subgroup(const std::vector<int>& members, const std::string& name,
                                          std::chrono::milliseconds limit) override;
  int64_t num_refused() const override { return num_refused_; }

 private:
  struct Invitation;

  template <typename Action>
  void run_or_fail(const Action& action);
  void begin(std::span<const Message> messages);
  void run(std::chrono::milliseconds limit);
  bool move();
  void wait(Deadline deadline);
  void read_control();
  void look_for_lost(Deadline last_move);
  void say_that_it_waits();
  void answer_who_asks();
  std::vector<Invitation> invite(const std::vector<int>& members, const std::string& name, int port,
                                 std::chrono::milliseconds limit);
  [[noreturn]] void lose(int peer);
  [[noreturn]] void time_out(std::chrono::milliseconds limit, Deadline asked);
  [[noreturn]] void throw_broken();
  void throw_if_broken() {
    if (broken_.load(std::memory_order_acquire)) throw_broken();
  }
  DataLink& link(int peer) { return links_[static_cast<size_t>(peer)]; }
  void require_own_process() const;
  bool forked() const { return getpid() != owner_pid_; }

  const int rank_;
  const std::vector<TcpRank> ranks_;
  const std::string name_;
  const std::shared_ptr<const TcpGroup> common_;
  const int64_t num_refused_;
  const int owner_pid_ = getpid();
  std::vector<DataLink> links_;
  ControlLinks control_;

  std::vector<int> active_;  // peers with messages left in the exchange
  std::vector<pollfd> polled_;
  Deadline last_said_{};  // that this rank waits

  std::mutex failure_mutex_;
  std::atomic<bool> broken_{false};
  FailureKind failure_kind_ = FailureKind::kPeerLost;
  std::string failure_text_;
};

// What goes wrong in `action` breaks this endpoint and is told to the others, unless they were first.
template <typename Action>
void SocketEndpoint::run_or_fail(const Action& action) {
  try {
    throw_if_broken();
    action();
  } catch (const CollectiveMismatch& failure) {
    fail(FailureKind::kMismatch, failure.what());
  } catch (const Timeout& failure) {
    fail(FailureKind::kTimeout, failure.what());
  } catch (const CommError& failure) {
    fail(FailureKind::kPeerLost, failure.what());
  }
  throw_if_broken();
}

}  // namespace polyreme
