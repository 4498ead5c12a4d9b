#include <gtest/gtest.h>

#include <chrono>

#include "comm/conformance.h"
#include "comm/rank_threads.h"

namespace polyreme {
namespace {

using conformance::to_device;
using conformance::to_host;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

using Outcomes = std::vector<std::string>;
using RankMain = std::function<void(Communicator&, Device&)>;

Outcomes run(int size, milliseconds timeout, const RankMain& rank_main,
             CpuExecutor executor = CpuExecutor::kImmediate) {
  CommOptions options;
  options.chunk_bytes = conformance::kSmallChunk;
  options.timeout = timeout;
  return run_on_threads(size, options, {.executor = executor}, rank_main);
}

void expect_text(const std::string& outcome, const std::string& type, const std::vector<std::string>& parts) {
  EXPECT_TRUE(outcome.starts_with(type)) << outcome;
  for (const std::string& part : parts)
    EXPECT_NE(outcome.find(part), std::string::npos) << "no '" << part << "' in " << outcome;
}

TEST(LocalFault, BarrierNamesTheMissingRanks) {
  for (const bool two : {false, true}) {
    const Outcomes outcomes = run(4, seconds(60), [&](Communicator& comm, Device&) {
      if (comm.rank() == 2 || (two && comm.rank() == 1)) {
        std::this_thread::sleep_for(milliseconds(1000));
        return;
      }
      comm.barrier(milliseconds(300));
    });
    for (const int r : {0, 3}) {
      expect_text(outcomes[static_cast<size_t>(r)], "Timeout",
                  {"group 'world'", "barrier", "sequence 1", "0.3 s", "rank 2 (host", "has called nothing"});
      // Before that stands who waited, which may be rank 1.
      const std::string& outcome = outcomes[static_cast<size_t>(r)];
      const size_t missing = outcome.find("waited 0.3 s for ");
      ASSERT_NE(missing, std::string::npos) << outcome;
      EXPECT_EQ(outcome.find("rank 1 (host", missing) != std::string::npos, two) << outcome;
    }
    expect_text(outcomes[1], two ? "ok" : "Timeout", {});
  }
}

TEST(LocalFault, F38_ARankThatSkipsACollectiveIsNamedWithItsProgress) {
  const Outcomes outcomes = run(3, milliseconds(400), [](Communicator& comm, Device& device) {
    const auto stream = device.create_stream("test");
    const Tensor data = to_device(device, std::vector<float>(10, 1.0F));
    comm.broadcast(data, 0, *stream)->wait();
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(1500));
      return;
    }
    comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
  });
  for (const int r : {0, 2})
    expect_text(
        outcomes[static_cast<size_t>(r)], "Timeout",
        {"all_reduce float32[10] sum, sequence 2", "rank 1 (host", "last completed broadcast (sequence 1)"});
}

TEST(LocalFault, MismatchIsFoundBeforeMemoryIsWritten) {
  for (const CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred}) {
    const Outcomes outcomes = run(
        4, seconds(20),
        [](Communicator& comm, Device& device) {
          const auto stream = device.create_stream("test");
          const std::vector<float> before(8, 1.0F + static_cast<float>(comm.rank()));
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
          const auto fresh = device.create_stream("fresh");
          EXPECT_THROW(comm.all_reduce(data, ReduceOp::kSum, *fresh), CollectiveMismatch);
          EXPECT_THROW(comm.barrier(seconds(1)), CollectiveMismatch);
          EXPECT_THROW(comm.split(0, 0, "sub"), CollectiveMismatch);
          if (error) std::rethrow_exception(error);
        },
        executor);
    for (const std::string& outcome : outcomes)
      expect_text(
          outcome, "CollectiveMismatch",
          {"rank 1: broadcast float32[8] root 0; ranks 0, 2, 3: all_reduce float32[4] sum", "sequence 1"});
  }
}

TEST(LocalFault, EveryArgumentIsCompared) {
  const auto differing = [](const std::function<void(Communicator&, Device&, Stream&, bool)>& call) {
    return run(2, seconds(20), [&](Communicator& comm, Device& device) {
      const auto stream = device.create_stream("test");
      call(comm, device, *stream, comm.rank() == 1);
      stream->synchronize();
    });
  };
  const std::vector<Outcomes> all = {
      differing([](Communicator& c, Device& d, Stream& s, bool odd) {
        c.all_reduce(to_device(d, std::vector<float>(odd ? 5 : 4)), ReduceOp::kSum, s);
      }),
      differing([](Communicator& c, Device& d, Stream& s, bool odd) {
        c.all_reduce(to_device(d, std::vector<float>(4)), odd ? ReduceOp::kMax : ReduceOp::kSum, s);
      }),
      differing([](Communicator& c, Device& d, Stream& s, bool odd) {
        c.broadcast(odd ? to_device(d, std::vector<int32_t>(4)) : to_device(d, std::vector<float>(4)), 0, s);
      }),
      differing([](Communicator& c, Device& d, Stream& s, bool odd) {
        c.broadcast(to_device(d, std::vector<float>(4)), odd ? 1 : 0, s);
      }),
      differing([](Communicator& c, Device& d, Stream& s, bool odd) {
        if (odd) return c.barrier(seconds(20));
        c.broadcast(to_device(d, std::vector<float>(0)), 0, s);
      }),
      differing([](Communicator& c, Device&, Stream&, bool odd) {
        if (odd) return c.barrier(seconds(20));
        c.split(0, 0, "sub");
      })};
  for (const Outcomes& outcomes : all)
    for (const std::string& outcome : outcomes)
      expect_text(outcome, "CollectiveMismatch", {"rank 0: ", "rank 1: "});
}

