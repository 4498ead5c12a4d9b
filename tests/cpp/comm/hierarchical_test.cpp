// Groups over several hosts, played by groups of threads: shared memory inside a host, messages between them.

#include <gtest/gtest.h>

#include "comm/conformance.h"
#include "comm/hierarchical/hierarchical_transport.h"
#include "comm/message_threads.h"
#include "comm/shared_memory/shared_transport.h"

namespace polyreme {
namespace {

using conformance::to_device;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Outcomes = std::vector<std::string>;

// The shared-memory groups of the hosts, by rank. hosts[r]: where rank r is.
std::vector<std::unique_ptr<Transport>> make_host_groups(const std::vector<int>& hosts,
                                                         const MessageOptions& options) {
  std::map<int, std::vector<int>> ranks_of;
  for (size_t r = 0; r < hosts.size(); ++r) ranks_of[hosts[r]].push_back(static_cast<int>(r));
  std::vector<std::unique_ptr<Transport>> groups(hosts.size());
  for (const auto& [host, ranks] : ranks_of) {
    const int size = static_cast<int>(ranks.size());
    const std::shared_ptr<SharedMemorySource> source = make_heap_source();
    std::string name;
    const auto memory =
        source->create(static_cast<size_t>(SharedGroup::segment_bytes(size, options.chunk_bytes)), &name);
    SharedGroup::format(*memory, size, options.chunk_bytes);
    for (int i = 0; i < size; ++i) {
      auto group = std::make_shared<SharedGroup>(
          memory, i, size, options.chunk_bytes,
          SharedGroup::Options{concat("world (host ", host, ")"), options.timeout, true});
      groups[static_cast<size_t>(ranks[static_cast<size_t>(i)])] =
          std::make_unique<SharedTransport>(std::move(group), source, options.chunk_bytes);
    }
  }
  return groups;
}

Outcomes run(const std::vector<int>& hosts, const MessageOptions& options, const RankMain& rank_main,
             std::vector<std::unique_ptr<ThreadEndpoint>> endpoints) {
  auto groups = make_host_groups(hosts, options);
  std::vector<std::exception_ptr> errors(hosts.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < hosts.size(); ++r)
    threads.emplace_back([&, r] {
      try {
        const auto device = make_cpu_device({});
        auto flat = std::make_unique<MessageTransport>(std::move(endpoints[r]), options);
        CpuCommunicator comm(HierarchicalTransport::make(std::move(flat), std::move(groups[r]), hosts));
        comm.attach();
        rank_main(comm, *device);
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  Outcomes outcomes;
  for (const std::exception_ptr& error : errors) outcomes.push_back(outcome_of(error));
  return outcomes;
}

Outcomes run(const std::vector<int>& hosts, const MessageOptions& options, const RankMain& rank_main) {
  return run(hosts, options, rank_main, make_thread_endpoints(static_cast<int>(hosts.size())));
}

// Without max_direct_ranks nothing rides along: small data go through the levels, too.
MessageOptions small_chunks(milliseconds timeout = seconds(60)) {
  MessageOptions options = message_options(conformance::kSmallChunk, timeout);
  options.max_direct_ranks = 1;
  return options;
}

TEST(HostGrid, NeedsEqualBlocksOfAPowerOfTwo) {
  const auto grid = [](const std::vector<int>& hosts) { return host_grid(hosts); };
  ASSERT_TRUE(grid({4, 4, 1, 1, 7, 7}));
  EXPECT_EQ(grid({4, 4, 1, 1, 7, 7})->num_hosts, 3);
  EXPECT_EQ(grid({4, 4, 1, 1, 7, 7})->ranks_per_host, 2);
  EXPECT_FALSE(grid({0, 0, 0, 0}));        // one host
  EXPECT_FALSE(grid({0, 1, 2, 3}));        // one rank each
  EXPECT_FALSE(grid({0, 1, 0, 1}));        // dealt round robin
  EXPECT_FALSE(grid({0, 0, 0, 1, 1}));     // of different size
  EXPECT_FALSE(grid({0, 0, 0, 1, 1, 1}));  // three is no subtree
  EXPECT_FALSE(grid({0, 0, 1, 1, 0, 0, 1, 1}));
}

class HierarchicalGroup : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  void run_all_ok(const MessageOptions& options, const RankMain& rank_main) {
    EXPECT_EQ(run(GetParam(), options, rank_main), Outcomes(GetParam().size(), "ok"));
  }
};

// The expected bits are those of tree_order over all ranks, as in the tests of all transports.
TEST_P(HierarchicalGroup, Conforms) { run_all_ok(small_chunks(), conformance::check_everything); }

TEST_P(HierarchicalGroup, StreamsAndSubgroups) {
  if (GetParam().size() % 2 != 0) GTEST_SKIP() << "the groups of this check are pairs";
  run_all_ok(small_chunks(), conformance::check_streams_and_subgroups);
}

std::string hosts_name(const ::testing::TestParamInfo<std::vector<int>>& info) {
  std::string name = "hosts";
  for (const int host : info.param) name += concat(host);
  return name;
}
INSTANTIATE_TEST_SUITE_P(Hosts, HierarchicalGroup,
                         ::testing::Values(std::vector{0, 0, 1, 1}, std::vector{0, 0, 1, 1, 2, 2},
                                           std::vector{0, 0, 0, 0, 1, 1, 1, 1},
                                           std::vector{0, 0, 1},  // flat from here on
                                           std::vector{0, 1, 0, 1}),
                         hosts_name);

void expect_text(const std::string& outcome, const std::string& type, const std::vector<std::string>& parts) {
  EXPECT_TRUE(outcome.starts_with(type)) << outcome;
  for (const std::string& part : parts)
    EXPECT_NE(outcome.find(part), std::string::npos) << "no '" << part << "' in " << outcome;
}

const std::vector<int> kTwoHosts = {0, 0, 1, 1};

TEST(HierarchicalLarge, WhereSmallDataRidesAlong) {
  EXPECT_EQ(run(kTwoHosts, message_options(conformance::kLargeChunk), conformance::check_large),
            Outcomes(4, "ok"));
}

TEST(HierarchicalFault, ASmallCallMeetsALargeOne) {
  const Outcomes outcomes =
      run(kTwoHosts, message_options(conformance::kSmallChunk), [](Communicator& comm, Device& device) {
        const auto stream = device.create_stream("test");
        const std::vector<float> before(comm.rank() == 2 ? 5 : 5000, 1.0F);
        const Tensor data = to_device(device, before);
        try {
          comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
        } catch (const CollectiveMismatch&) {
          EXPECT_EQ(conformance::to_host<float>(data), before);
          throw;
        }
      });
  for (const std::string& outcome : outcomes)
    expect_text(outcome, "CollectiveMismatch",
                {"rank 2: all_reduce float32[5] sum; ranks 0, 1, 3: all_reduce float32[5000] sum"});
}

TEST(HierarchicalFault, ARankThatStaysAwayIsNamed) {
  const Outcomes outcomes = run(kTwoHosts, message_options(conformance::kSmallChunk, milliseconds(300)),
                                [](Communicator& comm, Device& device) {
                                  const auto stream = device.create_stream("test");
                                  const Tensor data = to_device(device, std::vector<float>(5000, 1.0F));
                                  if (comm.rank() == 3) return std::this_thread::sleep_for(milliseconds(600));
                                  comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
                                });
  for (const int r : {0, 1, 2})
    expect_text(outcomes[static_cast<size_t>(r)], "Timeout",
                {"group 'world'", "all_reduce float32[5000] sum", "rank 3 (host", "rank 3 did not come"});
}

// A link of the flat or the cross group breaks at the n-th exchange, for every n of some calls: all ranks
// learn of it, also those that wait in a group of shared memory.
TEST(HierarchicalFault, ALinkMayBreakAtAnyPoint) {
  bool whole = false;
  for (int at = 1; !whole; ++at) {
    ASSERT_LT(at, 200);
    int count = 0;
    auto endpoints = make_thread_endpoints(4);
    endpoints[1]->on_exchange = [&](ThreadEndpoint& endpoint) { break_at(endpoint, at, count); };
    const Outcomes outcomes = run(
        kTwoHosts, small_chunks(),
        [](Communicator& comm, Device& device) {
          const auto stream = device.create_stream("test");
          const Tensor data = to_device(device, std::vector<float>(1500, 1.0F));
          comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
          comm.broadcast(data, 3, *stream)->wait();
          comm.barrier(seconds(60));
        },
        std::move(endpoints));
    whole = outcomes == Outcomes(4, "ok");
    for (const std::string& outcome : outcomes)
      EXPECT_TRUE(outcome == "ok" || outcome.starts_with("PeerLost: ")) << outcome;
  }
}

}  // namespace
}  // namespace polyreme
