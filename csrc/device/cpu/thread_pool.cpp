#include "device/cpu/thread_pool.h"

#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace polyreme {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;
// Task indices share a word with the loop's number, so a longer loop runs in rounds of this size.
constexpr int64_t kMaxRound = int64_t{1} << 30;
constexpr uint64_t kClosed = 0xffffffff;
// About 20 us: longer than the gap between two loops of one layer, shorter than a time slice.
constexpr int kSpins = 1000;

using TaskFn = void (*)(void* context, int64_t task, int thread);

inline void pause() { __builtin_ia32_pause(); }

int num_usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;
};

}  // namespace

// How a loop is published. `ticket` holds (loop number, next task). A thread reads the ticket, then
// the loop's fields, then takes the task by advancing the ticket with compare-and-swap. run() closes
// the ticket (next task = kClosed) before it changes a field, so whoever read a newer field than
// its ticket fails the swap. A worker that wakes late therefore does no harm, and run() never waits
// for sleeping workers, only for tasks that were taken.
struct ThreadPool::State {
  explicit State(int n) : num_threads(n), scratch(static_cast<size_t>(n)) {}

  const int num_threads;
  int spins = 0;
  std::vector<Scratch> scratch;
  std::vector<std::thread> workers;

  alignas(kCacheLine) std::atomic<uint64_t> ticket{0};
  std::atomic<TaskFn> fn{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int64_t> first_task{0};
  std::atomic<uint32_t> num_tasks{0};
  std::atomic<bool> failed{false};
  alignas(kCacheLine) std::atomic<uint32_t> unfinished{0};
  // Sleeping workers wait for this to change; it follows the loop number.
  alignas(kCacheLine) std::atomic<uint32_t> wake{0};
  std::atomic<bool> stop{false};

  std::mutex error_mutex;
  std::exception_ptr error;

  // Which pool's task this thread is inside, and its index there.
  static thread_local State* current;
  static thread_local int current_thread;

  void work(int thread);
  void call(TaskFn task_fn, void* task_context, int64_t task, int thread);
  void worker_main(int thread);
  void stop_workers();
};

thread_local ThreadPool::State* ThreadPool::State::current = nullptr;
thread_local int ThreadPool::State::current_thread = 0;

void ThreadPool::State::call(TaskFn task_fn, void* task_context, int64_t task, int thread) {
  if (failed.load(std::memory_order_relaxed)) return;
  try {
    task_fn(task_context, task, thread);
  } catch (...) {
    std::lock_guard<std::mutex> lock(error_mutex);
    if (!error) error = std::current_exception();
    failed.store(true, std::memory_order_relaxed);
  }
}

// Takes tasks of the open loop until none is left.
void ThreadPool::State::work(int thread) {
  State* const outer = current;
  const int outer_thread = current_thread;
  current = this;
  current_thread = thread;
  uint64_t seen = ticket.load(std::memory_order_acquire);
  for (;;) {
    const TaskFn task_fn = fn.load(std::memory_order_acquire);
    void* const task_context = context.load(std::memory_order_acquire);
    const int64_t first = first_task.load(std::memory_order_acquire);
    const uint32_t count = num_tasks.load(std::memory_order_acquire);
    const uint32_t index = static_cast<uint32_t>(seen);
    if (index >= count) break;
    if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      continue;
    }
    call(task_fn, task_context, first + index, thread);
    if (unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished.notify_one();
    seen = ticket.load(std::memory_order_acquire);
  }
  current = outer;
  current_thread = outer_thread;
}

void ThreadPool::State::worker_main(int thread) {
  uint32_t seen = 0;
  for (;;) {
    for (int i = 0; i < spins && wake.load(std::memory_order_relaxed) == seen; ++i) pause();
    wake.wait(seen, std::memory_order_acquire);
    if (stop.load(std::memory_order_acquire)) return;
    seen = wake.load(std::memory_order_acquire);
    work(thread);
  }
}

void ThreadPool::State::stop_workers() {
  stop.store(true, std::memory_order_release);
  wake.fetch_add(1, std::memory_order_release);
  wake.notify_all();
  for (std::thread& worker : workers) worker.join();
}

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads < 1) throw std::invalid_argument("ThreadPool: num_threads must be at least 1");
  state_ = std::make_unique<State>(num_threads);
  // With more threads than cores a spinning thread only keeps the one it waits for off the core.
  state_->spins = num_threads <= num_usable_cpus() ? kSpins : 0;
  state_->workers.reserve(static_cast<size_t>(num_threads - 1));
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      state_->workers.emplace_back([state = state_.get(), thread] { state->worker_main(thread); });
    }
  } catch (...) {
    state_->stop_workers();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  state_->stop_workers();
  for (Scratch& piece : state_->scratch) std::free(piece.data);
}

int ThreadPool::num_threads() const { return state_->num_threads; }

void ThreadPool::run(int64_t num_tasks, TaskFn fn, void* context) {
  State& state = *state_;
  const bool nested = State::current == &state;
  if (state.num_threads == 1 || nested || num_tasks <= 1) {
    const int thread = nested ? State::current_thread : 0;
    for (int64_t task = 0; task < num_tasks; ++task) fn(context, task, thread);
    return;
  }
  for (int64_t first = 0; first < num_tasks; first += kMaxRound) {
    const int64_t left = num_tasks - first;
    const uint32_t count = static_cast<uint32_t>(left < kMaxRound ? left : kMaxRound);
    const uint64_t loop = (state.ticket.load(std::memory_order_relaxed) >> 32) + 1;
    state.ticket.store((loop << 32) | kClosed, std::memory_order_relaxed);
    state.fn.store(fn, std::memory_order_release);
    state.context.store(context, std::memory_order_release);
    state.first_task.store(first, std::memory_order_release);
    state.num_tasks.store(count, std::memory_order_release);
    state.failed.store(false, std::memory_order_relaxed);
    state.unfinished.store(count, std::memory_order_relaxed);
    state.ticket.store(loop << 32, std::memory_order_release);
    state.wake.store(static_cast<uint32_t>(loop), std::memory_order_release);
    state.wake.notify_all();
    state.work(0);
    for (int i = 0; i < state.spins && state.unfinished.load(std::memory_order_relaxed) != 0; ++i) {
      pause();
    }
    for (uint32_t rest; (rest = state.unfinished.load(std::memory_order_acquire)) != 0;) {
      state.unfinished.wait(rest, std::memory_order_acquire);
    }
    if (state.failed.load(std::memory_order_relaxed)) {
      std::exception_ptr error;
      {
        std::lock_guard<std::mutex> lock(state.error_mutex);
        std::swap(error, state.error);
      }
      std::rethrow_exception(error);
    }
  }
}

void* ThreadPool::scratch(int thread, size_t bytes) {
  Scratch& piece = state_->scratch[static_cast<size_t>(thread)];
  if (piece.bytes >= bytes && piece.data != nullptr) return piece.data;
  std::free(piece.data);
  piece = {};
  // Large pieces hold packed panels that are walked with long strides; huge pages spare the TLB.
  const size_t align = bytes >= kHugePage ? kHugePage : kCacheLine;
  const size_t rounded = (bytes + align - 1) / align * align + (bytes == 0 ? align : 0);
  piece.data = std::aligned_alloc(align, rounded);
  if (piece.data == nullptr) throw std::bad_alloc();
  piece.bytes = rounded;
  // Only a hint: where it is refused the memory works as well, with small pages.
  if (align == kHugePage) madvise(piece.data, rounded, MADV_HUGEPAGE);
  return piece.data;
}

}  // namespace polyreme
