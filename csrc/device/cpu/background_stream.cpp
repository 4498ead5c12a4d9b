#include "device/cpu/background_stream.h"

#include <utility>

#include "device/cpu/deferred_device.h"

namespace polyreme {

void StreamPoint::reach(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  error_ = std::move(error);
  changed_.notify_all();
}

std::exception_ptr StreamPoint::await() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
  return error_;
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
  const std::lock_guard lock(mutex_);
  return tasks_.empty() && !running_;
}

void BackgroundStream::synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return tasks_.empty() && !running_; });
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
      running_ = !task.point;
      const bool skipped = !task.point && (error_ || ending_);
      const std::exception_ptr earlier = error_;
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
      if (error && !error_) error_ = error;
      running_ = false;
    }
    changed_.notify_all();
  }
}

}  // namespace polyreme
