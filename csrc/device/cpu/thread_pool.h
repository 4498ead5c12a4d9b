// A fixed set of worker threads for loops inside one CPU device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace polyreme {

// Runs loops of independent tasks on num_threads() threads, the caller among them. A pool of one
// thread starts none and adds nothing to a plain loop. Workers spin briefly after a loop, then
// sleep. One loop at a time: run() and scratch() must not be called by two outside threads at once.
//
// The declarations are free of inline bodies and std templates on purpose: kernels that are
// compiled once per instruction set include this header and use run() and scratch() only.
class ThreadPool {
 public:
  // Throws std::invalid_argument if num_threads < 1, std::system_error if a thread cannot start.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Calls fn(context, task, thread) once for each task in [0, num_tasks), with thread in
  // [0, num_threads()), and returns when all calls have returned; their effects are then visible to
  // the caller. Tasks are handed out in ascending order, to whichever thread is free. If calls
  // throw, tasks not yet started are skipped and the first exception is rethrown here. A nested
  // run() from inside a task executes serially on that task's thread, under the same index.
  void run(int64_t num_tasks, void (*fn)(void* context, int64_t task, int thread), void* context);

  // Memory of one thread: 64-byte aligned, at least `bytes`, contents undefined. It stays valid
  // until the pool dies or a larger piece is asked for the same thread. To be called by that
  // thread inside a task, or by the caller of run() while no loop runs. Throws std::bad_alloc.
  void* scratch(int thread, size_t bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Calls body(task, thread) for each task, as ThreadPool::run() does. For code that is compiled
// once; a kernel that is compiled per instruction set calls run().
template <typename Body>
void parallel_for(ThreadPool& pool, int64_t num_tasks, Body&& body) {
  using Callable = std::remove_reference_t<Body>;
  pool.run(
      num_tasks,
      [](void* context, int64_t task, int thread) { (*static_cast<Callable*>(context))(task, thread); },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace polyreme
