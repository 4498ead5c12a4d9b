// The sum over lanes has the bits of the balanced tree over lanes, whoever computes which part.
#include "mesh/lane_sum.h"

#include <bit>
#include <cmath>

#include "comm/half.h"
#include "common/error_text.h"
#include "common/thread_ranks.h"
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

constexpr size_t kSize = 48;  // three cache lines: buffers of exactly this many bytes

using Lanes = std::vector<std::vector<float>>;

// Numbers of very different sizes, so that another order of the sum shows.
Lanes draw_lanes(int64_t lanes, uint32_t seed) {
  Lanes result;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    result.push_back(random_floats(kSize, seed * 100 + static_cast<uint32_t>(lane)));
    for (size_t i = 0; i < kSize; ++i)
      result.back()[i] *= std::exp2(static_cast<float>((i * 7 + lane * 5) % 9));
  }
  return result;
}

// The tree over lanes [begin, end): the left part is the largest power of two below the whole.
std::vector<float> tree_sum(const Lanes& lanes, size_t begin, size_t end) {
  if (end - begin == 1) return lanes[begin];
  const size_t middle = begin + std::bit_floor(end - begin - 1);
  std::vector<float> sum = tree_sum(lanes, begin, middle);
  const std::vector<float> right = tree_sum(lanes, middle, end);
  for (size_t i = 0; i < kSize; ++i) sum[i] += right[i];
  return sum;
}

// Sums one rank's lanes [first, first + count), each in two additions, and waits.
std::vector<float> sum_lanes(LaneSum& lane_sum, Stream& stream, const Lanes& lanes, int64_t first,
                             int64_t count) {
  Device& device = stream.device();
  const auto size = static_cast<int64_t>(kSize);
  for (int64_t lane = first; lane < first + count; ++lane) {
    const Tensor terms = empty(device, DType::kF32, {size}, "terms");
    copy_from_host(stream, lanes[static_cast<size_t>(lane)].data(), terms);
    const Tensor partial = lane_sum.begin_lane(stream);
    add(stream, partial, terms, partial);
    lane_sum.end_lane(stream);
  }
  Tensor sum;
  lane_sum.finish(stream, &sum)->wait_on(stream);
  std::vector<float> result(kSize);
  copy_to_host(stream, sum, result.data());
  stream.synchronize();
  return result;
}

void expect_tree_bits(int64_t lanes, int ranks, const CpuDeviceOptions& options) {
  run_ranks(ranks, options, [&](World& world) {
    const auto stream = world.device().create_stream("compute");
    const int64_t local = lanes / ranks;
    LaneSum lane_sum(world.device(), {static_cast<int64_t>(kSize)}, local, world.communicator());
    for (uint32_t step = 1; step <= 3; ++step) {
      const Lanes terms = draw_lanes(lanes, step);
      expect_same_bits(sum_lanes(lane_sum, *stream, terms, world.rank() * local, local),
                       tree_sum(terms, 0, terms.size()),
                       concat(lanes, " lanes on ", ranks, " ranks, rank ", world.rank(), ", step ", step));
    }
  });
}

TEST(LaneSum, EveryNumberOfRanksHasTheBitsOfTheTree) {
  for (const CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred})
    for (int64_t lanes = 1; lanes <= 16; lanes *= 2)
      for (int ranks = 1; ranks <= lanes; ranks *= 2) expect_tree_bits(lanes, ranks, {.executor = executor});
}

// The sum of lanes that were rounded to `wire`, whole and this rank's slice of it.
void expect_rounded_lanes(DType wire, int64_t lanes, int ranks, CpuExecutor executor) {
  run_ranks(ranks, {.executor = executor}, [&](World& world) {
    Device& device = world.device();
    const auto stream = device.create_stream("compute");
    const int64_t local = lanes / ranks, first = world.rank() * local;
    const auto size = static_cast<int64_t>(kSize);
    LaneSum lane_sum(device, {size}, local, world.communicator(), /*is_kept=*/true, wire);
    Lanes terms = draw_lanes(lanes, 4);
    for (int form = 0; form < 2; ++form) {
      for (int64_t lane = first; lane < first + local; ++lane) {
        const Tensor values = empty(device, DType::kF32, {size}, "terms");
        copy_from_host(*stream, terms[static_cast<size_t>(lane)].data(), values);
        const Tensor partial = lane_sum.begin_lane(*stream);
        add(*stream, partial, values, partial);
        lane_sum.end_lane(*stream);
      }
      Lanes rounded = terms;
      std::vector<uint16_t> halves(kSize);
      for (std::vector<float>& lane : rounded) {
        narrow(wire, lane.data(), size, halves.data());
        widen(wire, halves.data(), size, lane.data());
      }
      std::vector<float> expected = tree_sum(rounded, 0, rounded.size());
      Tensor sum;
      if (form == 0) {
        sum = lane_sum.reduce(*stream);
      } else {
        if (size % ranks != 0) return;
        sum = lane_sum.own_slice();
        lane_sum.reduce_slice(*stream, sum);
        const auto begin = expected.begin() + world.rank() * (size / ranks);
        expected = {begin, begin + size / ranks};
      }
      std::vector<float> result(expected.size());
      copy_to_host(*stream, sum, result.data());
      stream->synchronize();
      expect_same_bits(result, expected, concat(lanes, " lanes on ", ranks, " ranks, form ", form));
    }
  });
}

