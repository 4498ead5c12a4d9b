// Mistakes and edge cases that users of other systems have met, by the id of their catalogue: O-..: wrong
// results, F..: faults. The other tests of this folder have the rest.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <span>

#include "comm/conformance.h"
#include "comm/rank_threads.h"

namespace polyreme {
namespace {

using conformance::to_device;
using conformance::to_host;
using std::chrono::seconds;

using Outcomes = std::vector<std::string>;
using RankMain = std::function<void(Communicator&, Device&, Stream&)>;

Outcomes run(int size, const RankMain& rank_main, CpuExecutor executor = CpuExecutor::kImmediate) {
  CommOptions options;
  options.chunk_bytes = conformance::kSmallChunk;
  options.timeout = seconds(20);
  return run_on_threads(size, options, {.executor = executor}, [&](Communicator& comm, Device& device) {
    const auto stream = device.create_stream("test");
    rank_main(comm, device, *stream);
  });
}

Outcomes all_ok(int size) { return Outcomes(static_cast<size_t>(size), "ok"); }

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "it was not refused";
}

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in " << text;
}

TEST(Scenario, O_SH_03_StridedTensorsAreRefusedBeforeAnythingIsSent) {
  EXPECT_EQ(run(2,
                [](Communicator& comm, Device& device, Stream& stream) {
                  const Tensor table = to_device(device, std::vector<float>{1, 9, 1, 9}).view({2, 2});
                  const Tensor column = table.slice(1, 0, 1),
                               dense = to_device(device, std::vector<float>(2));
                  const Tensor twice = to_device(device, std::vector<float>(4));
                  const auto sum = ReduceOp::kSum;
                  const Transfer transfer{Transfer::Kind::kSend, column, 1 - comm.rank()};
                  const std::vector<std::function<void()>> calls = {
                      [&] { comm.all_reduce(column, sum, stream); },
                      [&] { comm.broadcast(column, 0, stream); },
                      [&] { comm.reduce_scatter(table.transpose(0, 1), dense, sum, stream); },
                      [&] { comm.all_gather(column, twice, stream); },
                      [&] { comm.all_to_all(column, dense, stream); },
                      [&] { comm.all_to_all(dense, column, stream); },
                      [&] {
                        comm.exchange({&transfer, 1}, stream);
                      }};
                  for (const auto& call : calls) expect_parts(refusal(call), {"contiguous"});
                  comm.barrier(seconds(20));
                }),
            all_ok(2));
}

TEST(Scenario, O_SH_07_OddLengths) {
  for (const int size : {2, 3, 5, 7})
    EXPECT_EQ(run(size,
                  [](Communicator& comm, Device& device, Stream& stream) {
                    const conformance::Place place{comm, device, stream, false};
                    for (const int64_t count : {1, 2, 3, 7, 1023}) {
                      check_reductions(place, {DType::kI32, 1}, count, ReduceOp::kSum);
                      check_all_gather(place, {DType::kI32, 2}, count);
                    }
                    if (comm.size() == 3) check_all_gather(place, {DType::kI32, 3}, 0, {0, 1, 5});
                  }),
              all_ok(size));
}

TEST(Scenario, O_PG_01_AverageOfIntegersIsRefused) {
  EXPECT_EQ(run(2,
                [](Communicator& comm, Device& device, Stream& stream) {
                  for (const DType dtype : {DType::kI32, DType::kI64, DType::kU8, DType::kI8, DType::kBool}) {
                    const Tensor data = empty(device, dtype, {4}, "test");
                    const std::vector<std::string> parts = {"average", dtype_name(dtype), "float32"};
                    expect_parts(refusal([&] { comm.all_reduce(data, ReduceOp::kAverage, stream); }), parts);
                    expect_parts(refusal([&] {
                                   comm.reduce_scatter(data,
                                                       data.slice(0, 2 * comm.rank(), 2 * comm.rank() + 2),
                                                       ReduceOp::kAverage, stream);
                                 }),
                                 parts);
                  }
                  comm.barrier(seconds(20));
                }),
            all_ok(2));
}

