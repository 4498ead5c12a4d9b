#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/net/socket.h"
#include "comm/tcp/wire.h"

namespace polyreme {

// The control connections to all peers: how failures and departures travel.
//
// `tell` and `wake` may be called from any thread, everything else by the one that runs exchanges.
class ControlLinks {
 public:
  enum class State : uint8_t {
    kOpen,
    kLeft,    // it said so
    kClosed,  // without a word
    kSilent   // its host does not answer any more
  };
  // sockets[r]: to rank r; none to this rank itself.
  explicit ControlLinks(std::vector<FileDescriptor> sockets);

  // Readable when `read` has something to do.
  int poll_fd() const { return epoll_.get(); }
  // Takes in what has come; returns a failure that a peer has told, once.
  std::optional<tcp_wire::ControlFrame> read();
  State state(int rank) const { return peers_[static_cast<size_t>(rank)].state; }
  // When the rank last said that it waits inside an exchange (the beginning of time if never), and for whom.
  Deadline last_waited(int rank) const { return peers_[static_cast<size_t>(rank)].last_waited; }
  const std::vector<int>& awaited_by(int rank) const { return peers_[static_cast<size_t>(rank)].awaits; }

  // To all peers, without waiting: what has no room in the socket's buffer is not sent, which does not
  // happen to the few frames that a rank sends.
  void tell(const tcp_wire::ControlFrame& frame);
  // Makes poll_fd readable for good.
  void wake() noexcept;
  // Ends the connections also where a forked child still holds a copy of the sockets.
  void shut_down() noexcept;

 private:
  struct Peer {
    FileDescriptor socket;
    State state = State::kOpen;
    Deadline last_waited{};
    std::vector<int> awaits;
    std::string input;
  };
  void receive(Peer& peer);
  void end(Peer& peer, State state);

  std::vector<Peer> peers_;
  FileDescriptor epoll_, wake_;
  std::optional<tcp_wire::ControlFrame> failure_;
  std::mutex tell_mutex_;
};

}  // namespace polyreme
