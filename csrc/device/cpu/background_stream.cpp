#include "device/cpu/background_stream.h"

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

}  // namespace

void StreamPoint::reach() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  changed_.notify_all();
}

void StreamPoint::await() {
  std::unique_lock lock(mutex_);
  wait_for(changed_, lock, [this] { return reached_; });
}

BackgroundStream::BackgroundStream(Device& device, uint32_t id, Isa isa)
    : device_(device), id_(id), context_{pool_, isa}, thread_([this] { work(); }) {}

BackgroundStream::~BackgroundStream() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void BackgroundStream::push(Task task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_all();
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
  push({.run = [point] { point->reach(); }, .is_point = true});
}

void BackgroundStream::wait(Event& event) {
  if (const auto point = as_event(event).point) push({.run = [point] { point->await(); }});
}

bool BackgroundStream::is_idle() {
  const std::lock_guard lock(mutex_);
  return tasks_.empty() && !running_;
}

void BackgroundStream::synchronize() {
  std::unique_lock lock(mutex_);
  wait_for(changed_, lock, [this] { return tasks_.empty() && !running_; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void BackgroundStream::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      // Who waits for a point may go on before this thread does, and must find the stream idle then.
      running_ = !task.is_point;
      const bool skipped = !task.is_point && (error_ || ending_);
      lock.unlock();
      std::exception_ptr error;
      try {
        if (!skipped) task.run();
      } catch (...) {
        error = std::current_exception();
      }
      task = {};  // lets go of what it owns before anybody learns that it is done
      lock.lock();
      if (error && !error_) error_ = error;
      running_ = false;
    }
    changed_.notify_all();
  }
}

}  // namespace polyreme
