// Links over TCP whose ranks die, disagree or stay away, and whose network lies. No time is asserted but
// the bound after which a test counts as hung; the times of deaths are printed.

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <thread>

#include "comm/mp/endpoint_processes.h"
#include "comm/net/handshake.h"
#include "comm/shared_memory/process.h"
#include "comm/tcp/wire.h"

namespace polyreme {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<char>;

constexpr milliseconds kLimit{20'000};

// With all other ranks at once.
void exchange_with_all(Endpoint& endpoint, int64_t num_bytes, milliseconds limit = kLimit) {
  const auto total = static_cast<size_t>(num_bytes * endpoint.size());
  const Bytes sent(total, 's');
  Bytes received(total);
  std::vector<Message> messages;
  for (int peer = 0; peer < endpoint.size(); ++peer) {
    if (peer == endpoint.rank()) continue;
    messages.push_back(send_to(peer, sent.data() + peer * num_bytes, num_bytes));
    messages.push_back(receive_from(peer, received.data() + peer * num_bytes, num_bytes));
  }
  endpoint.exchange(messages, limit);
}

void exchange_forever(Endpoint& endpoint, RankProcesses& self) {
  for (int i = 0;; ++i) {
    exchange_with_all(endpoint, i % 2 == 0 ? 1 << 20 : 100);
    if (i == 3) self.ready();
  }
}

// A store that looks at, and may change, what this rank tells the others of itself.
class InterceptedStore : public Store {
 public:
  using Intercept = std::function<std::string(const std::string& key, std::string value)>;
  InterceptedStore(Store& store, Intercept intercept) : store_(store), intercept_(std::move(intercept)) {}
  void set(const std::string& key, const std::string& value) override {
    store_.set(key, intercept_(key, value));
  }
  std::string get(const std::string& key, milliseconds limit) override { return store_.get(key, limit); }
  std::optional<std::string> try_get(const std::string& key) override { return store_.try_get(key); }
  int64_t add(const std::string& key, int64_t amount) override { return store_.add(key, amount); }

 private:
  Store& store_;
  Intercept intercept_;
};

// Where the port stands in the record of a rank; npos elsewhere.
size_t port_position(const std::string& key, const std::string& value) {
  const std::string label = "4:port5:";
  const size_t at = key.find("/rank/") == std::string::npos ? std::string::npos : value.find(label);
  return at == std::string::npos ? at : at + label.size();
}

// The TCP sockets of this process that satisfy `wanted`.
std::vector<int> own_sockets(const std::function<bool(int)>& wanted) {
  std::vector<int> found;
  for (int fd = 0; fd < 1024; ++fd) {
    int type = 0;
    socklen_t length = sizeof(type);
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_STREAM && wanted(fd))
      found.push_back(fd);
  }
  return found;
}

int socket_option(int fd, int level, int option) {
  int value = -1;
  socklen_t length = sizeof(value);
  getsockopt(fd, level, option, &value, &length);
  return value;
}

bool listens(int fd) { return socket_option(fd, SOL_SOCKET, SO_ACCEPTCONN) == 1; }

TEST(TcpFault, F17_KilledRanksAreNamedByAllOthersInTheSameWords) {
  for (const std::vector<int>& victims : {std::vector<int>{2}, std::vector<int>{0}, std::vector<int>{1, 3}}) {
    const auto results = run_endpoints(4, exchange_forever, [&](RankProcesses& ranks) {
      for (int r = 0; r < 4; ++r) ranks.wait_until_ready(r);
      for (const int v : victims) ranks.kill(v, SIGKILL);
    });
    std::string expected;
    for (const int v : victims)
      expected += concat(expected.empty() ? "lost " : "; ", "rank ", v, " (host ", host_name(), ", pid ",
                         results[static_cast<size_t>(v)].pid, "): it closed the connection");
    for (int r = 0; r < 4; ++r) {
      if (std::find(victims.begin(), victims.end(), r) != victims.end()) continue;
      EXPECT_EQ(results[static_cast<size_t>(r)].outcome, "PeerLost: " + expected);
      std::printf("rank %d ended %d ms later\n", r,
                  static_cast<int>(results[static_cast<size_t>(r)].elapsed.count()));
    }
  }
}

TEST(TcpFault, ADeathIsToldToThoseThatDoNotNeedTheDead) {
  const auto results = run_endpoints(4, [](TcpEndpoint& endpoint, RankProcesses&) {
    Bytes bytes(8);
    const int rank = endpoint.rank();
    if (rank == 3) raise(SIGKILL);
    endpoint.exchange(std::vector{receive_from(rank + 1, bytes.data(), 8)}, kLimit);  // 0 of 1 of 2 of 3
  });
  for (const int r : {0, 1, 2})
    expect_outcome(results[static_cast<size_t>(r)].outcome, "PeerLost: lost rank 3 (host ",
                   {concat("pid ", results[3].pid, "): it closed the connection")});
}

TEST(TcpFault, ARankThatLeavesIsNamedByThoseThatNeedItAndMissedByNobodyElse) {
  const auto results = run_endpoints(3, [](TcpEndpoint& endpoint, RankProcesses&) {
    Bytes bytes(1000);
    if (endpoint.rank() == 2) return endpoint.exchange(std::vector{send_to(0, bytes.data(), 1000)}, kLimit);
    std::this_thread::sleep_for(milliseconds(200));
    if (endpoint.rank() == 0)  // what it sent before it left still arrives
      endpoint.exchange(std::vector{receive_from(2, bytes.data(), 1000)}, kLimit);
    for (int i = 0; i < 100; ++i)
      endpoint.exchange(std::vector{send_to(1 - endpoint.rank(), bytes.data(), 9),
                                    receive_from(1 - endpoint.rank(), bytes.data() + 9, 9)},
                        kLimit);
    endpoint.exchange(std::vector{receive_from(2, bytes.data(), 1000)}, kLimit);
  });
  EXPECT_EQ(results[2].outcome, "ok");
  for (const int r : {0, 1})
    expect_outcome(results[static_cast<size_t>(r)].outcome, "PeerLost: lost rank 2 (host ",
                   {concat("pid ", results[2].pid, "): it left the group")});
}

TEST(TcpFault, FailReachesARankInsideAnExchangeAndAllOthers) {
  for (const FailureKind kind : {FailureKind::kPeerLost, FailureKind::kTimeout, FailureKind::kMismatch}) {
    const auto results = run_endpoints(4, [&](TcpEndpoint& endpoint, RankProcesses&) {
      std::thread other;
      if (endpoint.rank() == 1)
        other = std::thread([&] {
          std::this_thread::sleep_for(milliseconds(100));
          endpoint.fail(kind, "ValueError: boom");
          endpoint.fail(FailureKind::kTimeout, "something that came of it");
        });
      // Only rank 1 misses nothing but itself: 0, 2 and 3 are stuck among each other as well.
      Bytes bytes(8);
      const std::string first = [&] {
        try {
          endpoint.exchange(std::vector{receive_from((endpoint.rank() + 1) % 4, bytes.data(), 8)}, kLimit);
        } catch (const CommError& failure) {
          return std::string(failure.what());
        }
        return std::string("nothing");
      }();
      if (other.joinable()) other.join();
      require<CommError>(first == "ValueError: boom", "first: ", first);
      exchange_with_all(endpoint, 1);  // throws it again
    });
    const std::string type = kind == FailureKind::kPeerLost  ? "PeerLost"
                             : kind == FailureKind::kTimeout ? "Timeout"
                                                             : "CollectiveMismatch";
    for (const RankResult& result : results) EXPECT_EQ(result.outcome, type + ": ValueError: boom");
  }
}

// Alive, but in no exchange for more than a moment; until it is told of a failure.
[[noreturn]] void stay_away(Endpoint& endpoint) {
  while (true) {
    std::this_thread::sleep_for(milliseconds(20));
    endpoint.exchange({}, kLimit);
  }
}

TEST(TcpFault, ATimeoutNamesThePeersAndTheMissingBytes) {
  const auto results = run_endpoints(3, [](TcpEndpoint& endpoint, RankProcesses&) {
    if (endpoint.rank() == 2) stay_away(endpoint);
    exchange_with_all(endpoint, 24 << 20, milliseconds(500));
  });
  const std::string culprit = concat("rank 2 (host ", host_name(), ", pid ", results[2].pid, ")");
  for (const int r : {0, 1})
    expect_outcome(
        results[static_cast<size_t>(r)].outcome, "Timeout: waited 0.5 s for " + culprit + "; ",
        {"no byte moved on rank ", concat(culprit, " has not sent ", 24 << 20, " bytes and has not taken ")});
}

// 0 misses 1, 1 misses 2, 2 misses 3, and 3 stays away; 4 is busy elsewhere and waits for nobody.
// 0 misses 1, 1 misses 2, 2 misses 3, which stays away; 4 is busy and missed by nobody.
TEST(TcpFault, AChainOfWaitingRanksNamesItsEnd) {
  const auto results = run_endpoints(5, [](TcpEndpoint& endpoint, RankProcesses&) {
    Bytes bytes(8);
    const int rank = endpoint.rank();
    if (rank >= 3) stay_away(endpoint);
    std::this_thread::sleep_for(milliseconds(50 * rank));  // the farthest is late first
    endpoint.exchange(std::vector{receive_from(rank + 1, bytes.data(), 8)}, milliseconds(700));
  });
  for (const int r : {0, 1, 2, 3, 4})
    expect_outcome(
        results[static_cast<size_t>(r)].outcome, "Timeout: waited 0.7 s for rank 3 (host ",
        {concat("for ", "rank 3 (host ", host_name(), ", pid ", results[3].pid, "); no byte moved on rank "),
         "has not sent 8 bytes"});
}

TEST(TcpFault, ACircleOfWaitingRanksIsSaidToBeOne) {
  const auto results = run_endpoints(3, [](TcpEndpoint& endpoint, RankProcesses&) {
    Bytes bytes(8);
    endpoint.exchange(std::vector{receive_from((endpoint.rank() + 1) % 3, bytes.data(), 8)},
                      milliseconds(500));
  });
  for (const RankResult& result : results)
    expect_outcome(result.outcome, "Timeout: waited 0.5 s for each other", {"has not sent 8 bytes"});
}

TEST(TcpFault, AShortStopIsNoFailure) {
  const auto results = run_endpoints(
      3,
      [](TcpEndpoint& endpoint, RankProcesses& self) {
        self.ready();
        for (int i = 0; i < 1000; ++i) {
          exchange_with_all(endpoint, 1000, seconds(5));
          std::this_thread::sleep_for(std::chrono::microseconds(500));
        }
      },
      [](RankProcesses& ranks) {
        ranks.wait_until_ready(1);
        ranks.kill(1, SIGSTOP);
        std::this_thread::sleep_for(milliseconds(400));
        ranks.kill(1, SIGCONT);
      });
  expect_ok(results);
}

// Longer than the peer timeout: its host answers, and it computes.
TEST(TcpFault, APeerThatTakesItsTimeToReceiveIsNoFailure) {
  TcpEndpointOptions options = tcp_options();
  options.peer_timeout = seconds(1);
  expect_ok(run_endpoints(
      2,
      [](TcpEndpoint& endpoint, RankProcesses&) {
        if (endpoint.rank() == 1) std::this_thread::sleep_for(seconds(4));
        exchange_with_all(endpoint, 64 << 20);
      },
      {}, options));
}

TEST(TcpFault, UnequalLengthsBreakBothBeforeAByteIsWritten) {
  const auto results = run_endpoints(2, [](TcpEndpoint& endpoint, RankProcesses&) {
    Bytes bytes(300'000, '?');
    for (int i = 0; i < 3; ++i) exchange_with_all(endpoint, 7);
    try {
      if (endpoint.rank() == 0) {
        endpoint.exchange(std::vector{send_to(1, bytes.data(), 8), receive_from(1, bytes.data(), 1)}, kLimit);
      } else {
        endpoint.exchange(std::vector{receive_from(0, bytes.data(), 300'000)}, kLimit);
      }
    } catch (const CollectiveMismatch&) {
      const bool untouched = std::all_of(bytes.begin(), bytes.end(), [](char c) { return c == '?'; });
      if (untouched) throw;
    }
  });
  for (const RankResult& result : results)
    expect_outcome(result.outcome, "CollectiveMismatch: rank 0 (host ",
                   {"sent 8 bytes as its message 4 to rank 1 (host ", "which expects 300000 bytes"});
}

// Between rank 0, which publishes the proxy's port, and those that dial it. `change` may alter the
// bytes that flow to rank 0, of which `count` have come on the same connection before.
class Proxy {
 public:
  using Change = std::function<void(char* bytes, size_t num_bytes, int64_t count)>;
  Proxy(int target_port, Change change) : target_port_(target_port), change_(std::move(change)) {
    std::thread([this] { accept_all(); }).detach();  // until the process ends
  }
  int port() const { return port_of(listener_); }

 private:
  void accept_all() {
    while (true) {
      pollfd entry{listener_.get(), POLLIN, 0};
      poll(&entry, 1, -1);
      const int near = accept(listener_.get(), nullptr, nullptr);
      if (near < 0) continue;
      auto* far = new FileDescriptor(dial("127.0.0.1", target_port_, {.limit = seconds(5)}));
      std::thread([this, near, far] { pump(near, far->get(), true); }).detach();
      std::thread([this, near, far] { pump(far->get(), near, false); }).detach();
    }
  }
  void pump(int from, int to, bool changes) {
    fcntl(from, F_SETFL, 0);
    Bytes buffer(1 << 16);
    int64_t count = 0;
    for (ssize_t n = 0; (n = recv(from, buffer.data(), buffer.size(), 0)) > 0; count += n) {
      if (changes) change_(buffer.data(), static_cast<size_t>(n), count);
      for (ssize_t done = 0; done < n;) {
        const ssize_t sent = send(to, buffer.data() + done, static_cast<size_t>(n - done), MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) break;
        done += std::max<ssize_t>(sent, 0);
      }
    }
    shutdown(to, SHUT_RDWR);
  }

  const FileDescriptor listener_ = listen_on("127.0.0.1", 0);
  const int target_port_;
  const Change change_;
};

std::vector<RankResult> run_through_proxy(int size, const Proxy::Change& change,
                                          const EndpointMain& rank_main) {
  RankProcesses ranks(size, [&](RankProcesses& self, Store& store, int rank) {
    InterceptedStore intercepted(store, [&](const std::string& key, std::string value) {
      const size_t at = port_position(key, value);
      if (rank == 0 && at != std::string::npos) {
        auto* proxy = new Proxy(std::stoi(value.substr(at, 5)), change);
        value.replace(at, 5, std::to_string(proxy->port()));
      }
      return value;
    });
    // The proxy lives in process 0, which has to stay until all have seen what it passed on.
    const auto stay = [&] {
      if (store.add("ended", 1) == size) store.set("all ended", "");
      if (rank == 0) store.get("all ended", seconds(20));
    };
    const auto endpoint = make_tcp_endpoint(intercepted, rank, size, tcp_options());
    try {
      rank_main(*endpoint, self);
    } catch (const CommError&) {
      stay();
      throw;
    }
    stay();
  });
  return ranks.wait(kHung);
}

TEST(TcpFault, F51_AFlippedBitIsFoundAndTheLinkNamed) {
  const auto flip_at = [](int64_t wanted) {
    return [wanted](char* bytes, size_t num_bytes, int64_t count) {
      if (count <= wanted && wanted < count + static_cast<int64_t>(num_bytes))
        bytes[wanted - count] = static_cast<char>(bytes[wanted - count] ^ 0x10);
    };
  };
  const auto exchange_once = [](TcpEndpoint& endpoint, RankProcesses&) {
    exchange_with_all(endpoint, 1 << 20);
    exchange_with_all(endpoint, 1 << 20);
    exchange_with_all(endpoint, 1);  // rank 0 may have sent all of its part before it failed
  };
  expect_ok(run_through_proxy(3, flip_at(int64_t{1} << 40), exchange_once));
  // In a block, and in the header of the second message.
  const int64_t greeting = kHelloBytes + tcp_wire::kClaimBytes + kProofBytes;
  const int64_t message = tcp_wire::wire_bytes(1 << 20);
  for (const auto& [at, part] : {std::pair{greeting + 700'000, "payload of message 1"},
                                 std::pair{greeting + message + 9, "header of message 2"}}) {
    for (const RankResult& result : run_through_proxy(3, flip_at(at), exchange_once))
      expect_outcome(result.outcome, "PeerLost: data were changed on the way from rank ",
                     {" to rank 0 (host ", concat("the ", part, " does not fit its checksum")});
  }
}

TEST(TcpFault, F10_StrangersAtThePortAreRefusedAndCounted) {
  RankProcesses ranks(3, [](RankProcesses&, Store& store, int rank) {
    std::vector<FileDescriptor> strangers;
    InterceptedStore intercepted(store, [&](const std::string& key, const std::string& value) {
      const size_t at = port_position(key, value);
      if (at == std::string::npos) return value;
      const int port = std::stoi(value.substr(at, 5));
      const auto hello = encode_hello(tcp_wire::kProtocol, std::string(kNonceBytes, 'n'));
      const auto other_version = encode_hello({"PLYPEERS", 9, 0, "", ""}, std::string(kNonceBytes, 'n'));
      const std::string wrong_proof(tcp_wire::kClaimBytes + kProofBytes, 'p');
      for (const std::string& noise :
           {std::string(), std::string("GET / HTTP/1.1\r\n"), std::string(100'000, '\xff'),
            hello.substr(0, 9), hello, hello + wrong_proof, other_version,
            encode_hello({"PLYSTORE", 1, 0, "", ""}, hello)}) {
        strangers.push_back(dial("127.0.0.1", port, {.limit = seconds(5)}));
        send_all(strangers.back(), noise, Clock::now() + milliseconds(10));
      }
      return value;
    });
    const auto endpoint = make_tcp_endpoint(intercepted, rank, 3, tcp_options());
    exchange_with_all(*endpoint, 100'000);
    if (rank < 2) require<CommError>(endpoint->num_refused() >= 5, "refused ", endpoint->num_refused());
  });
  expect_ok(ranks.wait(kHung));
}

TEST(TcpFault, F09_ARankWithAnotherSecretIsRefusedAndTheOthersLearnIt) {
  RankProcesses ranks(3, [](RankProcesses&, Store& store, int rank) {
    TcpEndpointOptions options = tcp_options();
    if (rank == 1) options.secret = "hunter3";
    make_tcp_endpoint(store, rank, 3, options);
  });
  const auto results = ranks.wait(kHung);
  for (const RankResult& result : results) {
    expect_outcome(result.outcome, "CommError", {"secret"});
    EXPECT_EQ(result.outcome.find("hunter"), std::string::npos) << "the message shows a secret";
    EXPECT_LT(result.elapsed, seconds(8)) << "waited for the end of the start-up limit";
  }
  expect_outcome(results[1].outcome, "CommError: rank 0 (host ", {"POLYREME_SECRET"});
}

// Ends a rank once all have met, before it has made its links.
TEST(TcpFault, ARankThatDiesWhileTheLinksAreMade) {
  for (const int victim : {0, 2}) {
    RankProcesses ranks(3, [&](RankProcesses&, Store& store, int rank) {
      class DyingStore : public InterceptedStore {
       public:
        using InterceptedStore::InterceptedStore;
        std::string get(const std::string& key, milliseconds limit) override {
          std::string value = InterceptedStore::get(key, limit);
          if (key.ends_with("/rank/2")) raise(SIGKILL);
          return value;
        }
      } dying(store, [](const std::string&, std::string value) { return value; });
      TcpEndpointOptions options = tcp_options();
      options.init_limit = seconds(2);
      // The store lives in process 0, so the one that dies as rank 0 is another.
      const int role = victim == 0 ? (rank + 2) % 3 : rank;
      make_tcp_endpoint(role == victim ? static_cast<Store&>(dying) : store, role, 3, options);
    });
    const auto results = ranks.wait(kHung);
    for (const RankResult& result : results) {
      if (result.outcome.empty()) continue;  // the victim
      expect_outcome(result.outcome, "", {concat("rank ", victim, " (host "), "127.0.0.1", "(interface lo)"});
    }
  }
}

TEST(TcpFault, F18_ARankThatDiesWhileASubgroupIsMade) {
  const auto results = run_endpoints(4, [](TcpEndpoint& endpoint, RankProcesses&) {
    if (endpoint.rank() == 3) raise(SIGKILL);
    endpoint.make_subgroup({3, 1, 0, 2}, "sub", kLimit);
  });
  for (const int r : {0, 1, 2})
    expect_outcome(results[static_cast<size_t>(r)].outcome, "PeerLost: lost rank 3 (host ", {"closed"});
}

TEST(TcpFault, F40_SubgroupsOfWhichTheMembersDisagree) {
  const auto results = run_endpoints(2, [](TcpEndpoint& endpoint, RankProcesses&) {
    endpoint.make_subgroup({0, 1}, endpoint.rank() == 0 ? "a" : "b", kLimit);
  });
  for (const RankResult& result : results)
    expect_outcome(result.outcome, "CollectiveMismatch", {"different names or members"});
}

TEST(TcpFault, AForkedChildTakesNobodyOutAndMayNotTakePart) {
  expect_ok(run_endpoints(2, [](TcpEndpoint& endpoint, RankProcesses&) {
    const pid_t child = fork();
    if (child == 0) {
      endpoint.fail(FailureKind::kTimeout, "of the child");
      try {
        exchange_with_all(endpoint, 8);
      } catch (const InvalidArgument&) {
        endpoint.~TcpEndpoint();
        _exit(0);
      }
      _exit(1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    require<CommError>(status == 0, "the child ended with ", status);
    exchange_with_all(endpoint, 1 << 20);
  }));
}

TEST(TcpFault, NothingListensAfterwardsAndNoSocketSurvivesAnExec) {
  expect_ok(run_endpoints(3, [](TcpEndpoint& endpoint, RankProcesses&) {
    const auto group = endpoint.make_subgroup({0, 1, 2}, "sub", kLimit);
    require<CommError>(own_sockets([](int fd) { return (fcntl(fd, F_GETFD) & FD_CLOEXEC) == 0; }).empty(),
                       "a socket without close-on-exec");
    const size_t expected = endpoint.rank() == 0 ? 1 : 0;  // the store
    require<CommError>(own_sockets(listens).size() == expected, "a listening socket is left");
    exchange_with_all(*group, 3);
  }));
}

TEST(TcpFault, AnInterfaceThatIsNotThereIsRefusedWithThoseThatAre) {
  for (const char* wanted : {"192.0.2.7", "no-such-interface"}) {
    TcpEndpointOptions options = tcp_options();
    options.interface = wanted;
    const auto results = run_endpoints(
        1, [](TcpEndpoint&, RankProcesses&) {}, {}, options);
    expect_outcome(results[0].outcome, "CommError", {wanted});
  }
  for (const char* wanted : {"lo", "127.0.0.1", "localhost"}) {
    TcpEndpointOptions options = tcp_options();
    options.interface = wanted;
    expect_ok(run_endpoints(
        2, [](TcpEndpoint& endpoint, RankProcesses&) { exchange_with_all(endpoint, 5); }, {}, options));
  }
  TcpEndpointOptions options = tcp_options();
  options.store_host = "127.0.0.1";
  expect_ok(run_endpoints(
      2, [](TcpEndpoint& endpoint, RankProcesses&) { exchange_with_all(endpoint, 5); }, {}, options));
}

// Resets one connection of this process as `ss -K` does. False if the kernel or the tool cannot.
bool reset_from_outside(int fd) {
  sockaddr_in own{}, peer{};
  socklen_t length = sizeof(own);
  getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length);
  getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length);
  const std::string from = concat(":", ntohs(own.sin_port)), to = concat(":", ntohs(peer.sin_port));
  const pid_t child = fork();
  if (child == 0) {
    const int null = open("/dev/null", O_RDWR);
    dup2(null, 1);
    dup2(null, 2);
    execlp("ss", "ss", "-K", "sport", "=", from.c_str(), "dport", "=", to.c_str(), nullptr);
    _exit(1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  int error = 0;
  pollfd entry{fd, POLLIN, 0};
  length = sizeof(error);
  tcp_info info{};
  socklen_t info_length = sizeof(info);
  getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &info_length);
  poll(&entry, 1, 0);
  return status == 0 && info.tcpi_state == TCP_CLOSE;
}

TEST(TcpFault, F45_AConnectionThatIsResetMidwayIsNamedByItsEnds) {
  {
    const FileDescriptor listener = listen_on("127.0.0.1", 0);
    const FileDescriptor probe = dial("127.0.0.1", port_of(listener), {.limit = seconds(5)});
    if (!reset_from_outside(probe.get()))
      GTEST_SKIP() << "ss -K does nothing here: not root, no iproute2, or a kernel without INET_DIAG_DESTROY";
  }
  const auto results = run_endpoints(3, [](TcpEndpoint& endpoint, RankProcesses& self) {
    std::thread resetter;
    if (endpoint.rank() == 1)
      resetter = std::thread([&] {
        std::this_thread::sleep_for(milliseconds(200));
        // Data connections are those without a time limit of the kernel's.
        const std::vector<int> data = own_sockets(
            [](int fd) { return !listens(fd) && socket_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT) == 0; });
        if (data.size() == 2) reset_from_outside(data.front());
      });
    try {
      exchange_forever(endpoint, self);
    } catch (...) {
      if (resetter.joinable()) resetter.join();
      throw;
    }
  });
  for (const RankResult& result : results)
    expect_outcome(result.outcome, "PeerLost: the connection between rank ", {"rank 1 (host ", "broke: "});
  std::printf("%s\n", results[0].outcome.c_str());
}

}  // namespace
}  // namespace polyreme
