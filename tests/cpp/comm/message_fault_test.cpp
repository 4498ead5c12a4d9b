// What goes wrong between ranks that send each other messages: who is named, and where.

#include <gtest/gtest.h>

#include "comm/conformance.h"
#include "comm/message_threads.h"

namespace polyreme {
namespace {

using conformance::to_device;
using conformance::to_host;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Outcomes = std::vector<std::string>;

// Of small groups, and (parameter true) of large ones.
class MessageFault : public ::testing::TestWithParam<bool> {
 protected:
  static MessageOptions options(milliseconds timeout = seconds(60)) {
    MessageOptions options = message_options(conformance::kSmallChunk, timeout);
    if (GetParam()) options.max_direct_ranks = options.min_halving_ranks = 1;
    return options;
  }
  static Outcomes run(int size, milliseconds timeout, const RankMain& rank_main,
                      CpuExecutor executor = CpuExecutor::kImmediate) {
    return run_over_messages(size, options(timeout), rank_main, executor);
  }
};

void expect_text(const std::string& outcome, const std::string& type, const std::vector<std::string>& parts) {
  EXPECT_TRUE(outcome.starts_with(type)) << outcome;
  for (const std::string& part : parts)
    EXPECT_NE(outcome.find(part), std::string::npos) << "no '" << part << "' in " << outcome;
}

TEST_P(MessageFault, ARankThatStaysAwayIsNamedWithWhatItDidLast) {
  const Outcomes outcomes = run(4, milliseconds(300), [](Communicator& comm, Device& device) {
    const auto stream = device.create_stream("test");
    const Tensor data = to_device(device, std::vector<float>(600, 1.0F));
    comm.broadcast(data, 0, *stream)->wait();
    if (comm.rank() == 2) return std::this_thread::sleep_for(milliseconds(700));
    comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
  });
  EXPECT_EQ(outcomes[2], "ok");
  std::vector<std::string> parts = {"group 'world'", "all_reduce float32[600] sum, sequence 3", "0.3 s",
                                    "rank 2 (host"};
  if (!GetParam())
    parts.push_back("rank 2 did not come to this call and last came to broadcast (sequence 2)");
  for (const int r : {0, 1, 3}) expect_text(outcomes[static_cast<size_t>(r)], "Timeout", parts);
}

TEST_P(MessageFault, SeveralMissingRanksAreNamed) {
  if (GetParam()) GTEST_SKIP() << "a large group names the one that was noticed first";
  const Outcomes outcomes = run(4, seconds(60), [](Communicator& comm, Device&) {
    if (comm.rank() == 1 || comm.rank() == 2) return std::this_thread::sleep_for(milliseconds(600));
    comm.barrier(milliseconds(300));
  });
  for (const int r : {0, 3})
    expect_text(outcomes[static_cast<size_t>(r)], "Timeout",
                {"barrier, sequence 2", "rank 1 (host", "rank 2 (host", "ranks 1, 2 did not come"});
}

TEST_P(MessageFault, MismatchIsFoundBeforeMemoryIsWritten) {
  for (const int64_t count : {8, 4096}) {  // with the opening, and after it
    const Outcomes outcomes = run(4, seconds(20), [&](Communicator& comm, Device& device) {
      const auto stream = device.create_stream("test");
      const std::vector<float> before(static_cast<size_t>(count), 1.0F + static_cast<float>(comm.rank()));
      const Tensor data = to_device(device, before);
      std::exception_ptr error;
      try {
        if (comm.rank() == 1) {
          comm.broadcast(data, 0, *stream)->wait();
        } else {
          comm.all_reduce(data.slice(0, 0, 4), ReduceOp::kSum, *stream)->wait();
        }
      } catch (const CollectiveMismatch&) {
        error = std::current_exception();
      }
      EXPECT_EQ(to_host<float>(data), before);
      EXPECT_THROW(comm.barrier(seconds(1)), CollectiveMismatch);
      EXPECT_THROW(comm.split(0, 0, "sub"), CollectiveMismatch);
      if (error) std::rethrow_exception(error);
    });
    for (const std::string& outcome : outcomes)
      expect_text(
          outcome, "CollectiveMismatch",
          {concat("rank 1: broadcast float32[", count, "] root 0; ranks 0, 2, 3: all_reduce float32[4] sum"),
           "sequence 2"});
  }
}

TEST_P(MessageFault, CountsOfAnUnevenAllToAllAreCompared) {
  const Outcomes outcomes = run(3, seconds(20), [](Communicator& comm, Device& device) {
    const auto stream = device.create_stream("test");
    const Tensor input = to_device(device, std::vector<float>(3, 1.0F));
    const std::vector<int64_t> sends = {1, 1, 1};
    std::vector<int64_t> receives = {1, 1, 1};
    if (comm.rank() == 2) receives = {1, 2, 1};
    const Tensor output = to_device(device, std::vector<float>(comm.rank() == 2 ? 4 : 3, 7.0F));
    const auto work = comm.all_to_all(input, output, *stream, sends, receives);
    try {
      work->wait();
    } catch (const CollectiveMismatch&) {
      EXPECT_EQ(to_host<float>(output)[0], 7.0F);
      throw;
    }
  });
  for (const std::string& outcome : outcomes)
    expect_text(outcome, "CollectiveMismatch",
                {"rank 1 sends 1 elements to rank 2, which expects 2 from it", "all_to_all float32, uneven"});
}

TEST_P(MessageFault, ATensorThatIsNotTheExpectedOneIsRefusedBeforeMemoryIsWritten) {
  for (const int64_t count : {4, 4096})
    for (const bool other_dtype : {false, true}) {
      const Outcomes outcomes = run(2, seconds(20), [&](Communicator& comm, Device& device) {
        const auto stream = device.create_stream("test");
        const std::vector<float> before(static_cast<size_t>(count), 7.0F);
        const Tensor floats = to_device(device, before);
        if (comm.rank() == 0) {
          const Tensor data = other_dtype ? to_device(device, std::vector<int32_t>(before.size(), 1))
                                          : floats.slice(0, 0, count - 1);
          comm.send(data, 1, *stream)->wait();
          comm.barrier(seconds(20));
        } else {
          const auto work = comm.receive(floats, 0, *stream);
          EXPECT_THROW(work->wait(), CollectiveMismatch);
          EXPECT_EQ(to_host<float>(floats), before);
          comm.barrier(seconds(20));
        }
      });
      for (const std::string& outcome : outcomes)
        expect_text(
            outcome, "CollectiveMismatch",
            {"rank 0 (host", concat("where rank 1 receives float32[", count, "]"),
             other_dtype ? concat("sent int32[", count, "]") : concat("sent float32[", count - 1, "]")});
    }
}

TEST_P(MessageFault, ASendThatMeetsACollectiveIsAMismatch) {
  if (GetParam())
    GTEST_SKIP() << "in a large group the opening of a call is of another size: said by the endpoint";
  const Outcomes outcomes = run(2, seconds(20), [&](Communicator& comm, Device& device) {
    const auto stream = device.create_stream("test");
    const Tensor data = to_device(device, std::vector<float>(9));
    if (comm.rank() == 0) return comm.barrier(seconds(20));
    comm.receive(data, 0, *stream)->wait();
  });
  for (const std::string& outcome : outcomes) expect_text(outcome, "CollectiveMismatch", {"barrier"});
}

TEST_P(MessageFault, AbortFromAnotherThreadEndsTheWait) {
  const Outcomes outcomes = run(3, seconds(60), [](Communicator& comm, Device&) {
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(50));
      comm.abort("the loader failed: bad file");
    }
    comm.barrier(seconds(60));
  });
  for (const std::string& outcome : outcomes)
    expect_text(outcome, "PeerLost", {"rank 2 (host", "aborted the group: the loader failed: bad file"});
}

