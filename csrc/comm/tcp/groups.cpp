// How groups come about: the world through a store, subgroups through their parent.

#include <algorithm>
#include <thread>

#include "comm/collective.h"
#include "comm/net/bytes.h"
#include "comm/net/handshake.h"
#include "comm/rendezvous.h"
#include "comm/shared_memory/process.h"
#include "comm/tcp/socket_endpoint.h"

namespace polyreme {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// How long whatever ended a member has to be noticed as such.
constexpr milliseconds kTimeToNotice{20};
// How long the failure of another rank may take to reach the store.
constexpr milliseconds kTimeToTell{1000};

// Where a member listens, as the members tell each other.
struct SocketEndpoint::Invitation {
  std::array<char, kNonceBytes> nonce{};
  Digest group{};  // of its name and members
  int32_t port = 0;
};

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
      if (member != rank_ && control_.state(member) != ControlLinks::State::kOpen) lose(member);
  };
  std::vector<TcpRank> ranks;
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
      std::this_thread::sleep_for(kTimeToNotice);
      options.look();  // a member that died is the cause
      throw CommError(concat(who(rank_), " cannot join group '", name, "': ", failure.what()));
    }
  });
  return std::make_unique<SocketEndpoint>(new_rank, std::move(ranks), name, common_, std::move(sockets),
                                          num_refused.load());
}

std::vector<SocketEndpoint::Invitation> SocketEndpoint::invite(const std::vector<int>& members,
                                                               const std::string& name, int port,
                                                               milliseconds limit) {
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

namespace {

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
      throw CommError(concat("group '", options.group, "': ", store.get(failure_key, kTimeToTell)));
    store.set(failure_key, concat(self, ": ", failure.what()));
    throw;
  }
}

// Where a rank listens, as it wrote into the store.
PeerAddress address_of(const RankRecord& record) {
  const std::string who =
      who_is(static_cast<size_t>(record.rank), {record.host, record.pid, "", record.rank});
  const auto address = record.fields.find("address"), port = record.fields.find("port");
  const int64_t number = port == record.fields.end() ? 0 : parse_number(port->second).value_or(0);
  require<CommError>(address != record.fields.end() && number >= 1 && number <= 65535, who,
                     " does not say where it listens; install the same polyreme on all ranks");
  return {who, address->second, static_cast<int>(number)};
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

  auto common = std::make_shared<TcpGroup>();
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
  std::vector<TcpRank> ranks;
  ConnectOptions connect{.rank = rank,
                         .group = options.name,
                         .context = key,
                         .secret = options.secret,
                         .interface = common->interface,
                         .deadline = deadline};
  int num_local = 0;
  for (const RankRecord& record : records) {
    connect.ranks.push_back(address_of(record));
    ranks.push_back({record.host, record.pid, connect.ranks.back().address, record.rank});
    if (record.host == host_name()) ++num_local;
  }
  common->spins = num_local <= count_cpus(usable_cpus());
  std::atomic<int64_t> num_refused{0};
  std::vector<LinkSockets> sockets = connect_world(store, key, listener, connect, num_refused);
  return std::make_unique<SocketEndpoint>(rank, std::move(ranks), options.name, std::move(common),
                                          std::move(sockets), num_refused.load());
}

}  // namespace polyreme
