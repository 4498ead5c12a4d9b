// Groups of real processes over TCP on the loopback interface, and over shared memory and TCP, with hosts
// that are played by groups of processes. No time is asserted but the bound after which a test counts as
// hung.

#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "comm/conformance.h"
#include "comm/factory.h"
#include "comm/mp/endpoint_processes.h"
#include "comm/rank_threads.h"

namespace polyreme {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

CommOptions comm_options(int64_t chunk_bytes, milliseconds timeout = seconds(60)) {
  CommOptions options;
  options.chunk_bytes = chunk_bytes;
  options.timeout = timeout;
  return options;
}

// What makes a rank's communicator; a name for the test, and the number of ranks.
struct Kind {
  std::string name;
  int size;
  bool has_hosts = false;  // two of them, of equal size

  std::unique_ptr<Communicator> make(RankProcesses& self, Store& store, int rank,
                                     const CommOptions& options) const {
    if (!has_hosts) return make_tcp_communicator(store, rank, size, tcp_options(), options);
    std::vector<int> hosts;
    for (int r = 0; r < size; ++r) hosts.push_back(r / (size / 2));
    return make_hierarchical_communicator(store, rank, hosts, self.job_id(), tcp_options(), options);
  }
};

using GroupMain = std::function<void(Communicator&, RankProcesses&)>;

std::vector<RankResult> run(const Kind& kind, const CommOptions& options, const GroupMain& rank_main,
                            const std::function<void(RankProcesses&)>& meanwhile = {}) {
  RankProcesses ranks(kind.size, [&](RankProcesses& self, Store& store, int rank) {
    rank_main(*kind.make(self, store, rank, options), self);
  });
  if (meanwhile) meanwhile(ranks);
  // The whole matrix takes 30 s on a machine of its own.
  const seconds hung(std::getenv("POLYREME_TEST_FULL") == nullptr ? 60 : 300);
  std::vector<RankResult> results = ranks.wait(hung);
  EXPECT_EQ(segments_left(ranks.job_id()), std::vector<std::string>());
  return results;
}

class MessageProcesses : public ::testing::TestWithParam<Kind> {};

TEST_P(MessageProcesses, Conforms) {
  expect_ok(run(GetParam(), comm_options(conformance::kSmallChunk), [](Communicator& comm, RankProcesses&) {
    const auto device = make_cpu_device({});
    conformance::check_everything(comm, *device);
    if (GetParam().has_hosts) conformance::check_shared_memory(comm, *device);
  }));
}

class LargeMessageProcesses : public MessageProcesses {};

TEST_P(LargeMessageProcesses, ConformAndSplit) {
  expect_ok(run(GetParam(), comm_options(conformance::kLargeChunk), [](Communicator& comm, RankProcesses&) {
    const auto device = make_cpu_device({});
    conformance::check_large(comm, *device);
    conformance::check_streams_and_subgroups(comm, *device);
  }));
}

std::string kind_name(const ::testing::TestParamInfo<Kind>& info) {
  return concat(info.param.name, info.param.size);
}
INSTANTIATE_TEST_SUITE_P(Kinds, MessageProcesses,
                         ::testing::Values(Kind{"tcp", 2}, Kind{"tcp", 3}, Kind{"tcp", 4}, Kind{"tcp", 8},
                                           Kind{"hosts", 4, true}),
                         kind_name);
INSTANTIATE_TEST_SUITE_P(Kinds, LargeMessageProcesses,
                         ::testing::Values(Kind{"tcp", 2}, Kind{"tcp", 4}, Kind{"hosts", 8, true}),
                         kind_name);

class MessageProcessFault : public ::testing::TestWithParam<Kind> {};

TEST_P(MessageProcessFault, KilledRanksAreNamedByAllOthers) {
  for (const int victim : {0, 2}) {
    const auto results = run(
        GetParam(), comm_options(4096),
        [](Communicator& comm, RankProcesses& self) {
          const auto device = make_cpu_device({});
          const auto stream = device->create_stream("test");
          const Tensor data = conformance::to_device(*device, std::vector<float>(1 << 16, 1.0F));
          for (int i = 0;; ++i) {
            comm.all_reduce(data, ReduceOp::kMax, *stream)->wait();
            if (i == 3) self.ready();
          }
        },
        [&](RankProcesses& ranks) {
          for (int r = 0; r < GetParam().size; ++r) ranks.wait_until_ready(r);
          ranks.kill(victim, SIGKILL);
        });
    for (int r = 0; r < GetParam().size; ++r) {
      if (r == victim) continue;
      const RankResult& survivor = results[static_cast<size_t>(r)];
      expect_outcome(survivor.outcome, "PeerLost",
                     {"group 'world'", "all_reduce float32[65536] max",
                      concat("pid ", results[static_cast<size_t>(victim)].pid, ")")});
      std::printf("rank %d ended %d ms later\n", r, static_cast<int>(survivor.elapsed.count()));
    }
  }
}

TEST_P(MessageProcessFault, MismatchAcrossProcesses) {
  const auto results = run(GetParam(), comm_options(4096), [](Communicator& comm, RankProcesses&) {
    const auto device = make_cpu_device({});
    const auto stream = device->create_stream("test");
    const Tensor data = conformance::to_device(*device, std::vector<float>(5000, 1.0F));
    const auto work = comm.rank() == 1 ? comm.broadcast(data, 0, *stream)
                                       : comm.all_reduce(data.slice(0, 0, 4), ReduceOp::kSum, *stream);
    work->wait();
  });
  for (const RankResult& result : results)
    expect_outcome(result.outcome, "CollectiveMismatch",
                   {"rank 1: broadcast float32[5000] root 0; ranks 0, 2, 3: all_reduce float32[4] sum"});
}

TEST_P(MessageProcessFault, AbortCarriesTheCauseAndAStrangerIsATimeout) {
  const auto aborted = run(GetParam(), comm_options(4096), [](Communicator& comm, RankProcesses&) {
    comm.barrier(seconds(60));
    if (comm.rank() == 1) comm.abort("ValueError: boom");
    comm.barrier(seconds(60));
  });
  for (const RankResult& result : aborted)
    expect_outcome(result.outcome, "PeerLost", {"rank 1 (host ", "ValueError: boom"});

  const auto late = run(GetParam(), comm_options(4096), [](Communicator& comm, RankProcesses&) {
    comm.barrier(seconds(60));
    if (comm.rank() == 3) return std::this_thread::sleep_for(milliseconds(1500));
    comm.barrier(milliseconds(300));
  });
  for (const int r : {0, 1, 2})
    expect_outcome(late[static_cast<size_t>(r)].outcome, "Timeout",
                   {"barrier", "0.3 s", concat("pid ", late[3].pid), "rank 3 did not come to this call"});
}

INSTANTIATE_TEST_SUITE_P(Kinds, MessageProcessFault,
                         ::testing::Values(Kind{"tcp", 4}, Kind{"hosts", 4, true}), kind_name);

}  // namespace
}  // namespace polyreme