TEST_P(MessageFault, AbortTakesTheSubgroupsAlong) {
  const Outcomes outcomes = run(4, seconds(60), [](Communicator& world, Device&) {
    const auto half = world.split(world.rank() / 2, 0, "half");
    if (world.rank() == 1) world.abort("test");
    half->barrier(seconds(60));  // rank 0 waits for rank 1 here, the others for nobody
    world.barrier(seconds(60));
  });
  for (const std::string& outcome : outcomes) expect_text(outcome, "PeerLost", {"aborted the group: test"});
  expect_text(outcomes[0], "PeerLost", {"group 'half'"});
}

TEST_P(MessageFault, AnExceptionIsADepartureAndItsCauseIsToldWhereACallIsOwed) {
  const Outcomes outcomes = run(3, seconds(60), [](Communicator& comm, Device&) {
    comm.barrier(seconds(60));
    if (comm.rank() == 1) throw std::runtime_error("boom");
    comm.barrier(seconds(60));
  });
  EXPECT_EQ(outcomes[1], "exception: boom");
  for (const int r : {0, 2}) expect_text(outcomes[static_cast<size_t>(r)], "PeerLost", {"rank 1 (host"});

  for (const CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred}) {
    const Outcomes caused = run(
        3, seconds(60),
        [](Communicator& comm, Device& device) {
          const auto stream = device.create_stream("test");
          const Tensor data = to_device(device, std::vector<float>(10, 1.0F));
          if (comm.rank() == 1)
            as_cpu(*stream).enqueue({"broken"}, {},
                                    [](const CpuContext&) { throw std::runtime_error("boom"); });
          comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
        },
        executor);
    for (const int r : {0, 2})
      expect_text(caused[static_cast<size_t>(r)], "PeerLost", {"rank 1 (host", "boom"});
  }
}

