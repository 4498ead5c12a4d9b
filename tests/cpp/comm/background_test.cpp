// Collectives on background streams: in flight while the host goes on.
#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "comm/conformance.h"
#include "comm/factory.h"
#include "comm/rank_threads.h"

namespace polyreme {
namespace {

void run(int size, const std::function<void(Communicator&, Device&)>& rank_main) {
  CommOptions options;
  options.timeout = std::chrono::seconds(20);
  EXPECT_EQ(run_on_threads(size, options, {}, rank_main),
            std::vector<std::string>(static_cast<size_t>(size), "ok"));
}

using conformance::to_device;
using conformance::to_host;

TEST(Background, CollectivesOfSeveralGroupsAreInFlightWhileTheHostGoesOn) {
  run(4, [](Communicator& world, Device& device) {
    const auto streams = {device.create_stream("a", StreamKind::kBackground),
                          device.create_stream("b", StreamKind::kBackground)};
    const auto pair = world.split(world.rank() / 2, 0, "pair");
    std::vector<Tensor> data;
    std::vector<std::unique_ptr<Work>> works;
    for (int round = 0; round < 20; ++round)
      for (const auto& stream : streams) {
        Communicator& group = works.size() % 3 == 0 ? *pair : world;
        data.push_back(to_device(device, std::vector<float>(5000, static_cast<float>(world.rank() + round))));
        works.push_back(group.all_reduce(data.back(), ReduceOp::kSum, *stream));
      }
    for (size_t i = works.size(); i-- > 0;) {
      works[i]->wait();
      const int round = static_cast<int>(i / 2);
      const int sum = i % 3 == 0 ? 4 * (world.rank() / 2) + 1 + 2 * round : 6 + 4 * round;
      conformance::expect_bits(to_host<float>(data[i]), std::vector<float>(5000, static_cast<float>(sum)),
                               concat("collective ", i));
    }
    world.barrier(std::chrono::seconds(30));
  });
}

TEST(Background, TheHostIsFreeWhileACollectiveWaitsForALateRank) {
  std::promise<void> first_rank_went_on;
  const auto went_on = first_rank_went_on.get_future().share();
  run(2, [&](Communicator& world, Device& device) {
    const auto stream = device.create_stream("comm", StreamKind::kBackground);
    const Tensor data = to_device(device, std::vector<float>{1, 2});
    if (world.rank() == 1) went_on.wait();  // would never come if the collective held rank 0 up
    const auto work = world.all_reduce(data, ReduceOp::kSum, *stream);
    if (world.rank() == 0) first_rank_went_on.set_value();
    work->wait();
    conformance::expect_bits(to_host<float>(data), {2, 4}, "all_reduce");
  });
}

// O-PG-11: the collective in flight keeps the group until it has run.
TEST(Background, AGroupThatIsDestroyedAtOnceStillRunsWhatIsInFlight) {
  run(4, [](Communicator& world, Device& device) {
    const auto stream = device.create_stream("comm", StreamKind::kBackground);
    auto pair = world.split(world.rank() / 2, 0, "pair");
    const Tensor data = to_device(device, std::vector<int64_t>{world.rank()});
    const auto work = pair->all_reduce(data, ReduceOp::kSum, *stream);
    if (world.rank() % 2 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    pair.reset();
    work->wait();
    conformance::expect_bits(to_host<int64_t>(data), {world.rank() / 2 * 4 + 1}, "pair");
    for (int i = 0; i < 10; ++i) {
      const Tensor more = to_device(device, std::vector<int64_t>{1});
      world.all_reduce(more, ReduceOp::kSum, *stream)->wait();
      conformance::expect_bits(to_host<int64_t>(more), {4}, "world");
    }
  });
}

// O-PG-09: the error of a background thread reaches whoever waits.
TEST(Background, AFailureReachesWait) {
  run(2, [](Communicator& world, Device& device) {
    const auto stream = device.create_stream("comm", StreamKind::kBackground);
    const Tensor data = to_device(device, std::vector<float>(world.rank() == 0 ? 3 : 4));
    const auto work = world.all_reduce(data, ReduceOp::kSum, *stream);
    EXPECT_THROW(work->wait(), CollectiveMismatch);
    EXPECT_THROW(world.barrier(std::chrono::seconds(1)), CollectiveMismatch);
  });
}

}  // namespace
}  // namespace polyreme
