// Ranks that die, disagree or stay away, as real processes. No time is asserted but the bound after
// which a test counts as hung; the times are printed.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>

#include "comm/conformance.h"
#include "comm/factory.h"
#include "comm/mp/rank_processes.h"
#include "comm/rank_threads.h"
#include "comm/shared_memory/memory.h"

namespace polyreme {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kHung{20};

CommOptions small_chunks(milliseconds timeout = seconds(60)) {
  CommOptions options;
  options.chunk_bytes = 4096;
  options.timeout = timeout;
  return options;
}

void expect_text(const std::string& outcome, const std::string& type, const std::vector<std::string>& parts) {
  EXPECT_TRUE(outcome.starts_with(type)) << outcome;
  for (const std::string& part : parts)
    EXPECT_NE(outcome.find(part), std::string::npos) << "no '" << part << "' in " << outcome;
}

using RankMain = std::function<void(Communicator&, RankProcesses&)>;

// `rank_main` on every rank of a world of processes; `meanwhile` in the test.
std::vector<RankResult> run(int size, const CommOptions& options, const RankMain& rank_main,
                            const std::function<void(RankProcesses&)>& meanwhile = {}) {
  RankProcesses ranks(size, [&](RankProcesses& self, Store& store, int rank) {
    rank_main(*make_shm_communicator(store, rank, size, self.job_id(), options), self);
  });
  if (meanwhile) meanwhile(ranks);
  std::vector<RankResult> results = ranks.wait(kHung);
  EXPECT_EQ(segments_left(ranks.job_id()), std::vector<std::string>());
  return results;
}

// Collectives of 256 KiB, 64 chunks each, until something happens.
void reduce_forever(Communicator& comm, RankProcesses& self) {
  const auto device = make_cpu_device({});
  const auto stream = device->create_stream("test");
  const Tensor data = conformance::to_device(*device, std::vector<float>(1 << 16, 1.0F));
  for (int i = 0;; ++i) {
    comm.all_reduce(data, ReduceOp::kMax, *stream)->wait();
    if (i == 3) self.ready();
  }
}

// Sends and receives in a ring, until something happens: half-written lanes are left behind.
TEST(ShmFault, F56_ARankIsKilledInAnExchange) {
  const auto results = run(
      3, small_chunks(),
      [](Communicator& comm, RankProcesses& self) {
        const auto device = make_cpu_device({});
        const auto stream = device->create_stream("test");
        const Tensor out = conformance::to_device(*device, std::vector<float>(1 << 16, 1.0F));
        const Tensor in = conformance::to_device(*device, std::vector<float>(1 << 16));
        const std::vector<Transfer> transfers = {{Transfer::Kind::kSend, out, (comm.rank() + 1) % 3},
                                                 {Transfer::Kind::kReceive, in, (comm.rank() + 2) % 3}};
        for (int i = 0;; ++i) {
          comm.exchange(transfers, *stream)->wait();
          if (i == 3) self.ready();
        }
      },
      [](RankProcesses& ranks) {
        for (int r = 0; r < 3; ++r) ranks.wait_until_ready(r);
        ranks.kill(1, SIGKILL);
      });
  for (const int r : {0, 2})
    expect_text(results[static_cast<size_t>(r)].outcome, "PeerLost",
                {"rank 1 (host ", concat("pid ", results[1].pid), "the process has ended"});
}

TEST(ShmFault, F17_KilledRanksAreNamedByAllOthers) {
  for (const std::vector<int>& victims : {std::vector<int>{2}, std::vector<int>{0}, std::vector<int>{1, 3}}) {
    for (const int signal : {SIGKILL, SIGSEGV}) {
      // Under a sanitizer a crash takes its time to report, so two crashes are not at one moment.
      if (victims.size() > 1 && signal != SIGKILL) continue;
      const auto results = run(4, small_chunks(), reduce_forever, [&](RankProcesses& ranks) {
        for (int r = 0; r < 4; ++r) ranks.wait_until_ready(r);
        for (const int v : victims) ranks.kill(v, signal);
      });
      for (int r = 0; r < 4; ++r) {
        if (std::find(victims.begin(), victims.end(), r) != victims.end()) continue;
        const RankResult& survivor = results[static_cast<size_t>(r)];
        std::vector<std::string> parts = {"all_reduce float32[65536] max", "the process has ended"};
        for (const int v : victims) parts.push_back(concat("rank ", v, " (host "));
        for (const int v : victims) parts.push_back(concat("pid ", results[static_cast<size_t>(v)].pid, ")"));
        expect_text(survivor.outcome, "PeerLost", parts);
        std::printf("signal %d: rank %d ended %d ms later\n", signal, r,
                    static_cast<int>(survivor.elapsed.count()));
      }
    }
  }
}

// Its memory is still mapped by the others, who may be reading it.
TEST(ShmFault, F56_ARankIsKilledWhileOthersReadItsMemory) {
  for (int round = 0; round < 3; ++round) {
    const auto results = run(
        3, small_chunks(),
        [](Communicator& comm, RankProcesses& self) {
          const auto device = make_cpu_device({});
          const auto stream = device->create_stream("test");
          const Tensor data = comm.allocate(*device, DType::kF32, {1 << 20}, "test");
          std::fill_n(data.address<float>(), data.numel(), 1.0F);
          for (int i = 0;; ++i) {
            comm.all_reduce(data, ReduceOp::kMax, *stream)->wait();
            if (i == 3) self.ready();
          }
        },
        [](RankProcesses& ranks) {
          for (int r = 0; r < 3; ++r) ranks.wait_until_ready(r);
          ranks.kill(1, SIGKILL);
        });
    for (const int r : {0, 2})
      expect_text(results[static_cast<size_t>(r)].outcome, "PeerLost",
                  {"rank 1 (host ", concat("pid ", results[1].pid), "the process has ended"});
  }
}

TEST(ShmFault, ARankThatExitsWithoutAWordIsLost) {
  const auto results = run(3, small_chunks(), [](Communicator& comm, RankProcesses&) {
    comm.barrier(seconds(60));
    if (comm.rank() == 1) _exit(0);
    comm.barrier(seconds(60));
  });
  for (const int r : {0, 2})
    expect_text(results[static_cast<size_t>(r)].outcome, "PeerLost",
                {"rank 1 (host ", "last completed barrier (sequence 2)"});
}

// Names of segments are random: what a dead run has left is in nobody's way, and nobody touches it.
TEST(ShmFault, F53_WhatADeadRunHasLeftIsInNobodysWay) {
  const auto source = make_posix_source("left");
  std::string old_name;
  const auto old_memory = source->create(4096, &old_name);
  static_cast<char*>(old_memory->address())[0] = 'x';
  RankProcesses ranks(2, [&](RankProcesses&, Store& store, int rank) {
    make_shm_communicator(store, rank, 2, "left", small_chunks())->barrier(seconds(20));
  });
  for (const RankResult& result : ranks.wait(kHung)) EXPECT_EQ(result.outcome, "ok");
  EXPECT_EQ(segments_left("left").size(), 1U);
  EXPECT_EQ(static_cast<const char*>(source->attach(old_name)->address())[0], 'x');
  source->forget(old_name);
  EXPECT_EQ(segments_left("left"), std::vector<std::string>());
}

TEST(ShmFault, AnExceptionIsADeparture) {
  const auto results = run(3, small_chunks(), [](Communicator& comm, RankProcesses&) {
    comm.barrier(seconds(60));
    if (comm.rank() == 1) throw std::runtime_error("boom");
    comm.barrier(seconds(60));
  });
  EXPECT_EQ(results[1].outcome, "exception: boom");
  for (const int r : {0, 2})
    expect_text(results[static_cast<size_t>(r)].outcome, "PeerLost", {"rank 1 (host ", "left the group"});
}

TEST(ShmFault, AbortCarriesTheCause) {
  const auto results = run(3, small_chunks(), [](Communicator& comm, RankProcesses&) {
    comm.barrier(seconds(60));
    if (comm.rank() == 1) comm.abort("ValueError: boom");
    comm.barrier(seconds(60));
  });
  for (const RankResult& result : results)
    expect_text(result.outcome, "PeerLost", {"rank 1 (host ", "ValueError: boom"});
}

TEST(ShmFault, ARankThatStaysAwayIsATimeout) {
  const auto results = run(3, small_chunks(milliseconds(500)), [](Communicator& comm, RankProcesses& self) {
    const auto device = make_cpu_device({});
    const auto stream = device->create_stream("test");
    if (comm.rank() == 2) {
      self.ready();
      std::this_thread::sleep_for(seconds(2));
      return;
    }
    comm.all_reduce(conformance::to_device(*device, std::vector<float>(9)), ReduceOp::kSum, *stream)->wait();
  });
  for (const int r : {0, 1})
    expect_text(
        results[static_cast<size_t>(r)].outcome, "Timeout",
        {"all_reduce float32[9] sum, sequence 2", "0.5 s", "rank 2 (host ", concat("pid ", results[2].pid)});
}

TEST(ShmFault, AStoppedRankIsATimeoutAndAShortStopIsNone) {
  const auto results = run(
      2, small_chunks(seconds(5)),
      [](Communicator& comm, RankProcesses& self) {
        self.ready();
        for (int i = 0; i < 3000; ++i) {
          comm.barrier(seconds(5));
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
      },
      [](RankProcesses& ranks) {
        ranks.wait_until_ready(1);
        ranks.kill(1, SIGSTOP);
        std::this_thread::sleep_for(milliseconds(400));
        ranks.kill(1, SIGCONT);
      });
  for (const RankResult& result : results) EXPECT_EQ(result.outcome, "ok");
}

TEST(ShmFault, MismatchAcrossProcesses) {
  const auto results = run(4, small_chunks(), [](Communicator& comm, RankProcesses&) {
    const auto device = make_cpu_device({});
    const auto stream = device->create_stream("test");
    const Tensor data = conformance::to_device(*device, std::vector<float>(8, 1.0F));
    const auto work = comm.rank() == 1 ? comm.broadcast(data, 0, *stream)
                                       : comm.all_reduce(data.slice(0, 0, 4), ReduceOp::kSum, *stream);
    work->wait();
  });
  for (const RankResult& result : results)
    expect_text(result.outcome, "CollectiveMismatch",
                {"rank 1: broadcast float32[8] root 0; ranks 0, 2, 3: all_reduce float32[4] sum"});
}

TEST(ShmFault, F18_ARankThatDiesDuringSplitBreaksTheParent) {
  const auto results = run(4, small_chunks(), [](Communicator& comm, RankProcesses&) {
    if (comm.rank() == 3) raise(SIGKILL);
    comm.split(comm.rank() / 2, 0, "half");
  });
  for (const int r : {0, 1, 2})
    expect_text(results[static_cast<size_t>(r)].outcome, "PeerLost", {"split", "rank 3 (host "});
}

TEST(ShmFault, AForkedChildThatIsTornDownTakesNobodyOut) {
  RankProcesses ranks(2, [&](RankProcesses& self, Store& store, int rank) {
    auto comm = make_shm_communicator(store, rank, 2, self.job_id(), small_chunks());
    const pid_t child = fork();
    if (child == 0) {
      comm.reset();
      _exit(0);
    }
    waitpid(child, nullptr, 0);
    comm->barrier(seconds(20));
  });
  for (const RankResult& result : ranks.wait(kHung)) EXPECT_EQ(result.outcome, "ok");
}

TEST(ShmFault, TooLittleSharedMemoryIsSaidAtOnce) {
  CommOptions options = small_chunks();
  options.chunk_bytes = int64_t{1} << 44;
  const auto results = run(2, options, [](Communicator&, RankProcesses&) {});
  expect_text(results[0].outcome, "OutOfMemory", {"/dev/shm", "POLYREME_TRANSPORT=tcp", "--shm-size"});
  expect_text(results[1].outcome, "CommError", {"rank 0 could not open the group", "/dev/shm"});
}

TEST(ShmFault, OptionsMustAgree) {
  RankProcesses ranks(3, [&](RankProcesses& self, Store& store, int rank) {
    CommOptions options = small_chunks();
    if (rank == 1) options.chunk_bytes *= 2;
    make_shm_communicator(store, rank, 3, self.job_id(), options);
  });
  for (const RankResult& result : ranks.wait(kHung))
    expect_text(result.outcome, "Co",
                {"rank 1 has size 3 and chunk_bytes 8256", "4224"});  // CommError if it came late
  EXPECT_EQ(segments_left(ranks.job_id()), std::vector<std::string>());
}

TEST(ShmFault, AJobIdThatCannotBeAFileNameIsRefused) {
  RankProcesses ranks(1, [&](RankProcesses&, Store& store, int rank) {
    EXPECT_THROW(make_shm_communicator(store, rank, 1, "a/b", {}), InvalidArgument);
    EXPECT_THROW(make_shm_communicator(store, rank, 1, "", {}), InvalidArgument);
    EXPECT_THROW(make_shm_communicator(store, 1, 1, "a", {}), InvalidArgument);
  });
  EXPECT_EQ(ranks.wait(kHung)[0].outcome, "ok");
}

}  // namespace
}  // namespace polyreme
