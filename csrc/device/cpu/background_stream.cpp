#include "device/cpu/background_stream.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "base/interrupt.h"
#include "device/cpu/deferred_device.h"

namespace polyreme {
namespace {

template <typename Condition>
void wait_for(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
              const Condition& condition) {
  while (!changed.wait_for(lock, kInterruptInterval, condition)) {
    lock.unlock();  // the check may run anything
    check_interrupt();
    lock.lock();
  }
}

// Asks Linux for the shortest slice (0.1 ms) for this thread, so that it runs as soon as there is something
// for it to do where it shares a CPU with the thread that computes: it does little and then waits, but others
// wait for it. With an equal slice it begins when the computing thread's ends, 3 ms late. From Linux 6.12 on;
// older ones favour whoever slept, or refuse, and then nothing is lost.
void ask_for_short_slices() {
  struct Attributes {  // sched_attr of linux/sched/types.h, its first version
    uint32_t size = sizeof(Attributes), policy = 0;
    uint64_t flags = 0;
    int32_t nice = 0;
    uint32_t priority = 0;
    uint64_t runtime_ns = 100'000, deadline = 0, period = 0;
  } attributes;
  attributes.nice = getpriority(PRIO_PROCESS, 0);
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

void StreamPoint::reach(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  error_ = std::move(error);
  changed_.notify_all();
}

std::exception_ptr StreamPoint::await() {
  std::unique_lock lock(mutex_);
  wait_for(changed_, lock, [this] { return reached_; });
  return error_;
}

BackgroundStream::BackgroundStream(Device& device, uint32_t id, Isa isa)
    : device_(device), id_(id), context_{pool_, isa} {
  queue_->thread = std::thread([this] { work(); });
}

BackgroundStream::~BackgroundStream() {
  if (fork_guard_.is_inherited()) {
    // NOLINTNEXTLINE(bugprone-unused-return-value): left alone, as the rest of a forked child's
    (void)queue_.release();
    return;
  }
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->ending = true;
    queue_->changed.notify_all();
  }
  queue_->thread.join();
}

void BackgroundStream::push(Task task) {
  const std::lock_guard lock(queue_->mutex);
  queue_->tasks.push_back(std::move(task));
  queue_->changed.notify_all();
}

void BackgroundStream::enqueue(const OpInfo& info, std::vector<Access> accesses, CpuFunction function) {
  push({.run = [this, info,
                function =
                    std::move(function)] { run_recorded(info, id_, device_.recorder(), context_, function); },
        .accesses = std::move(accesses)});
}

void BackgroundStream::record(Event& event) {
  auto point = std::make_shared<StreamPoint>();
  as_event(event).point = point;
  push({.point = point});
}

void BackgroundStream::wait(Event& event) {
  const PointEvent& awaited = as_event(event);
  if (!awaited.point && !awaited.error) return;
  push({.run = [awaited] {
    if (const std::exception_ptr error = awaited.await()) std::rethrow_exception(error);
  }});
}

bool BackgroundStream::is_idle() {
  const std::lock_guard lock(queue_->mutex);
  return queue_->tasks.empty() && !queue_->running;
}

void BackgroundStream::synchronize() {
  std::unique_lock lock(queue_->mutex);
  wait_for(queue_->changed, lock, [this] { return queue_->tasks.empty() && !queue_->running; });
  if (queue_->error) std::rethrow_exception(std::exchange(queue_->error, nullptr));
}

void BackgroundStream::work() {
  ask_for_short_slices();
  std::unique_lock lock(queue_->mutex);
  while (true) {
    queue_->changed.wait(lock, [this] { return queue_->ending || !queue_->tasks.empty(); });
    if (queue_->tasks.empty()) return;
    {
      Task task = std::move(queue_->tasks.front());
      queue_->tasks.pop_front();
      // Who waits for a point may go on before this thread does, and must find the stream idle then.
      queue_->running = !task.point;
      const bool skipped = !task.point && (queue_->error || queue_->ending);
      const std::exception_ptr earlier = queue_->error;
      lock.unlock();
      std::exception_ptr error;
      try {
        if (task.point) task.point->reach(earlier);
        if (!task.point && !skipped) task.run();
      } catch (...) {
        error = std::current_exception();
      }
      task = {};  // lets go of what it owns before anybody learns that it is done
      lock.lock();
      if (error && !queue_->error) queue_->error = error;
      queue_->running = false;
    }
    queue_->changed.notify_all();
  }
}

}  // namespace polyreme
