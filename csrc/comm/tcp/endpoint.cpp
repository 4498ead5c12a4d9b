#include "comm/tcp/endpoint.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>

#include "comm/collective.h"
#include "comm/net/handshake.h"
#include "comm/rendezvous.h"
#include "comm/shared_memory/process.h"
#include "comm/tcp/connect.h"
#include "comm/tcp/control_links.h"
#include "comm/tcp/data_link.h"

namespace polyreme {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using ControlState = ControlLinks::State;

// With a core per rank, a rank that waits first tries again and again for so long: it saves the wake-up.
constexpr microseconds kSpin{50};
// A waiting rank tries at least this often. A full socket tells of room only once a third is free,
// which on a slow link takes long.
constexpr milliseconds kTryInterval{250};
// How long the control connection has to say why a data connection ended, and the other way round.
constexpr milliseconds kTimeToExplain{500};
constexpr milliseconds kTimeToClose{1000};
// Two ranks that die together are both named: the second has this long to be noticed.
constexpr milliseconds kSecondLook{20};

double in_seconds(milliseconds time) { return static_cast<double>(time.count()) / 1000; }

// What a group and its subgroups have in common.
struct Common {
  std::string secret;
  Interface interface;
  milliseconds peer_timeout;
  bool spins = false;
};

// A rank as the others know it.
struct Rank {
  std::string host;
  int64_t pid = 0;
  std::string address;
};

std::string who_is(size_t rank, const Rank& is) {
  return concat("rank ", rank, " (host ", is.host, ", pid ", is.pid, ")");
}

// Where a member listens, as the members tell each other.
struct Invitation {
  std::array<char, kNonceBytes> nonce{};
  Digest group{};  // of its name and members
  int32_t port = 0;
};

class SocketEndpoint final : public TcpEndpoint {
 public:
  SocketEndpoint(int rank, std::vector<Rank> ranks, std::string name, std::shared_ptr<const Common> common,
                 std::vector<LinkSockets> sockets, int64_t num_refused);
  ~SocketEndpoint() override;
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  std::string who(int rank) const override {
    return who_is(static_cast<size_t>(rank), ranks_[static_cast<size_t>(rank)]);
  }
  void exchange(std::span<const Message> messages, milliseconds limit) override;
  void fail(FailureKind kind, const std::string& text) noexcept override;
  std::unique_ptr<Endpoint> make_subgroup(const std::vector<int>& members, const std::string& name,
                                          milliseconds limit) override;
  int64_t num_refused() const override { return num_refused_; }

 private:
  template <typename Action>
  void run_or_fail(const Action& action);
  void begin(std::span<const Message> messages);
  void run(milliseconds limit);
  bool move();
  void wait(Clock::time_point deadline);
  void read_control();
  void look_for_lost(Clock::time_point last_move);
  std::vector<Invitation> invite(const std::vector<int>& members, const std::string& name, int port,
                                 milliseconds limit);
  [[noreturn]] void lose(int peer);
  [[noreturn]] void time_out(milliseconds limit);
  [[noreturn]] void throw_broken();
  void throw_if_broken() {
    if (broken_.load(std::memory_order_acquire)) throw_broken();
  }
  DataLink& link(int peer) { return links_[static_cast<size_t>(peer)]; }
  void require_own_process() const;
  bool forked() const { return getpid() != owner_pid_; }

  const int rank_;
  const std::vector<Rank> ranks_;
  const std::string name_;
  const std::shared_ptr<const Common> common_;
  const int64_t num_refused_;
  const int owner_pid_ = getpid();
  std::vector<DataLink> links_;
  ControlLinks control_;

  std::vector<int> active_;  // peers with messages left in the exchange
  std::vector<pollfd> polled_;

