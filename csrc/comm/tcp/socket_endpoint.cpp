#include "comm/tcp/socket_endpoint.h"

#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/interrupt.h"
#include "comm/collective.h"
#include "comm/net/bytes.h"

namespace polyreme {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using ControlState = ControlLinks::State;

// With a core per rank, a rank that waits first tries again and again for so long: it saves the wake-up.
// In between it yields, in case something else has the peer's core: measured for 4 bytes there and back
// 10 us with a core each, 20 us (125 without yielding) where both share one, 50 us by poll alone.
constexpr microseconds kSpin{50};
// A waiting rank tries at least this often. A full socket tells of room only once a third is free,
// which on a slow link takes long.
constexpr milliseconds kTryInterval = kInterruptInterval;
// How long the control connection has to say why a data connection ended, and the other way round.
constexpr milliseconds kTimeToExplain{500};
constexpr milliseconds kTimeToClose{1000};
// Whoever waits at its deadline asks who else does. How long an answer may take, and for how long it
// need not be repeated.
constexpr milliseconds kTimeToAnswer{200};
// Two ranks that die together are both named: the second has this long to be noticed.
constexpr milliseconds kSecondLook{20};

double in_seconds(milliseconds time) { return static_cast<double>(time.count()) / 1000; }

std::vector<FileDescriptor> take_control(std::vector<LinkSockets>& sockets) {
  std::vector<FileDescriptor> control;
  for (LinkSockets& each : sockets) control.push_back(std::move(each.control));
  return control;
}

}  // namespace

std::string who_is(size_t rank, const TcpRank& is) {
  return rank_text(static_cast<int>(rank), is.job_rank, is.host, is.pid);
}

SocketEndpoint::SocketEndpoint(int rank, std::vector<TcpRank> ranks, std::string name,
                               std::shared_ptr<const TcpGroup> common, std::vector<LinkSockets> sockets,
                               int64_t num_refused)
    : rank_(rank),
      ranks_(std::move(ranks)),
      name_(std::move(name)),
      common_(std::move(common)),
      num_refused_(num_refused),
      control_([&] {
        for (const LinkSockets& each : sockets) {
          if (!each.control) continue;
          set_connection_options(each.data, milliseconds(0));
          set_connection_options(each.control, common_->peer_timeout);
        }
        return take_control(sockets);
      }()) {
  for (int r = 0; r < size(); ++r)
    links_.emplace_back(std::move(sockets[static_cast<size_t>(r)].data), who(rank_), who(r));
  active_.reserve(ranks_.size());
  polled_.reserve(ranks_.size() + 1);
}

SocketEndpoint::~SocketEndpoint() {
  if (forked()) return;  // the sockets are the parent's, too
  try {
    if (!broken_.load()) control_.tell({tcp_wire::News::kLeft, FailureKind::kNone, ""});
  } catch (const std::exception&) {  // they will notice the end of the connections
  }
  for (const DataLink& link : links_)
    if (link.socket()) shutdown(link.socket().get(), SHUT_RDWR);
  control_.shut_down();
}

void SocketEndpoint::require_own_process() const {
  require(!forked(), "group '", name_, "', ", who(rank_), ": used in process ", getpid(),
          ", a fork of that; make a group of its own in the new process");
}

void SocketEndpoint::exchange(std::span<const Message> messages, milliseconds limit) {
  for (const Message& message : messages)
    require(message.peer >= 0 && message.peer < size() && message.peer != rank_ && message.num_bytes >= 0,
            "exchange: a message of ", message.num_bytes, " bytes with rank ", message.peer, " on rank ",
            rank_, " of ", size());
  require_own_process();
  run_or_fail([&] {
    begin(messages);
    run(std::min<milliseconds>(limit, std::chrono::years(1)));
  });
}