TEST(LaneSum, LanesAreRoundedToTheWireOnEveryNumberOfRanks) {
  for (const DType wire : {DType::kBF16, DType::kF16})
    for (const CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred})
      for (const int ranks : {1, 2, 4, 8}) expect_rounded_lanes(wire, 8, ranks, executor);
  for (const int ranks : {2, 3, 5}) expect_rounded_lanes(DType::kBF16, ranks, ranks, CpuExecutor::kImmediate);
}

TEST(LaneSum, OneLanePerRankMayBeAnyNumber) {
  for (const int ranks : {3, 5, 6, 7}) expect_tree_bits(ranks, ranks, {});
}

TEST(LaneSum, TheDataTellsTreesFromChains) {
  const Lanes terms = draw_lanes(8, 1);
  std::vector<float> chain = terms[0];
  for (size_t lane = 1; lane < 8; ++lane)
    for (size_t i = 0; i < kSize; ++i) chain[i] += terms[lane][i];
  EXPECT_NE(chain, tree_sum(terms, 0, 8));
}

TEST(LaneSum, BuffersAreAtMostLog2PlusOne) {
  for (int64_t lanes = 1; lanes <= 64; lanes *= 2) {
    run_ranks(1, {}, [&](World& world) {
      Device& device = world.device();
      const auto stream = device.create_stream("compute");
      LaneSum lane_sum(device, {static_cast<int64_t>(kSize)}, lanes, world.communicator());
      const Tensor ones = empty(device, DType::kF32, {static_cast<int64_t>(kSize)}, "ones");
      fill(*stream, ones, 1.0f);
      device.reset_peak_memory();
      const int64_t before = device.memory().in_use_bytes;
      for (int step = 0; step < 3; ++step) {
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const Tensor partial = lane_sum.begin_lane(*stream);
          add(*stream, partial, ones, partial);
          lane_sum.end_lane(*stream);
        }
        Tensor sum;
        lane_sum.finish(*stream, &sum)->wait();
      }
      const int64_t buffers = (device.memory().peak_bytes - before) / static_cast<int64_t>(4 * kSize);
      EXPECT_EQ(buffers, std::bit_width(static_cast<uint64_t>(lanes))) << lanes << " lanes";
    });
  }
}

TEST(LaneSum, ASumThatWasBrokenOffLeavesNothing) {
  const Lanes terms = draw_lanes(4, 1);
  run_ranks(1, {.executor = CpuExecutor::kDeferred}, [&](World& world) {
    const auto stream = world.device().create_stream("compute");
    LaneSum lane_sum(world.device(), {static_cast<int64_t>(kSize)}, 4, world.communicator());
    for (int complete = 0; complete < 4; ++complete) {
      for (int lane = 0; lane < complete; ++lane) {
        lane_sum.begin_lane(*stream);
        lane_sum.end_lane(*stream);
      }
      lane_sum.begin_lane(*stream);  // and an error ends the step here
      lane_sum.restart();
      expect_same_bits(sum_lanes(lane_sum, *stream, terms, 0, 4), tree_sum(terms, 0, 4));
    }
  });
}

TEST(LaneSum, ARestartBetweenSumsKeepsTheResult) {
  run_ranks(1, {}, [&](World& world) {
    const auto stream = world.device().create_stream("compute");
    LaneSum lane_sum(world.device(), {static_cast<int64_t>(kSize)}, 2, world.communicator());
    const Lanes terms = draw_lanes(2, 1);
    sum_lanes(lane_sum, *stream, terms, 0, 2);
    lane_sum.restart();
    Tensor sum;
    lane_sum.finish(*stream, &sum)->wait();
    std::vector<float> result(kSize);
    copy_to_host(*stream, sum, result.data());
    stream->synchronize();
    expect_same_bits(result, tree_sum(terms, 0, 2));
  });
}

TEST(LaneSum, RefusesWhatIsNoSubtree) {
  run_ranks(1, {}, [&](World& world) {
    const auto stream = world.device().create_stream("compute");
    expect_parts(error_text<InvalidArgument>([&] { LaneSum(world.device(), {4}, 3, world.communicator()); }),
                 {"owns 3 lanes", "power of two"});
    LaneSum lane_sum(world.device(), {4}, 2, world.communicator());
    lane_sum.begin_lane(*stream);
    lane_sum.end_lane(*stream);
    Tensor sum;
    expect_parts(error_text<InvalidArgument>([&] { lane_sum.finish(*stream, &sum); }), {"before 2 lanes"});
  });
}

TEST(LaneSum, CheckLanesNamesBothNumbersAndTheRule) {
  for (const auto& [lanes, size] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {2, 1}, {8, 1}, {8, 2}, {8, 8}, {3, 3}, {6, 6}, {int64_t{1} << 40, 4}})
    EXPECT_NO_THROW(check_lanes("dp", lanes, size)) << lanes << " " << size;
  for (const auto& [lanes, size] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 1}, {-1, 1}, {-4, -4}, {3, 1}, {6, 3}, {2, 4}, {8, 3}, {12, 4}})
    expect_parts(error_text<InvalidArgument>([&, l = lanes, s = size] { check_lanes("dp", l, s); }),
                 {concat("lanes.dp=", lanes), concat("dp=", size), "power of two"});
}

}  // namespace
}  // namespace polyreme::testing