  std::mutex failure_mutex_;
  std::atomic<bool> broken_{false};
  FailureKind failure_kind_ = FailureKind::kPeerLost;
  std::string failure_text_;
};

std::vector<FileDescriptor> take_control(std::vector<LinkSockets>& sockets) {
  std::vector<FileDescriptor> control;
  for (LinkSockets& each : sockets) control.push_back(std::move(each.control));
  return control;
}

SocketEndpoint::SocketEndpoint(int rank, std::vector<Rank> ranks, std::string name,
                               std::shared_ptr<const Common> common, std::vector<LinkSockets> sockets,
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
  bool moved = false;
  while (!active_.empty()) {
    throw_if_broken();
    if (move()) {
      moved = true;
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (std::exchange(moved, false)) last_move = now;
    if (common_->spins && now - last_move < kSpin) continue;
    if (now - last_move >= limit) time_out(limit);
    wait(last_move + limit);
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

void SocketEndpoint::time_out(milliseconds limit) {
  std::string text;
  std::vector<int> peers = active_;
  std::sort(peers.begin(), peers.end());
  for (const int peer : peers) {
    const DataLink& link = this->link(peer);
    text += concat(text.empty() ? "" : "; ", who(peer));
    if (link.receives()) text += concat(" has not sent ", link.bytes_to_receive(), " bytes");
    if (link.sends())
      text += concat(link.receives() ? " and" : "", " has not taken ", link.bytes_to_send(), " bytes");
  }
  throw Timeout(concat(who(rank_), " waited ", in_seconds(limit), " s and no byte moved: ", text));
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

std::unique_ptr<Endpoint> SocketEndpoint::make_subgroup(const std::vector<int>& members,
                                                        const std::string& name, milliseconds limit) {
  const auto self = std::find(members.begin(), members.end(), rank_);
  require(self != members.end(), "make_subgroup '", name, "': ", who(rank_), " is not a member");
  require_own_process();
  const auto new_rank = static_cast<int>(self - members.begin());
  ConnectOptions options{.rank = new_rank,
                         .group = name,
                         .secret = common_->secret,
                         .interface = common_->interface,
                         .deadline = Clock::now() + limit};
  options.look = [&] {
    read_control();
    throw_if_broken();
    for (const int member : members)
      if (member != rank_ && control_.state(member) != ControlState::kOpen) lose(member);
  };
  std::vector<Rank> ranks;
  std::vector<LinkSockets> sockets;
  std::atomic<int64_t> num_refused{0};
  run_or_fail([&] {
    const FileDescriptor listener = listen_on(common_->interface.address, 0);
    const std::vector<Invitation> invitations = invite(members, name, port_of(listener), limit);
    options.context.assign(invitations.front().nonce.begin(), invitations.front().nonce.end());
    for (size_t i = 0; i < members.size(); ++i) {
      ranks.push_back(ranks_[static_cast<size_t>(members[i])]);
      options.ranks.push_back({who_is(i, ranks[i]), ranks[i].address, invitations[i].port});
    }
    try {
      sockets = connect_ranks(listener, options, num_refused);
    } catch (const CommError& failure) {
      std::this_thread::sleep_for(kSecondLook);
      options.look();  // a member that died is the cause
      throw CommError(concat(who(rank_), " cannot join group '", name, "': ", failure.what()));
    }
  });
  return std::make_unique<SocketEndpoint>(new_rank, std::move(ranks), name, common_, std::move(sockets),
                                          num_refused.load());
}

std::vector<Invitation> SocketEndpoint::invite(const std::vector<int>& members, const std::string& name,
                                               int port, milliseconds limit) {
  std::vector<Invitation> invitations(members.size());
  Invitation own{.group = sha256(concat(name, " of ", ranks_text(members))), .port = port};
  std::ranges::copy(make_nonce(), own.nonce.begin());
  std::vector<Message> messages;
  for (size_t i = 0; i < members.size(); ++i) {
    invitations[i] = own;
    if (members[i] == rank_) continue;
    messages.push_back({Message::Kind::kSend, members[i], &own, sizeof(own)});
    messages.push_back({Message::Kind::kReceive, members[i], &invitations[i], sizeof(own)});
  }
  exchange(messages, limit);
  for (size_t i = 0; i < members.size(); ++i)
    require<CollectiveMismatch>(invitations[i].group == own.group, who(rank_), " and ", who(members[i]),
                                " were given different names or members for a new group; here it is '", name,
                                "' of ", ranks_text(members));
  return invitations;
}

// Makes the links of a new group. A rank that cannot says so in the store, for those that wait for it.
std::vector<LinkSockets> connect_world(Store& store, const std::string& key, const FileDescriptor& listener,
                                       ConnectOptions& options, std::atomic<int64_t>& num_refused) {
  const std::string self = options.ranks[static_cast<size_t>(options.rank)].who;
  const std::string failure_key = key + "/failure";
  options.look = [&] {
    const auto failure = store.try_get(failure_key);
    require<CommError>(!failure, "group '", options.group, "': ", failure.value_or(""));
  };
  try {
    return connect_ranks(listener, options, num_refused);
  } catch (const CommError& failure) {
    // Whoever comes second suffers from the first.
    if (store.add(key + "/failures", 1) > 1)
      throw CommError(concat("group '", options.group, "': ", store.get(failure_key, kTimeToClose)));
    store.set(failure_key, concat(self, ": ", failure.what()));
    throw;
  }
}

}  // namespace

std::unique_ptr<TcpEndpoint> make_tcp_endpoint(Store& store, int rank, int size,
                                               const TcpEndpointOptions& options) {
  require(size >= 1 && rank >= 0 && rank < size, "group '", options.name, "': rank is ", rank, " of ", size,
          "; expected 0 to size - 1");
  require(options.peer_timeout >= std::chrono::seconds(1), "group '", options.name, "': peer_timeout is ",
          options.peer_timeout.count(), " ms; expected at least 1000");
  const Deadline deadline = Clock::now() + options.init_limit;
  // The n-th group of this name; each rank counts for itself, so a key is never used twice.
  const std::string base = concat("tcp/", options.name, "/");
  const std::string key = concat(base, store.add(concat(base, "rank", rank), 1));

  auto common = std::make_shared<Common>();
  common->secret = options.secret;
  common->peer_timeout = options.peer_timeout;
  common->interface = choose_interface(options.interface, options.store_host);
  const FileDescriptor listener = listen_on(common->interface.address, 0);
  const std::vector<RankRecord> records = rendezvous(
      store, {.rank = rank,
              .world_size = size,
              .fields = {{"address", common->interface.address}, {"port", std::to_string(port_of(listener))}},
              .limit = options.init_limit,
              .name = key});
  std::vector<Rank> ranks;
  ConnectOptions connect{.rank = rank,
                         .group = options.name,
                         .context = key,
                         .secret = options.secret,
                         .interface = common->interface,
                         .deadline = deadline};
  int num_local = 0;
  for (const RankRecord& record : records) {
    ranks.push_back({record.host, record.pid, record.fields.at("address")});
    connect.ranks.push_back({who_is(connect.ranks.size(), ranks.back()), ranks.back().address,
                             std::stoi(record.fields.at("port"))});
    if (record.host == host_name()) ++num_local;
  }
  common->spins = num_local <= count_cpus(usable_cpus());
  std::atomic<int64_t> num_refused{0};
  std::vector<LinkSockets> sockets = connect_world(store, key, listener, connect, num_refused);
  return std::make_unique<SocketEndpoint>(rank, std::move(ranks), options.name, std::move(common),
                                          std::move(sockets), num_refused.load());
}

}  // namespace polyreme
