#include "comm/tcp/control_links.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "comm/net/bytes.h"

namespace polyreme {
namespace {

void watch(const FileDescriptor& epoll, const FileDescriptor& fd, uint64_t tag) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = tag;
  require<CommError>(epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd.get(), &event) == 0,
                     "epoll_ctl: ", std::strerror(errno));
}

std::vector<int> decode_ranks(std::string_view text, size_t size) {
  std::vector<int> ranks;
  for (; text.size() >= 4; text.remove_prefix(4))
    if (load_u32(text) < size) ranks.push_back(static_cast<int>(load_u32(text)));
  return ranks;
}

}  // namespace

ControlLinks::ControlLinks(std::vector<FileDescriptor> sockets)
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  require<CommError>(epoll_ && wake_, "epoll, eventfd: ", std::strerror(errno));
  for (FileDescriptor& socket : sockets) peers_.emplace_back().socket = std::move(socket);
  for (size_t r = 0; r < peers_.size(); ++r)
    if (peers_[r].socket) watch(epoll_, peers_[r].socket, r);
  watch(epoll_, wake_, peers_.size());
}

std::optional<tcp_wire::ControlFrame> ControlLinks::read() {
  std::array<epoll_event, 16> events;
  int count = 0;
  do {
    count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
    for (int i = 0; i < count; ++i) {
      const uint64_t rank = events[static_cast<size_t>(i)].data.u64;
      if (rank < peers_.size()) receive(peers_[rank]);
    }
  } while (count == static_cast<int>(events.size()) && !failure_);
  return std::exchange(failure_, std::nullopt);
}

void ControlLinks::receive(Peer& peer) {
  std::array<char, tcp_wire::kControlHeadBytes + tcp_wire::kMaxTextBytes> bytes;
  while (peer.state == State::kOpen || peer.state == State::kLeft) {
    const ssize_t received =
        recv(peer.socket.get(), bytes.data(), bytes.size() - peer.input.size(), MSG_DONTWAIT);
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    // Only a peer's process closes or resets; any other error is the network's.
    if (received == 0 || (received < 0 && (errno == ECONNRESET || errno == EPIPE)))
      return end(peer, peer.state == State::kLeft ? State::kLeft : State::kClosed);
    if (received < 0) return end(peer, State::kSilent);
    peer.input.append(bytes.data(), static_cast<size_t>(received));
    bool malformed = false;
    while (auto frame = tcp_wire::take_control_frame(peer.input, malformed)) {
      if (frame->what == tcp_wire::News::kLeft) peer.state = State::kLeft;
      if (frame->what == tcp_wire::News::kWaits) {
        peer.last_waited = std::chrono::steady_clock::now();
        peer.awaits = decode_ranks(frame->text, peers_.size());
      }
      if (frame->what == tcp_wire::News::kFailure && !failure_) failure_ = std::move(frame);
    }
    if (malformed) return end(peer, State::kClosed);
  }
}

void ControlLinks::end(Peer& peer, State state) {
  peer.state = state;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.socket.get(), nullptr);
}

void ControlLinks::tell(const tcp_wire::ControlFrame& frame) {
  const std::string bytes = tcp_wire::encode(frame);
  const std::lock_guard lock(tell_mutex_);
  for (const Peer& peer : peers_)
    if (peer.socket) send(peer.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void ControlLinks::wake() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

void ControlLinks::shut_down() noexcept {
  for (const Peer& peer : peers_)
    if (peer.socket) shutdown(peer.socket.get(), SHUT_RDWR);
}

}  // namespace polyreme
