// A background stream of the immediate device runs beside the host, in order, and shows it in events.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <vector>

#include "device/cpu/cpu_device.h"

namespace polyreme {
namespace {

struct Rig {
  std::unique_ptr<Device> device = make_cpu_device({});
  std::unique_ptr<Stream> background = device->create_stream("background", StreamKind::kBackground);
  std::unique_ptr<Stream> compute = device->create_stream("compute");
};

void enqueue(Stream& stream, std::function<void()> function) {
  as_cpu(stream).enqueue({.name = "test"}, {}, [=](const CpuContext&) { function(); });
}

TEST(BackgroundStream, RunsBesideTheHostAndInOrder) {
  Rig rig;
  std::promise<void> gate;
  std::vector<int> order;
  enqueue(*rig.background, [future = gate.get_future().share()] { future.wait(); });
  for (int i = 0; i < 3; ++i) enqueue(*rig.background, [&order, i] { order.push_back(i); });
  EXPECT_TRUE(order.empty());  // the host came this far while the first one waits
  gate.set_value();
  rig.background->synchronize();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
}

TEST(BackgroundStream, IsIdleOnceItsLastPointWasAwaited) {
  Rig rig;
  const auto event = rig.device->create_event();
  for (int i = 0; i < 20000; ++i) {
    enqueue(*rig.background, [] {});
    rig.background->record(*event);
    event->synchronize();
    ASSERT_TRUE(rig.background->is_idle()) << "round " << i;
  }
}

TEST(BackgroundStream, EventsOrderItWithOtherStreamsAndTheHost) {
  Rig rig;
  const auto other = rig.device->create_stream("other", StreamKind::kBackground);
  const auto event = rig.device->create_event();
  event->synchronize();  // never recorded
  std::promise<void> gate;
  std::atomic<int> value{0};
  enqueue(*rig.background, [&, future = gate.get_future().share()] {
    future.wait();
    value = 1;
  });
  rig.background->record(*event);
  other->wait(*event);
  int seen = -1;
  enqueue(*other, [&] { seen = value; });
  gate.set_value();
  other->synchronize();
  EXPECT_EQ(seen, 1);
  rig.compute->wait(*event);
  event->synchronize();
  EXPECT_EQ(value, 1);
  rig.compute->record(*event);  // moves it to where nothing is pending
  event->synchronize();
}

TEST(BackgroundStream, KeepsTheFirstErrorSkipsTheRestAndReachesItsPoints) {
  Rig rig;
  const auto event = rig.device->create_event();
  bool ran = false;
  enqueue(*rig.background, [] { throw InvalidArgument("first"); });
  enqueue(*rig.background, [&] { ran = true; });
  rig.background->record(*event);
  event->synchronize();
  EXPECT_FALSE(ran);
  EXPECT_THROW(rig.background->synchronize(), InvalidArgument);
  enqueue(*rig.background, [&] { ran = true; });
  rig.background->synchronize();
  EXPECT_TRUE(ran);
}

TEST(BackgroundStream, ReachesItsPointsWhenItEnds) {
  Rig rig;
  const auto event = rig.device->create_event();
  std::promise<void> begun, gate;
  enqueue(*rig.background, [&, future = gate.get_future().share()] {
    begun.set_value();
    future.wait();
  });
  rig.background->record(*event);
  begun.get_future().wait();
  const auto end = std::async(std::launch::async, [&] { rig.background.reset(); });
  gate.set_value();
  end.wait();
  event->synchronize();  // whoever waits for a point of a stream that is gone goes on
}

TEST(BackgroundStream, OwnsTheBuffersOfItsOperationsUntilTheyHaveRun) {
  Rig rig;
  std::promise<void> gate;
  auto buffer = rig.device->allocate(4096, "test");
  const std::weak_ptr<Buffer> watch = buffer;
  as_cpu(*rig.background)
      .enqueue({.name = "test"}, {{buffer, 0, 4096, true}},
               [future = gate.get_future().share()](const CpuContext&) { future.wait(); });
  buffer.reset();
  EXPECT_FALSE(watch.expired());
  gate.set_value();
  rig.background->synchronize();
  EXPECT_TRUE(watch.expired());
}

// The thread is the parent's, and may wait or run at that moment.
TEST(BackgroundStream, AForkedChildCanDestroyIt) {
  for (const bool busy : {false, true}) {
    Rig rig;
    std::promise<void> gate;
    if (busy) enqueue(*rig.background, [future = gate.get_future().share()] { future.wait(); });
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // instead of hanging
      rig.background.reset();
      _exit(7);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
    gate.set_value();
    rig.background->synchronize();
  }
}

}  // namespace
}  // namespace polyreme
