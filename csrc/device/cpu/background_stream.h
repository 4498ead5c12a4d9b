#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/fork.h"
#include "device/cpu/cpu_device.h"

namespace polyreme {

// A point of a background stream, reached once. Thread-safe.
class StreamPoint {
 public:
  // `error`: of the stream up to here, or null.
  void reach(std::exception_ptr error);
  // Returns that error.
  std::exception_ptr await();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::exception_ptr error_;
};

// An event of the immediate device.
struct PointEvent final : Event {
  std::shared_ptr<StreamPoint> point;  // null: never recorded, or where nothing was pending
  std::exception_ptr error;            // of the stream where nothing was pending
  void synchronize() override { await(); }
  // Returns the error that the stream had at the point, or null.
  std::exception_ptr await() const { return point ? point->await() : error; }
};
inline PointEvent& as_event(Event& event) { return static_cast<PointEvent&>(event); }

// A stream of the immediate device with a thread of its own. On every CPU stream an error follows events:
// what a stream has after a wait for a point behind a failed operation does not run, and it has that error
// too.
class BackgroundStream final : public CpuStream {
 public:
  BackgroundStream(Device& device, uint32_t id, Isa isa);
  // Waits for the operation that runs; those that have not begun are dropped, and their points reached. In a
  // forked child, where the thread does not exist, it leaves all as it is.
  ~BackgroundStream() override;

  Device& device() const override { return device_; }
  void enqueue(const OpInfo& info, std::vector<Access> accesses, CpuFunction function) override;
  void record(Event& event) override;
  void wait(Event& event) override;
  bool is_idle() override;
  void synchronize() override;

 private:
  struct Task {
    std::function<void()> run;
    std::vector<Access> accesses;        // keeps the buffers
    std::shared_ptr<StreamPoint> point;  // instead of `run`: reached whatever went wrong before
  };
  // Shared with the thread. Apart, since a forked child can neither destroy a condition that its parent waits
  // for nor end the thread.
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Task> tasks;
    bool running = false;  // a task that is no longer in `tasks`
    bool ending = false;
    std::exception_ptr error;
    std::thread thread;
  };
  void push(Task task);
  void work();

  Device& device_;
  uint32_t id_;
  ThreadPool pool_{1};
  CpuContext context_;
  ForkGuard fork_guard_;
  std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
};

}  // namespace polyreme
