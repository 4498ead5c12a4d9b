#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/net/handshake.h"
#include "comm/tcp_store/roll.h"
#include "comm/tcp_store/wire.h"

namespace polyreme {

// The serving side of TcpStore: one thread, one poll loop, which alone touches everything but the
// counters.
class StoreServer {
 public:
  StoreServer(FileDescriptor listener, std::string secret);
  // Tells the watches that the store ends, and gives them time to go; then closes all connections.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  // Lets the destructor wait until the clients have gone, but no longer than this.
  void set_linger(std::chrono::milliseconds limit) { linger_ = limit; }
  int64_t num_refused() const { return num_refused_.load(std::memory_order_relaxed); }
  // "refused 2 connections that do not know the secret of this job, the last from 10.0.0.7:4242"; or empty.
  std::string refusals() const;
  int64_t num_malformed() const { return num_malformed_.load(std::memory_order_relaxed); }

 private:
  struct Connection {
    FileDescriptor socket;
    ServerHandshake handshake{store_wire::kProtocol};
    Deadline greeting_deadline;
    std::string input, output;
    bool waits = false;  // a kGet for `wanted` is open
    uint32_t wanted_id = 0;
    std::string wanted;
    int watched_rank = -1;  // of a watch
    bool doomed = false;    // closed at the end of the round

    bool admitted() const { return handshake.stage() == ServerHandshake::Stage::kAdmitted; }
  };

  void wake();
  void serve();
  void serve_round(std::vector<pollfd>& polled, std::vector<Connection*>& owners);
  void accept_all();
  void receive(Connection& connection);
  void greet(Connection& connection, std::string_view bytes);
  void take_requests(Connection& connection);
  void answer(Connection& connection, const store_wire::Request& request);
  void reply(Connection& connection, store_wire::Status status, uint32_t id, const std::string& value);
  void flush(Connection& connection);
  bool store_value(const std::string& key, std::string value);
  void drop_malformed(Connection& connection);
  void answer_watch(Connection& connection, const store_wire::Request& request);
  void tell_watches(store_wire::Status status, const std::string& text);
  void look_after_watches();

  FileDescriptor listener_;
  FileDescriptor wake_;
  std::string secret_;
  std::list<Connection> connections_;  // stable addresses
  int num_strangers_ = 0;              // not admitted yet
  Deadline accept_again_{};
  std::map<std::string, std::string> values_;
  size_t stored_bytes_ = 0;
  std::atomic<int64_t> num_refused_{0}, num_malformed_{0};
  mutable std::mutex last_refused_mutex_;
  std::string last_refused_;
  std::atomic<int> num_admitted_{0}, num_watches_{0};
  std::atomic<bool> ending_{false}, stopping_{false}, told_failure_{false};
  AwakeClock awake_;
  Roll roll_;
  Roll::Time next_look_{0};
  bool told_end_ = false;
  std::chrono::milliseconds linger_{0};
  const int owner_pid_;
  std::thread thread_;
};

}  // namespace polyreme