// There is no reduce to one rank; reduce_scatter is what could leave partial sums in its input.
TEST(Scenario, O_PG_02_TheInputOfAReductionStaysAsItWas) {
  for (const int64_t count : {3, 3000, 100'000})
    EXPECT_EQ(run(4,
                  [&](Communicator& comm, Device& device, Stream& stream) {
                    const auto rank = static_cast<float>(comm.rank());
                    const std::vector<float> given(static_cast<size_t>(4 * count), rank + 1);
                    const Tensor input = to_device(device, given);
                    const Tensor output = to_device(device, std::vector<float>(static_cast<size_t>(count)));
                    comm.reduce_scatter(input, output, ReduceOp::kSum, stream)->wait();
                    EXPECT_EQ(to_host<float>(output), std::vector<float>(static_cast<size_t>(count), 10.0F));
                    EXPECT_EQ(to_host<float>(input), given);
                  }),
              all_ok(4));
}

TEST(Scenario, O_PG_11_ASubgroupIsDestroyedWithACollectiveInFlight) {
  for (const CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred})
    EXPECT_EQ(run(
                  4,
                  [](Communicator& world, Device& device, Stream& stream) {
                    auto pair = world.split(world.rank() < 2 ? 0 : -1, 0, "pair");
                    if (pair) {
                      pair->all_reduce(to_device(device, std::vector<float>(700, 1.0F)), ReduceOp::kSum,
                                       stream);
                      if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
                      pair.reset();
                    }
                    const conformance::Place place{world, device, stream, false};
                    for (uint64_t i = 0; i < 10; ++i)
                      check_reductions(place, {DType::kF32, i}, 500, ReduceOp::kSum);
                  },
                  executor),
              all_ok(4));
}

// One call differs on one rank: all ranks learn who called what, and nobody's memory is written.
TEST(Scenario, F34_F35_F36_CallsThatDiffer) {
  struct Case {
    const char* what;
    std::function<void(Communicator&, Stream&, const Tensor& floats, const Tensor& ints, bool odd)> call;
    std::vector<std::string> parts;
  };
  const auto sum = ReduceOp::kSum;
  const std::vector<Case> cases = {
      {"F34: order",
       [&](Communicator& c, Stream& s, const Tensor& floats, const Tensor&, bool odd) {
         if (odd) c.broadcast(floats, 0, s)->wait();
         c.all_reduce(floats, sum, s)->wait();
         if (!odd) c.broadcast(floats, 0, s)->wait();
       },
       {"rank 1: broadcast float32[8] root 0", "ranks 0, 2, 3: all_reduce float32[8] sum"}},
      {"F35: count",
       [&](Communicator& c, Stream& s, const Tensor& floats, const Tensor&, bool odd) {
         c.all_reduce(floats.slice(0, 0, odd ? 7 : 8), sum, s)->wait();
       },
       {"rank 1: all_reduce float32[7] sum", "ranks 0, 2, 3: all_reduce float32[8] sum"}},
      {"F36: dtype",
       [&](Communicator& c, Stream& s, const Tensor& floats, const Tensor& ints, bool odd) {
         c.all_reduce(odd ? ints : floats, sum, s)->wait();
       },
       {"rank 1: all_reduce int32[8] sum", "ranks 0, 2, 3: all_reduce float32[8] sum"}},
      {"F35: counts of an uneven all_gather",
       [&](Communicator& c, Stream& s, const Tensor& floats, const Tensor&, bool odd) {
         const std::vector<int64_t> counts =
             odd ? std::vector<int64_t>{2, 2, 1, 3} : std::vector<int64_t>{1, 2, 2, 3};
         const Tensor in = floats.slice(0, 0, counts[static_cast<size_t>(c.rank())]);
         const Tensor out = empty(s.device(), DType::kF32, {8}, "test");
         c.all_gather(in, out, s, counts)->wait();
       },
       {"rank 1: all_gather float32[8] uneven", "ranks 0, 2, 3: all_gather float32[8] uneven"}},
      {"F35: a block of all_to_all",
       [&](Communicator& c, Stream& s, const Tensor& floats, const Tensor&, bool odd) {
         const std::vector<int64_t> even = {2, 2, 2, 2}, other = {1, 2, 3, 2};
         c.all_to_all(floats, empty(s.device(), DType::kF32, {8}, "test"), s, odd ? other : even, even)
             ->wait();
       },
       {"rank 1 sends 1 elements to rank 0, which expects 2"}},
  };
  for (const Case& each : cases) {
    const Outcomes outcomes = run(4, [&](Communicator& comm, Device& device, Stream& stream) {
      const std::vector<float> floats_before(8, 1.0F + static_cast<float>(comm.rank()));
      const std::vector<int32_t> ints_before(8, comm.rank());
      const Tensor floats = to_device(device, floats_before), ints = to_device(device, ints_before);
      std::exception_ptr error;
      try {
        each.call(comm, stream, floats, ints, comm.rank() == 1);
      } catch (const CollectiveMismatch&) {
        error = std::current_exception();
      }
      EXPECT_EQ(to_host<float>(floats), floats_before);
      EXPECT_EQ(to_host<int32_t>(ints), ints_before);
      if (error) std::rethrow_exception(error);
    });
    for (const std::string& outcome : outcomes) {
      EXPECT_TRUE(outcome.starts_with("CollectiveMismatch")) << each.what << ": " << outcome;
      expect_parts(outcome, each.parts);
    }
  }
}

TEST(Scenario, F42_BuffersThatDoNotFit) {
  EXPECT_EQ(
      run(2,
          [](Communicator& comm, Device& device, Stream& stream) {
            const Tensor data = to_device(device, std::vector<float>(8, 1.0F));
            const Tensor small = to_device(device, std::vector<float>(3));
            const int peer = 1 - comm.rank();
            const auto transfer = [&](Transfer::Kind kind, const Tensor& tensor, int other) {
              return Transfer{kind, tensor, other};
            };
            const auto exchange = [&](std::vector<Transfer> transfers) {
              return [&, transfers] { comm.exchange(transfers, stream); };
            };
            const auto out = Transfer::Kind::kSend, in = Transfer::Kind::kReceive;
            const std::vector<std::pair<std::function<void()>, std::string>> calls = {
                {[&] { comm.all_reduce(Tensor(), ReduceOp::kSum, stream); }, "no memory"},
                {[&] { comm.all_gather(data, small, stream); }, "expected 16"},
                {[&] { comm.all_gather(data, data, stream, std::vector<int64_t>{8}); }, "one for each"},
                {[&] {
                   comm.all_gather(small, data, stream, std::vector<int64_t>{3, 4});
                 },
                 "sums to 7"},
                {[&] { comm.all_to_all(data, data, stream); }, "overlap"},
                {[&] { comm.all_to_all(data, small, stream); }, "equal blocks"},
                {[&] {
                   comm.all_to_all(data, small, stream, std::vector<int64_t>{4, 4});
                 },
                 "come together"},
                {exchange({transfer(out, Tensor(), peer)}), "no memory"},
                {exchange({transfer(out, data, comm.rank())}), "another rank"},
                {exchange({transfer(out, data, 2)}), "another rank"},
                {exchange({transfer(out, data, peer), transfer(in, data.slice(0, 7, 8), peer)}), "overlap"},
                {exchange({transfer(in, data, peer), transfer(in, data, peer)}), "overlap"}};
            for (const auto& [call, part] : calls) expect_parts(refusal(call), {part});
            comm.barrier(seconds(20));
          }),
      all_ok(2));
}

TEST(Scenario, F43_TwoThreadsInOneGroup) {
  EXPECT_EQ(
      run(2,
          [](Communicator& comm, Device& device, Stream&) {
            if (comm.rank() == 1) {
              std::this_thread::sleep_for(std::chrono::milliseconds(200));
              return comm.barrier(seconds(20));
            }
            std::thread second([&] {  // rank 0 is inside its barrier meanwhile
              std::this_thread::sleep_for(std::chrono::milliseconds(100));
              const auto stream = device.create_stream("test");
              const Tensor data = to_device(device, std::vector<float>(1));
              expect_parts(refusal([&] { comm.broadcast(data, 0, *stream); }), {"concurrent use", "split"});
              expect_parts(refusal([&] { comm.send(data, 1, *stream); }), {"concurrent use"});
            });
            comm.barrier(seconds(20));
            second.join();
          }),
      all_ok(2));
}

// 6 GB and half a minute: run with POLYREME_TEST_FULL=1.
TEST(Scenario, F44_MoreThanTwoToThe31Elements) {
  if (std::getenv("POLYREME_TEST_FULL") == nullptr) GTEST_SKIP() << "takes 6 GB; set POLYREME_TEST_FULL=1";
  CommOptions options;
  options.timeout = seconds(120);
  const int64_t count = (int64_t{1} << 31) + 5;
  const auto main = [&](Communicator& comm, Device& device) {
    const auto stream = device.create_stream("test");
    const Tensor data = empty(device, DType::kU8, {count}, "test");
    auto* bytes = data.address<uint8_t>();
    const auto pages = [&](auto&& visit) {  // of 4096 equal elements: one by one they take minutes
      for (int64_t begin = 0; begin < count; begin += 4096)
        visit(begin >> 12,
              std::span(bytes + begin, static_cast<size_t>(std::min<int64_t>(4096, count - begin))));
    };
    pages([rank = comm.rank()](int64_t page, std::span<uint8_t> part) {
      std::ranges::fill(part, static_cast<uint8_t>(page + rank));
    });
    comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
    pages([](int64_t page, std::span<uint8_t> part) {
      const auto expected = static_cast<uint8_t>(2 * page + 1);
      conformance::expect(std::ranges::all_of(part, [=](uint8_t is) { return is == expected; }), "page ",
                          page);
    });
  };
  EXPECT_EQ(run_on_threads(2, options, {}, main), all_ok(2));
}

}  // namespace
}  // namespace polyreme