TEST_P(MessageFault, ARankMayLeaveOnceItIsNotNeeded) {
  EXPECT_EQ(run(3, seconds(60),
                [](Communicator& comm, Device&) {
                  comm.barrier(seconds(60));
                  if (comm.rank() == 0) std::this_thread::sleep_for(milliseconds(100));
                }),
            Outcomes(3, "ok"));
}

TEST_P(MessageFault, ASubgroupFailsAloneUntilTheWorldNeedsIt) {
  const Outcomes outcomes = run(4, seconds(60), [](Communicator& world, Device&) {
    const auto half = world.split(world.rank() / 2, 0, "half");
    if (world.rank() < 2) {
      half->abort("test");
      EXPECT_THROW(half->barrier(seconds(20)), PeerLost);
    } else {
      half->barrier(seconds(20));
    }
    world.barrier(seconds(20));
  });
  EXPECT_EQ(outcomes, Outcomes(4, "ok"));
}

TEST_P(MessageFault, SplitNeedsOneNamePerColor) {
  const Outcomes outcomes = run(
      3, seconds(60), [](Communicator& world, Device&) { world.split(0, 0, world.rank() == 2 ? "b" : "a"); });
  for (const std::string& outcome : outcomes)
    expect_text(outcome, "CollectiveMismatch", {"'a' on rank 0 and 'b' on rank 2"});
}

// A link that breaks at the n-th exchange of a rank, for every n of some calls.
TEST_P(MessageFault, ALinkMayBreakAtAnyPoint) {
  int last = 0;
  for (int at = 1; last == 0; ++at) {
    ASSERT_LT(at, 200);
    auto endpoints = make_thread_endpoints(4);
    int count = 0;
    endpoints[1]->on_exchange = [&](ThreadEndpoint& endpoint) { break_at(endpoint, at, count); };
    const Outcomes outcomes =
        run_over_messages(std::move(endpoints), options(), [](Communicator& comm, Device& device) {
          const auto stream = device.create_stream("test");
          const Tensor data = to_device(device, std::vector<float>(1500, 1.0F));
          comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
          comm.broadcast(data, 1, *stream)->wait();
          const auto half = comm.split(comm.rank() % 2, 0, "half");
          half->all_reduce(data, ReduceOp::kMax, *stream)->wait();
          comm.barrier(seconds(60));
        });
    if (outcomes == Outcomes(4, "ok")) last = at;
    if (last != 0) break;
    expect_text(outcomes[1], "PeerLost", {"the cable was pulled"});
    for (const int r : {0, 2, 3})
      EXPECT_TRUE(outcomes[static_cast<size_t>(r)].starts_with("PeerLost: ") ||
                  outcomes[static_cast<size_t>(r)] == "ok")
          << outcomes[static_cast<size_t>(r)];
  }
  EXPECT_GT(last, 8);
}

INSTANTIATE_TEST_SUITE_P(Ways, MessageFault, ::testing::Bool(),
                         [](const auto& way) { return way.param ? "steps" : "direct"; });

}  // namespace
}  // namespace polyreme