TEST(LocalFault, AbortFromAnotherThreadEndsTheWait) {
  const Outcomes outcomes = run(3, seconds(60), [](Communicator& comm, Device&) {
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(100));
      comm.abort("the loader failed: bad file");
      return comm.barrier(seconds(60));
    }
    comm.barrier(seconds(60));
  });
  for (const std::string& outcome : outcomes)
    expect_text(outcome, "PeerLost", {"rank 2 (host", "aborted the group: the loader failed: bad file"});
}

// Ranks that are threads read each other's memory in place: a rank that fails must not take its memory away
// from under a reader, nor may a rank begin to read when another one has failed.
TEST(LocalFault, AbortWhileTheRanksReadEachOther) {
  for (const CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred})
    for (int round = 0; round < 6; ++round) {
      const Outcomes outcomes = run(
          3, seconds(60),
          [&](Communicator& comm, Device& device) {
            const auto stream = device.create_stream("test");
            std::thread other;
            if (comm.rank() == 1)
              other = std::thread([&comm, round] {
                std::this_thread::sleep_for(milliseconds(3 + 2 * round));
                comm.abort("enough");
              });
            try {
              while (true) {
                const Tensor data = to_device(device, std::vector<float>(200'000, 1.0F));
                comm.all_reduce(data, ReduceOp::kMax, *stream)->wait();
                comm.broadcast(data, 0, *stream)->wait();
              }
            } catch (const PeerLost&) {
              if (other.joinable()) other.join();
              throw;
            }
          },
          executor);
      for (const std::string& outcome : outcomes)
        expect_text(outcome, "PeerLost", {"rank 1 (host", "enough"});
    }
}

TEST(LocalFault, AnExceptionOnOneRankReachesTheOthersAsItsDeparture) {
  const Clock::time_point start = Clock::now();
  const Outcomes outcomes = run(3, seconds(60), [](Communicator& comm, Device&) {
    comm.barrier(seconds(60));
    if (comm.rank() == 1) throw std::runtime_error("boom");
    comm.barrier(seconds(60));
  });
  EXPECT_EQ(outcomes[1], "exception: boom");
  for (const int r : {0, 2})
    expect_text(outcomes[static_cast<size_t>(r)], "PeerLost",
                {"rank 1 (host", "left the group after barrier (sequence 1)"});
  EXPECT_LT(Clock::now() - start, seconds(30));
}

TEST(LocalFault, ARankMayLeaveOnceItIsNotNeeded) {
  EXPECT_EQ(run(3, seconds(60),
                [](Communicator& comm, Device&) {
                  comm.barrier(seconds(60));
                  if (comm.rank() == 0) std::this_thread::sleep_for(milliseconds(100));
                }),
            Outcomes(3, "ok"));
}

TEST(LocalFault, TheCauseOfAFailedStreamReachesTheOthers) {
  for (const CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred}) {
    const Outcomes outcomes = run(
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
    EXPECT_EQ(outcomes[1], "exception: boom");
    for (const int r : {0, 2})
      expect_text(outcomes[static_cast<size_t>(r)], "PeerLost", {"rank 1 (host", "boom"});
  }
}

TEST(LocalFault, ASkippedCollectiveDoesNotLetLaterOnesPass) {
  const Outcomes outcomes = run(2, seconds(60), [](Communicator& comm, Device& device) {
    const auto stream = device.create_stream("test");
    const auto other = device.create_stream("other");
    const Tensor data = to_device(device, std::vector<float>(10, 1.0F));
    if (comm.rank() == 1)
      as_cpu(*stream).enqueue({"broken"}, {}, [](const CpuContext&) { throw std::runtime_error("boom"); });
    comm.all_reduce(data, ReduceOp::kSum, *stream);  // never runs on rank 1
    comm.all_reduce(data, ReduceOp::kSum, *other);   // waits for it, and gets its error
    other->synchronize();
    stream->synchronize();
  });
  EXPECT_EQ(outcomes[1], "exception: boom");
  expect_text(outcomes[0], "PeerLost", {"rank 1 (host"});
}

TEST(LocalFault, PendingCollectivesOfARankThatEndsAreMissedAtOnce) {
  const Outcomes outcomes = run(
      2, seconds(60),
      [](Communicator& comm, Device& device) {
        const Tensor data = to_device(device, std::vector<float>(10, 1.0F));
        const auto stream = device.create_stream("test");
        const auto group = comm.split(0, 0, "sub");  // dies before the stream, which still has its collective
        group->all_reduce(data, ReduceOp::kSum, *stream);
        if (comm.rank() == 1) throw std::runtime_error("boom");
        stream->synchronize();
      },
      CpuExecutor::kDeferred);
  EXPECT_EQ(outcomes[1], "exception: boom");
  expect_text(outcomes[0], "PeerLost",
              {"group 'sub'", "rank 1 (host", "left the group", "before all_reduce (sequence 2) had run"});
}

TEST(LocalFault, ASubgroupFailsAloneUntilTheWorldNeedsIt) {
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

}  // namespace
}  // namespace polyreme
