// Endpoints over TCP as the ranks of forked processes, for the tests of tcp_*_test.cpp.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/mp/rank_processes.h"
#include "comm/tcp/endpoint.h"

namespace polyreme {

inline constexpr std::chrono::seconds kHung{30};  // after this long a test counts as hung

inline TcpEndpointOptions tcp_options() {
  TcpEndpointOptions options;
  options.secret = "hunter2";
  options.init_limit = std::chrono::seconds(10);
  options.peer_timeout = std::chrono::seconds(3);
  return options;
}

using EndpointMain = std::function<void(TcpEndpoint&, RankProcesses&)>;

// `rank_main` on every rank; `meanwhile` in the test.
inline std::vector<RankResult> run_endpoints(int size, const EndpointMain& rank_main,
                                             const std::function<void(RankProcesses&)>& meanwhile = {},
                                             const TcpEndpointOptions& options = tcp_options()) {
  RankProcesses ranks(size, [&](RankProcesses& self, Store& store, int rank) {
    const auto endpoint = make_tcp_endpoint(store, rank, size, options);
    rank_main(*endpoint, self);
  });
  if (meanwhile) meanwhile(ranks);
  return ranks.wait(kHung);
}

inline Message send_to(int peer, const void* data, int64_t num_bytes) {
  return {Message::Kind::kSend, peer, const_cast<void*>(data), num_bytes};
}
inline Message receive_from(int peer, void* data, int64_t num_bytes) {
  return {Message::Kind::kReceive, peer, data, num_bytes};
}

inline void expect_ok(const std::vector<RankResult>& results) {
  for (const RankResult& result : results) EXPECT_EQ(result.outcome, "ok");
}

inline void expect_outcome(const std::string& outcome, const std::string& type,
                           const std::vector<std::string>& parts) {
  EXPECT_TRUE(outcome.starts_with(type)) << outcome;
  for (const std::string& part : parts)
    EXPECT_NE(outcome.find(part), std::string::npos) << "no '" << part << "' in " << outcome;
}

}  // namespace polyreme