void SocketEndpoint::begin(std::span<const Message> messages) {
  active_.clear();
  for (DataLink& link : links_) link.clear();
  for (const Message& message : messages) {
    DataLink& link = this->link(message.peer);
    if (!link.sends() && !link.receives()) active_.push_back(message.peer);
    link.add(message);
  }
  // What has been told meanwhile; later it is looked for only where there is time to wait.
  read_control();
}

void SocketEndpoint::run(milliseconds limit) {
  Clock::time_point last_move = Clock::now();
  Clock::time_point asked = last_move;
  bool moved = false;
  while (!active_.empty()) {
    throw_if_broken();
    if (move()) {
      moved = true;
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (std::exchange(moved, false)) last_move = now;
    if (common_->spins && now - last_move < kSpin) {
      sched_yield();
      continue;
    }
    const bool late = now - last_move >= limit;
    if (late && asked <= last_move) {
      asked = now;
      say_that_it_waits();
    }
    if (late && now - asked >= kTimeToAnswer) time_out(limit, asked);
    wait(late ? asked + kTimeToAnswer : last_move + limit);
    look_for_lost(last_move);
  }
}

// One turn over all peers that have messages left. False if nothing went.
bool SocketEndpoint::move() {
  bool moved = false;
  for (size_t i = 0; i < active_.size();) {
    const int peer = active_[i];
    DataLink& link = this->link(peer);
    for (const bool sending : {true, false}) {
      if (!(sending ? link.sends() : link.receives())) continue;
      const DataLink::Progress progress = sending ? link.send() : link.receive();
      if (progress == DataLink::Progress::kBroken) lose(peer);
      moved = moved || progress == DataLink::Progress::kMoved;
    }
    if (link.sends() || link.receives()) {
      ++i;
    } else {
      active_[i] = active_.back();
      active_.pop_back();
    }
  }
  return moved;
}

// Until something may have happened, at most kTryInterval.
void SocketEndpoint::wait(Clock::time_point deadline) {
  check_interrupt();
  answer_who_asks();
  polled_.assign(1, {control_.poll_fd(), POLLIN, 0});
  for (const int peer : active_) {
    const auto events = (link(peer).receives() ? POLLIN : 0) | (link(peer).sends() ? POLLOUT : 0);
    polled_.push_back({link(peer).socket().get(), static_cast<short>(events), 0});
  }
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  poll(polled_.data(), polled_.size(),
       static_cast<int>(std::clamp(left, milliseconds(0), kTryInterval).count()));
  if (polled_[0].revents == 0) return;
  read_control();
  throw_if_broken();
}

void SocketEndpoint::say_that_it_waits() {
  last_said_ = Clock::now();
  std::string awaited;
  for (const int peer : active_) append_u32(awaited, static_cast<uint32_t>(peer));
  control_.tell({tcp_wire::News::kWaits, FailureKind::kNone, awaited});
}

// What one rank says is what another asks.
void SocketEndpoint::answer_who_asks() {
  for (int r = 0; r < size(); ++r)
    if (control_.last_waited(r) > last_said_ + kTimeToAnswer) return say_that_it_waits();
}

void SocketEndpoint::read_control() {
  if (const auto failure = control_.read()) fail(failure->kind, failure->text);
}

// Of the peers that are still needed. Their data connections tell, too, and with all that they sent
// before, but not if the host or the network died.
void SocketEndpoint::look_for_lost(Clock::time_point last_move) {
  for (const int peer : active_) {
    const ControlState state = control_.state(peer);
    const bool overdue = state != ControlState::kOpen && Clock::now() - last_move > kTimeToClose;
    if (state == ControlState::kSilent || overdue) lose(peer);
  }
}

void SocketEndpoint::lose(int peer) {
  // A peer that failed has told why, or another one has; one that was killed closes both connections.
  const Clock::time_point deadline = Clock::now() + kTimeToExplain;
  const auto listen = [&](milliseconds pause) {
    pollfd entry{control_.poll_fd(), POLLIN, 0};
    poll(&entry, 1, static_cast<int>(pause.count()));
    read_control();
    throw_if_broken();
  };
  while (control_.state(peer) == ControlState::kOpen && Clock::now() < deadline) listen(milliseconds(10));
  const auto [low, high] = std::minmax(rank_, peer);
  const int error = link(peer).error();
  require<PeerLost>(control_.state(peer) != ControlState::kOpen, "the connection between ", who(low), " and ",
                    who(high), " broke: ", error == 0 ? "it was closed" : std::strerror(error));
  for (const Clock::time_point end = Clock::now() + kSecondLook; Clock::now() < end;)
    listen(std::chrono::ceil<milliseconds>(end - Clock::now()));

  std::string text;
  for (int r = 0; r < size(); ++r) {
    const ControlState state = control_.state(r);
    if (state == ControlState::kOpen || (state == ControlState::kLeft && r != peer)) continue;
    text += concat(text.empty() ? "lost " : "; ", who(r), ": ");
    if (state == ControlState::kSilent) {
      text += concat("no answer from its host for ", in_seconds(common_->peer_timeout), " s");
    } else {
      text += state == ControlState::kLeft ? "it left the group" : "it closed the connection";
    }
  }
  throw PeerLost(text);
}

// The culprits are those for whom somebody waits and who do not wait themselves: the same from wherever
// one looks, and whomever a rank misses.
void SocketEndpoint::time_out(milliseconds limit, Clock::time_point asked) {
  enum : uint8_t { kWaits = 1, kAwaited = 2 };
  std::vector<uint8_t> is(ranks_.size());
  const auto waits_for = [&](int rank, const std::vector<int>& awaited) {
    is[static_cast<size_t>(rank)] |= kWaits;
    for (const int each : awaited) is[static_cast<size_t>(each)] |= kAwaited;
  };
  std::sort(active_.begin(), active_.end());
  waits_for(rank_, active_);
  for (int r = 0; r < size(); ++r)
    if (control_.last_waited(r) >= asked - kTimeToAnswer) waits_for(r, control_.awaited_by(r));
  std::string culprits, missing;
  for (int r = 0; r < size(); ++r)
    if (is[static_cast<size_t>(r)] == kAwaited) culprits += concat(culprits.empty() ? "" : ", ", who(r));
  for (const int peer : active_) {
    const DataLink& link = this->link(peer);
    missing += concat("; ", who(peer));
    if (link.receives()) missing += concat(" has not sent ", link.bytes_to_receive(), " bytes");
    if (link.sends())
      missing += concat(link.receives() ? " and" : "", " has not taken ", link.bytes_to_send(), " bytes");
  }
  throw Timeout(concat("waited ", in_seconds(limit), " s for ",
                       culprits.empty() ? "each other, all of them inside an exchange" : culprits,
                       "; no byte moved on ", who(rank_), missing));
}

void SocketEndpoint::fail(FailureKind kind, const std::string& text) noexcept {
  try {
    tcp_wire::ControlFrame frame{tcp_wire::News::kFailure, kind, text.substr(0, tcp_wire::kMaxTextBytes)};
    {
      const std::lock_guard lock(failure_mutex_);
      if (broken_.load(std::memory_order_relaxed)) return;
      failure_kind_ = kind;
      failure_text_ = frame.text;
      broken_.store(true, std::memory_order_release);
    }
    if (!forked()) control_.tell(frame);
  } catch (const std::exception&) {  // out of memory for the text
    broken_.store(true, std::memory_order_release);
  }
  if (!forked()) control_.wake();
}

void SocketEndpoint::throw_broken() {
  FailureKind kind = FailureKind::kNone;
  std::string text;
  {
    const std::lock_guard lock(failure_mutex_);
    kind = failure_kind_;
    text = failure_text_;
  }
  throw_failure(kind, text);
}

}  // namespace polyreme
