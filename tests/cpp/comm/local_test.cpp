#include <gtest/gtest.h>

#include <atomic>

#include "comm/conformance.h"
#include "comm/rank_threads.h"

namespace polyreme {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using Outcomes = std::vector<std::string>;
Outcomes all_ok(int size) { return Outcomes(static_cast<size_t>(size), "ok"); }

struct Place {
  int size;
  CpuExecutor executor;
};

class LocalGroup : public ::testing::TestWithParam<Place> {
 protected:
  Outcomes run(int64_t chunk_bytes, const std::function<void(Communicator&, Device&)>& rank_main,
               uint64_t seed = 1, ReduceMode mode = ReduceMode::kOrdered) {
    CommOptions options;
    options.reduce_mode = mode;
    options.chunk_bytes = chunk_bytes;
    options.timeout = seconds(60);
    return run_on_threads(GetParam().size, options, {.executor = GetParam().executor, .schedule_seed = seed},
                          rank_main);
  }
};

TEST_P(LocalGroup, Conforms) {
  EXPECT_EQ(run(conformance::kSmallChunk, conformance::check_everything), all_ok(GetParam().size));
}

TEST_P(LocalGroup, ConformsInTheFastMode) {
  EXPECT_EQ(run(conformance::kSmallChunk, conformance::check_everything_fast, 1, ReduceMode::kFast),
            all_ok(GetParam().size));
}

TEST_P(LocalGroup, ConformsWithLargeChunks) {
  EXPECT_EQ(run(conformance::kLargeChunk, conformance::check_large), all_ok(GetParam().size));
}

TEST_P(LocalGroup, ConformsWithoutStaging) {
  EXPECT_EQ(run(conformance::kSmallChunk, conformance::check_shared_memory), all_ok(GetParam().size));
}

TEST_P(LocalGroup, TinyChunksAreRoundedUp) {
  EXPECT_EQ(run(1,
                [](Communicator& comm, Device& device) {
                  const auto stream = device.create_stream("test");
                  conformance::check_reductions<float>(comm, device, *stream, 999, ReduceOp::kSum, 3);
                }),
            all_ok(GetParam().size));
}

TEST_P(LocalGroup, StreamsAndSubgroups) {
  if (GetParam().size % 2 != 0) return;
  for (uint64_t seed = 0; seed < 5; ++seed)
    EXPECT_EQ(run(conformance::kSmallChunk, conformance::check_streams_and_subgroups, seed),
              all_ok(GetParam().size));
}

std::string place_name(const ::testing::TestParamInfo<Place>& info) {
  return concat(info.param.executor == CpuExecutor::kImmediate ? "immediate" : "deferred", info.param.size);
}
INSTANTIATE_TEST_SUITE_P(
    Sizes, LocalGroup,
    ::testing::Values(Place{1, CpuExecutor::kImmediate}, Place{2, CpuExecutor::kImmediate},
                      Place{3, CpuExecutor::kImmediate}, Place{4, CpuExecutor::kImmediate},
                      Place{7, CpuExecutor::kImmediate}, Place{8, CpuExecutor::kImmediate},
                      Place{1, CpuExecutor::kDeferred}, Place{2, CpuExecutor::kDeferred},
                      Place{3, CpuExecutor::kDeferred}, Place{4, CpuExecutor::kDeferred}),
    place_name);

// Runs on the immediate executor with a short timeout.
Outcomes run(int size, const std::function<void(Communicator&, Device&)>& rank_main,
             CpuExecutor executor = CpuExecutor::kImmediate) {
  CommOptions options;
  options.chunk_bytes = conformance::kSmallChunk;
  options.timeout = seconds(20);
  return run_on_threads(size, options, {.executor = executor}, rank_main);
}

TEST(LocalSplit, OrderOfKeysAndColors) {
  EXPECT_EQ(
      run(7,
          [](Communicator& world, Device& device) {
            const int rank = world.rank();
            const int color = rank == 3 ? -1 : rank % 2;
            const auto group = world.split(color, rank == 4 ? -5 : 0, concat("group", color));
            if (rank == 3) return conformance::expect(group == nullptr, "no color, yet a group");
            // 0, 2, 4, 6 with 4 first; 1, 5.
            const std::vector<int> members =
                color == 0 ? std::vector<int>{4, 0, 2, 6} : std::vector<int>{1, 5};
            conformance::expect(group->size() == static_cast<int>(members.size()), "size ", group->size());
            conformance::expect(members[static_cast<size_t>(group->rank())] == rank, "rank ", group->rank());
            const auto stream = device.create_stream("test");
            const Tensor mine = conformance::to_device(device, std::vector<int32_t>{rank});
            const Tensor all = conformance::to_device(device, std::vector<int32_t>(members.size()));
            group->all_gather(mine, all, *stream)->wait();
            conformance::expect_bits(conformance::to_host<int32_t>(all), members, "members");
            const auto pair = group->split(group->rank() / 2, 0, "nested");
            conformance::check_reductions<float>(*pair, device, *stream, 500, ReduceOp::kSum, 1);
          }),
      all_ok(7));
}

TEST(LocalSplit, NamesMustAgree) {
  for (const std::string& outcome :
       run(3, [](Communicator&world, Device&) { world.split(0, 0, world.rank() == 1 ? "b" : "a"); })) {
    EXPECT_TRUE(outcome.starts_with("CollectiveMismatch")) << outcome;
    EXPECT_NE(outcome.find("'a' on rank 0 and 'b' on rank 1"), std::string::npos) << outcome;
  }
}

TEST(LocalSplit, GroupsThatEndLeaveTheOthersAlone) {
  EXPECT_EQ(run(
                4,
                [](Communicator& world, Device& device) {
                  const auto stream = device.create_stream("test");
                  for (int round = 0; round < 20; ++round) {
                    auto half = world.split(world.rank() / 2, 0, "half");
                    const Tensor data = conformance::to_device(device, std::vector<float>(700, 1.0F));
                    half->all_reduce(data, ReduceOp::kSum, *stream);  // nobody waits
                    half.reset();
                  }
                  stream->synchronize();
                  conformance::check_reductions<float>(world, device, *stream, 500, ReduceOp::kSum, 1);
                },
                CpuExecutor::kDeferred),
            all_ok(4));
}

TEST(LocalGroupMemory, TooMuchIsOutOfMemory) {
  CommOptions options;
  options.chunk_bytes = int64_t{1} << 50;
  EXPECT_THROW(make_local_communicators(2, options), OutOfMemory);
}

TEST(LocalOrder, WorkCanBeDroppedAndWaitedForByStreams) {
  EXPECT_EQ(run(
                3,
                [](Communicator& comm, Device& device) {
                  const auto first = device.create_stream("first");
                  const auto second = device.create_stream("second");
                  const Tensor data = conformance::to_device(device, std::vector<int64_t>(400, 1));
                  comm.all_reduce(data, ReduceOp::kSum, *first);
                  const auto work = comm.all_reduce(data, ReduceOp::kSum, *first);
                  work->wait_on(*second);
                  comm.all_reduce(data, ReduceOp::kSum, *second);
                  second->synchronize();
                  conformance::expect_bits(conformance::to_host<int64_t>(data), std::vector<int64_t>(400, 27),
                                           "chain");
                },
                CpuExecutor::kDeferred),
            all_ok(3));
}

TEST(LocalOrder, ADeviceThatRefusesACallCostsNothing) {
  // The deferred device refuses two unordered writes; the group must not count that call.
  EXPECT_EQ(run(
                2,
                [](Communicator& comm, Device& device) {
                  const auto first = device.create_stream("first");
                  const auto second = device.create_stream("second");
                  const Tensor data = conformance::to_device(device, std::vector<float>(10, 1.0F));
                  as_cpu(*first).enqueue({"touch"}, {{data.buffer(), 0, 40, true}}, [](const CpuContext&) {});
                  EXPECT_THROW(comm.all_reduce(data, ReduceOp::kSum, *second), DeviceError);
                  first->synchronize();
                  comm.all_reduce(data, ReduceOp::kSum, *second)->wait();
                  comm.barrier(seconds(20));
                },
                CpuExecutor::kDeferred),
            all_ok(2));
}

TEST(LocalArguments, AreCheckedBeforeAnythingIsSent) {
  EXPECT_EQ(
      run(2,
          [](Communicator& comm, Device& device) {
            const auto stream = device.create_stream("test");
            const Tensor square = conformance::to_device(device, std::vector<float>(16, 1.0F)).view({4, 4});
            const Tensor flat = square.view({16});
            const Tensor ints = conformance::to_device(device, std::vector<int32_t>(16));
            const auto sum = ReduceOp::kSum;
            const int rank = comm.rank();
            EXPECT_THROW(comm.all_reduce(square.transpose(0, 1), sum, *stream), InvalidArgument);
            EXPECT_THROW(comm.all_reduce(Tensor(), sum, *stream), InvalidArgument);
            EXPECT_THROW(comm.reduce_scatter(flat, ints.slice(0, 0, 8), sum, *stream), InvalidArgument);
            EXPECT_THROW(comm.reduce_scatter(ints, flat.slice(0, 0, 7), sum, *stream), InvalidArgument);
            EXPECT_THROW(comm.reduce_scatter(flat, flat.slice(0, 4, 12), sum, *stream), InvalidArgument);
            EXPECT_THROW(comm.all_gather(flat.slice(0, 8 - 8 * rank, 16 - 8 * rank), flat, *stream),
                         InvalidArgument);
            EXPECT_THROW(comm.all_gather(flat, flat, *stream), InvalidArgument);
            EXPECT_THROW(comm.broadcast(flat, 2, *stream), InvalidArgument);
            EXPECT_THROW(comm.broadcast(flat, -1, *stream), InvalidArgument);
            EXPECT_THROW(comm.barrier(milliseconds(0)), InvalidArgument);
            try {
              comm.all_reduce(square.transpose(0, 1), sum, *stream);
            } catch (const InvalidArgument& error) {
              EXPECT_NE(std::string(error.what()).find("contiguous"), std::string::npos);
            }
            conformance::check_reductions<float>(comm, device, *stream, 100, sum, 1);
          }),
      all_ok(2));
  EXPECT_THROW(make_local_communicators(0, {}), InvalidArgument);
  EXPECT_THROW(make_local_communicators(2, {.chunk_bytes = 0}), InvalidArgument);
}

TEST(LocalThreads, ManySmallCollectives) {
  EXPECT_EQ(run(4,
                [](Communicator& comm, Device& device) {
                  const auto stream = device.create_stream("test");
                  const Tensor data = conformance::to_device(device, std::vector<int64_t>{1});
                  for (int i = 0; i < 1500; ++i) {
                    comm.all_reduce(data, ReduceOp::kMax, *stream);
                    if (i % 100 == comm.rank()) std::this_thread::sleep_for(milliseconds(1));
                  }
                  stream->synchronize();
                }),
            all_ok(4));
}

}  // namespace
}  // namespace polyreme
