// The NCCL communicator over the emulated CUDA runtime and NCCL (tests/emulator/fake_gpu.h). Nothing here was
// seen on a GPU by it: scripts/gpu_check.sh is for that.
#include <gtest/gtest.h>

#include <numeric>

#include "comm/conformance.h"
#include "comm/gpu_check.h"
#include "comm/memory_store.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_loader.h"
#include "comm/nccl/nccl_table.h"
#include "comm/rank_threads.h"
#include "common/error_text.h"
#include "emulator/fake_gpu.h"

extern "C" const PolyremeCudaTable* polyreme_cuda_table();
extern "C" const PolyremeNcclTable* polyreme_nccl_table();

namespace polyreme {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::expect_parts;

using Outcomes = std::vector<std::string>;
Outcomes all_ok(int size) { return Outcomes(static_cast<size_t>(size), "ok"); }

struct Setting {
  int size = 2;
  ReduceMode mode = ReduceMode::kOrdered;
  uint64_t seed = 1;
  milliseconds timeout = seconds(30);
  NcclOptions nccl{};
  std::function<int(int rank)> gpu_of_rank = [](int rank) { return rank; };
};

class EmulatedNccl : public ::testing::Test {
 protected:
  // Runs `rank_main` on a thread per rank, each with a GPU of its own. "ok" or "<class>: <message>" by rank.
  Outcomes run(const Setting& setting, const std::function<void(Communicator&, CudaDevice&)>& rank_main) {
    fake_gpu::reset(setting.size, setting.seed);
    store_ = std::make_unique<MemoryStore>();
    if (prepare_) prepare_();
    std::vector<std::exception_ptr> errors(static_cast<size_t>(setting.size));
    std::vector<std::thread> threads;
    for (int r = 0; r < setting.size; ++r)
      threads.emplace_back([&, r] {
        try {
          const auto device = make_cuda_device(*polyreme_cuda_table(), setting.gpu_of_rank(r));
          const auto copies = device->create_stream("copies");
          conformance::copy_stream = copies.get();
          const auto communicator =
              make_nccl_communicator(*polyreme_nccl_table(), *store_, r, setting.size, *device,
                                     {.timeout = setting.timeout, .reduce_mode = setting.mode}, setting.nccl);
          rank_main(*communicator, *device);
        } catch (...) {
          errors[static_cast<size_t>(r)] = std::current_exception();
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::string& violation : fake_gpu::violations()) ADD_FAILURE() << violation;
    for (int r = 0; r < setting.size; ++r) EXPECT_EQ(fake_gpu::num_open_communicators(r), 0) << "rank " << r;
    Outcomes outcomes;
    for (const std::exception_ptr& error : errors) outcomes.push_back(outcome_of(error));
    return outcomes;
  }
  std::function<void()> prepare_;
  std::unique_ptr<MemoryStore> store_;
};

class EmulatedNcclSizes : public EmulatedNccl, public ::testing::WithParamInterface<int> {};

TEST_P(EmulatedNcclSizes, Conforms) {
  EXPECT_EQ(run({.size = GetParam(), .nccl = {.staging_bytes = 4096}}, conformance::check_everything),
            all_ok(GetParam()));
}

TEST_P(EmulatedNcclSizes, ConformsInTheFastMode) {
  EXPECT_EQ(run({.size = GetParam(), .mode = ReduceMode::kFast}, conformance::check_everything_fast),
            all_ok(GetParam()));
}

TEST_P(EmulatedNcclSizes, ConformsWithComparedCalls) {
  EXPECT_EQ(run({.size = GetParam(), .nccl = {.check_calls = true}},
                [](Communicator& comm, Device& device) {
                  const auto stream = device.create_stream("test");
                  const conformance::Place place{comm, device, *stream};
                  conformance::check_all_reductions(place, DType::kBF16, conformance::Draw::kMixed);
                  conformance::check_all_copies(place, DType::kI64);
                }),
            all_ok(GetParam()));
}

TEST_P(EmulatedNcclSizes, ConformsWithLargeMessages) {
  EXPECT_EQ(run({.size = GetParam(), .nccl = {.staging_bytes = 1 << 16}}, conformance::check_large),
            all_ok(GetParam()));
}

TEST_P(EmulatedNcclSizes, StreamsAndSubgroups) {
  if (GetParam() % 2 != 0) return;
  for (uint64_t seed = 1; seed < 5; ++seed)
    EXPECT_EQ(run({.size = GetParam(), .seed = seed}, conformance::check_streams_and_subgroups),
              all_ok(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Sizes, EmulatedNcclSizes, ::testing::Values(1, 2, 3, 4));

TEST_F(EmulatedNccl, SplitTakesRanksWithoutAColorToo) {
  EXPECT_EQ(run({.size = 4},
                [](Communicator& comm, Device& device) {
                  const int rank = comm.rank();
                  const auto group = comm.split(rank == 2 ? -1 : 0, rank == 3 ? -5 : 0, "some");
                  if (rank == 2) return conformance::expect(group == nullptr, "no color, yet a group");
                  const std::vector<int32_t> members = {3, 0, 1};
                  conformance::expect(members[static_cast<size_t>(group->rank())] == rank, "rank ",
                                      group->rank());
                  const auto stream = device.create_stream("test");
                  const Tensor all = conformance::to_device(device, std::vector<int32_t>(3));
                  group->all_gather(conformance::to_device(device, std::vector<int32_t>{rank}), all, *stream)
                      ->wait();
                  conformance::expect_bits(conformance::to_host<int32_t>(all), members, "members");
                  group->barrier(seconds(20));
                }),
            all_ok(4));
}

TEST_F(EmulatedNccl, NamesOfASplitMustAgree) {
  for (const std::string& outcome :
       run({.size = 3}, [](Communicator&comm, Device&) { comm.split(0, 0, comm.rank() == 1 ? "b" : "a"); }))
    EXPECT_TRUE(outcome.starts_with("CollectiveMismatch: group 'world', split: the group of color 0 is '"))
        << outcome;
}

TEST_F(EmulatedNccl, WorksCanBeDroppedAndWaitedForByStreams) {
  EXPECT_EQ(run({.size = 3},
                [](Communicator& comm, Device& device) {
                  const auto first = device.create_stream("first"), second = device.create_stream("second");
                  const Tensor data = conformance::to_device(device, std::vector<int64_t>(400, 1));
                  comm.all_reduce(data, ReduceOp::kSum, *first);
                  const auto work = comm.all_reduce(data, ReduceOp::kSum, *first);
                  work->wait_on(*second);
                  comm.all_reduce(data, ReduceOp::kSum, *second);
                  second->synchronize();
                  conformance::expect_bits(conformance::to_host<int64_t>(data), std::vector<int64_t>(400, 27),
                                           "chain");
                }),
            all_ok(3));
}

// ---- what is refused -----------------------------------------------------------------------------------

TEST_F(EmulatedNccl, G4OneGpuForTwoRanksIsRefusedByUs) {
  Setting setting{.size = 3};
  setting.gpu_of_rank = [](int rank) { return rank == 2 ? 0 : rank; };
  for (const std::string& outcome : run(setting, [](Communicator&, Device&) {}))
    expect_parts(outcome,
                 {"InvalidArgument", "ranks 0 and 2 both use GPU-66616b65-30", "a GPU for each rank"});
}

PolyremeNcclStatus older_version(int32_t* version) {
  *version = 22000;
  return {};
}

TEST_F(EmulatedNccl, G13VersionsMustAgree) {
  fake_gpu::reset(2, 1);
  MemoryStore store;
  PolyremeNcclTable older = *polyreme_nccl_table();
  older.nccl_version = older_version;
  Outcomes outcomes(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      const auto device = make_cuda_device(*polyreme_cuda_table(), r);
      outcomes[static_cast<size_t>(r)] = testing::error_text<InvalidArgument>(
          [&] { make_nccl_communicator(r == 0 ? *polyreme_nccl_table() : older, store, r, 2, *device, {}); });
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& outcome : outcomes) expect_parts(outcome, {"NCCL version", "2.28.9", "2.20.0"});
}

TEST_F(EmulatedNccl, G5ARankThatDoesNotComeIsATimeout) {
  fake_gpu::reset(2, 1);
  MemoryStore store;
  const auto device = make_cuda_device(*polyreme_cuda_table(), 0);
  expect_parts(testing::error_text<Timeout>([&] {
                 make_nccl_communicator(*polyreme_nccl_table(), store, 0, 2, *device,
                                        {.timeout = milliseconds(200)});
               }),
               {"1/2 joined, waiting for rank(s) 1"});
}

TEST_F(EmulatedNccl, BlockingCommunicatorsAreRefused) {
  setenv("NCCL_COMM_BLOCKING", "1", 1);
  const auto outcomes = run({.size = 1}, [](Communicator&, Device&) {});
  unsetenv("NCCL_COMM_BLOCKING");
  expect_parts(outcomes[0], {"InvalidArgument: NCCL_COMM_BLOCKING is '1'; unset it"});
}

TEST_F(EmulatedNccl, StreamsOfOtherDevicesAreRefused) {
  EXPECT_EQ(
      run({.size = 1},
          [](Communicator& comm, Device& device) {
            const auto cpu = make_cpu_device({});
            const Tensor data = conformance::to_device(device, std::vector<float>(3));
            EXPECT_THROW(comm.all_reduce(data, ReduceOp::kSum, *cpu->create_stream("cpu")), NotAvailable);
            const auto twin = make_cuda_device(*polyreme_cuda_table(), 0);
            EXPECT_THROW(comm.all_reduce(data, ReduceOp::kSum, *twin->create_stream("x")), InvalidArgument);
            EXPECT_THROW(comm.barrier(milliseconds(0)), InvalidArgument);
            comm.all_reduce(data, ReduceOp::kSum, *device.create_stream("test"))->wait();
          }),
      all_ok(1));
}

TEST_F(EmulatedNccl, G7ComparedCallsThatDifferAreAMismatch) {
  const auto outcomes =
      run({.size = 3, .nccl = {.check_calls = true}}, [](Communicator& comm, Device& device) {
        const auto stream = device.create_stream("test");
        const Tensor data = conformance::to_device(device, std::vector<float>(comm.rank() == 1 ? 5 : 4));
        comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
      });
  for (const std::string& outcome : outcomes)
    expect_parts(outcome, {"CollectiveMismatch", "sequence 1", "rank 1: all_reduce float32[5] sum",
                           "ranks 0, 2: all_reduce float32[4] sum"});
}

TEST_F(EmulatedNccl, ComparedBlocksThatDifferAreAMismatch) {
  const Setting setting{.size = 2, .nccl = {.check_calls = true}};
  for (const std::string& outcome : run(setting, [](Communicator&comm, Device&device) {
         const auto stream = device.create_stream("test");
         const Tensor data = conformance::to_device(device, std::vector<float>(4));
         const Tensor output = conformance::to_device(device, std::vector<float>(4));
         const std::vector<int64_t> counts =
             comm.rank() == 0 ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{2, 2};
         comm.all_to_all(data, output, *stream, counts, counts)->wait();
       }))
    expect_parts(outcome, {"CollectiveMismatch", "sends 3 elements to rank 1, which expects 2"});
  for (const std::string& outcome : run(setting, [](Communicator&comm, Device&device) {
         const auto stream = device.create_stream("test");
         const Tensor data = conformance::to_device(device, std::vector<float>(comm.rank() == 0 ? 4 : 3));
         (comm.rank() == 0 ? comm.send(data, 1, *stream) : comm.receive(data, 0, *stream))->wait();
       }))
    expect_parts(outcome, {"CollectiveMismatch", "rank 0 sends float32[4], rank 1 expects float32[3]"});
}

// ---- failures --------------------------------------------------------------------------------------------

TEST_F(EmulatedNccl, G8AbortReachesAllRanksAndSubgroups) {
  const auto outcomes = run({.size = 3}, [](Communicator& comm, Device& device) {
    const auto half = comm.split(comm.rank() == 0 ? 0 : 1, 0, "half");
    const auto stream = device.create_stream("test");
    const Tensor data = conformance::to_device(device, std::vector<float>(4));
    if (comm.rank() == 1) return comm.abort("no more data");
    try {
      comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
    } catch (const PeerLost& failure) {
      stream->synchronize();  // ends: the kernels were aborted
      const std::string again = testing::error_text<PeerLost>([&] { half->barrier(seconds(20)); });
      EXPECT_EQ(again, failure.what());
      throw;
    }
  });
  EXPECT_EQ(outcomes[1], "ok");
  for (const int rank : {0, 2})
    expect_parts(outcomes[static_cast<size_t>(rank)],
                 {"PeerLost: group 'world': rank 1 (host ", "aborted the group: no more data"});
  EXPECT_EQ(fake_gpu::num_abort_groups(), 3) << "one group of aborts per rank";
}

TEST_F(EmulatedNccl, ARankThatDoesNotCallIsNamedByTheTimeout) {
  const auto outcomes =
      run({.size = 3, .timeout = milliseconds(400)}, [](Communicator& comm, Device& device) {
        const auto stream = device.create_stream("test");
        const Tensor data = conformance::to_device(device, std::vector<float>(4));
        comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
        if (comm.rank() == 1) std::this_thread::sleep_for(milliseconds(2500));
        comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
      });
  for (const std::string& outcome : outcomes) {
    expect_parts(outcome, {"Timeout: group 'world', all_reduce float32[4] sum, sequence 2, rank ",
                           "no end after 400 ms", "; rank 1 (host ",
                           "has not called it, its last call was all_reduce (sequence 1)"});
    EXPECT_EQ(outcome.find("does not answer"), std::string::npos) << outcome;
  }
}

TEST_F(EmulatedNccl, ARankThatLeftIsNamed) {
  const auto outcomes = run({.size = 3}, [](Communicator& comm, Device& device) {
    const auto stream = device.create_stream("test");
    const Tensor data = conformance::to_device(device, std::vector<float>(4));
    comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
    if (comm.rank() != 1) comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
  });
  EXPECT_EQ(outcomes[1], "ok");
  for (const int rank : {0, 2})
    expect_parts(outcomes[static_cast<size_t>(rank)],
                 {"PeerLost: group 'world', all_reduce float32[4] sum, sequence 2", "rank 1 (host ",
                  "left the group before it"});
}

TEST_F(EmulatedNccl, AnExceptionOnOneRankReachesTheOthers) {
  const auto outcomes = run({.size = 2}, [](Communicator& comm, Device& device) {
    if (comm.rank() == 1) throw std::runtime_error("no such file");
    const auto stream = device.create_stream("test");
    comm.all_reduce(conformance::to_device(device, std::vector<float>(4)), ReduceOp::kSum, *stream)->wait();
  });
  expect_parts(outcomes[0], {"PeerLost", "rank 1 (host ", "left: an exception ended its use"});
  expect_parts(outcomes[1], {"no such file"});
}

TEST_F(EmulatedNccl, G2AStuckGpuIsATimeoutThatSaysSo) {
  const auto outcomes =
      run({.size = 2, .timeout = milliseconds(400)}, [](Communicator& comm, Device& device) {
        const auto stream = device.create_stream("test");
        const Tensor data = conformance::to_device(device, std::vector<float>(4));
        comm.barrier(seconds(20));
        if (comm.rank() == 1) fake_gpu::freeze_gpu(1);
        comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
      });
  for (const std::string& outcome : outcomes)
    expect_parts(outcome, {"Timeout", "sequence 2, rank 0", "all ranks have called it: look at their GPUs"});
}

TEST_F(EmulatedNccl, ABarrierNamesWhoIsMissing) {
  const auto outcomes = run({.size = 3}, [](Communicator& comm, Device&) {
    if (comm.rank() != 2) return comm.barrier(milliseconds(300));
    std::this_thread::sleep_for(milliseconds(1500));
    comm.barrier(milliseconds(300));
  });
  for (const std::string& outcome : outcomes)
    expect_parts(outcome, {"Timeout: group 'world', barrier, sequence 1", "waited for 300 ms; rank 2 (host ",
                           "has not called it, its last call was nothing"});
}

TEST_F(EmulatedNccl, ALostStoreIsALostPeer) {
  const auto outcomes = run({.size = 2}, [&](Communicator& comm, Device& device) {
    comm.barrier(seconds(20));
    if (comm.rank() == 1) return store_->lose();
    const auto stream = device.create_stream("test");
    comm.all_reduce(conformance::to_device(device, std::vector<float>(4)), ReduceOp::kSum, *stream)->wait();
  });
  expect_parts(outcomes[0], {"PeerLost: the store of the job is gone", "rank 0"});
}

// NCCL forbids two threads inside of one communicator; an abort comes from any thread. Rules that are broken
// are violations.
TEST_F(EmulatedNccl, G14AbortWhileAnotherThreadEnqueues) {
  for (uint64_t seed = 1; seed < 4; ++seed) {
    const auto outcomes = run({.size = 2, .seed = seed}, [](Communicator& comm, Device& device) {
      const auto stream = device.create_stream("test");
      const Tensor data = conformance::to_device(device, std::vector<float>(40, 1.0F));
      comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
      std::thread other([&] {
        if (comm.rank() == 1) comm.abort("enough");
      });
      try {
        while (true) comm.all_reduce(data, ReduceOp::kSum, *stream)->wait_on(*stream);
      } catch (...) {
        other.join();
        throw;
      }
    });
    for (const std::string& outcome : outcomes)
      expect_parts(outcome, {"PeerLost", "aborted the group: enough"});
  }
}

struct Failure {
  const char* function;
  int code;
  const char* local;  // the class on the rank where the call fails
};

class EmulatedNcclFailures : public EmulatedNccl, public ::testing::WithParamInterface<Failure> {};

// The n-th call of each function fails on some rank, for every n that occurs: all ranks end with an error
// that names the call, nothing hangs and no rule of NCCL is broken on the way out.
TEST_P(EmulatedNcclFailures, EndOnAllRanks) {
  const Failure failure = GetParam();
  bool failed = true;
  int n = 0;
  while (failed && ++n <= 12) {
    prepare_ = [&] { fake_gpu::fail_call(failure.function, n, failure.code); };
    const auto outcomes =
        run({.size = 2, .seed = static_cast<uint64_t>(n)}, [](Communicator& comm, Device& device) {
          const auto stream = device.create_stream("test");
          const Tensor data = conformance::to_device(device, std::vector<float>(40, 1.0F));
          comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
          const auto pair = comm.split(0, 0, "pair");
          pair->broadcast(data, 0, *stream)->wait();
          comm.barrier(seconds(20));
        });
    failed = outcomes != all_ok(2);
    if (!failed) break;
    int local = 0;
    for (const std::string& outcome : outcomes) {
      EXPECT_NE(outcome, "ok") << failure.function << " " << n;
      local += outcome.starts_with(failure.local);
    }
    EXPECT_GE(local, 1) << failure.function << " " << n << ": " << outcomes[0] << " | " << outcomes[1];
  }
  EXPECT_GT(n, 1) << "no call of " << failure.function << " failed";
}

INSTANTIATE_TEST_SUITE_P(Calls, EmulatedNcclFailures,
                         ::testing::Values(Failure{"ncclSend", ncclSystemError, "PeerLost"},
                                           Failure{"ncclRecv", ncclUnhandledCudaError, "DeviceError"},
                                           Failure{"ncclGroupEnd", ncclRemoteError, "PeerLost"},
                                           Failure{"ncclBroadcast", ncclInternalError, "PeerLost"},
                                           Failure{"ncclCommSplit", ncclSystemError, "PeerLost"},
                                           Failure{"ncclCommGetAsyncError", ncclRemoteError, "PeerLost"},
                                           Failure{"ncclCommInitRankConfig", ncclSystemError, "PeerLost"},
                                           Failure{"cudaLaunchKernel", cudaErrorIllegalAddress,
                                                   "DeviceError"}),
                         [](const auto& place) { return std::string(place.param.function); });

// What scripts/gpu_check.sh runs where there are GPUs.
TEST(GpuCheck, PassesOnTheEmulatedGpu) {
  constexpr int kNumGpus = 2;
  fake_gpu::reset(kNumGpus, 5);
  const gpu_check::Report report = gpu_check::run({.cuda = *polyreme_cuda_table(),
                                                   .nccl = *polyreme_nccl_table(),
                                                   .num_gpus = kNumGpus,
                                                   .sizes_bytes = {4096, 65536},
                                                   .rounds = 2});
  const std::string json = gpu_check::to_json(report, kNumGpus, "the \"emulated\" GPU", "-");
  EXPECT_TRUE(report.ok()) << json;
  EXPECT_EQ(report.bandwidths.size(), 4u);
  expect_parts(json, {"{\"ok\": true, \"num_gpus\": ", "\"cuda\": \"the \\\"emulated\\\" GPU\"",
                      "\"conformance, ordered\": \"ok\"", "\"mode\": \"ordered\", \"bytes\": 65536"});
  for (const std::string& violation : fake_gpu::violations()) ADD_FAILURE() << violation;
}

TEST(NcclLoader, WithoutTheLibrarySaysNotBuilt) {
  const NcclProbe probe = probe_nccl("/nowhere/libpolyreme_nccl.so");
  EXPECT_FALSE(probe.built);
  expect_parts(probe.message,
               {"the NCCL backend is not part of this build", "libnccl-dev", "build polyreme again"});
}

TEST(NcclLoader, TheBuiltLibraryKnowsItsVersion) {
  const NcclProbe probe = probe_nccl();
  ASSERT_TRUE(probe.loaded) << probe.message;
  // Of the library that is found, which may be newer than the header.
  EXPECT_GE(probe.version, 22700);
  EXPECT_EQ(probe.message, "NCCL " + nccl_version_text(probe.version));
}

}  // namespace
}  // namespace polyreme
