#include "emulator/kernel_engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "emulator/fake_gpu.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Saves the registers that a call keeps and the stack pointer, and goes on with another stack.
extern "C" void polyreme_switch_stack(void** save, void* to);
asm(R"(
.text
.type polyreme_switch_stack, @function
polyreme_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size polyreme_switch_stack, . - polyreme_switch_stack
)");

namespace polyreme::fake_gpu {
namespace {

constexpr int kLanesOfWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 48 << 10;  // without asking for more
constexpr size_t kStackBytes = 64 << 10, kGuardBytes = 4096;

// Where a thread waits, in words of the report.
enum class At { kNowhere, kBlock, kWarp };

struct Stack {
  void* pointer = nullptr;  // of what is suspended
  char* low = nullptr;
  size_t size = 0;
  void* fake = nullptr;  // AddressSanitizer's
};

struct Thread {
  uint3 index{};
  int warp = 0, lane = 0;
  uint64_t priority = 0;
  Stack* stack = nullptr;  // null before it starts
  bool done = false;
  At at = At::kNowhere;
  int line = 0;
};

// A meeting of some lanes of a warp. Values alternate between two arrays: lanes that come to the next meeting
// leave the last one's alone, and the one after waits for all.
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  int line = 0;
  int turn = 0;
  uint64_t values[2][kLanesOfWarp] = {};
};

struct Warp {
  std::deque<Meeting> meetings;  // by mask; references stay
  uint32_t alive = 0;
};

class Engine {
 public:
  void run_block(const dim3& shape, size_t shared_bytes, const std::function<void()>& body);

  void sync(int line) { sync_vote(line, Vote::kAny, 0); }
  int sync_vote(int line, Vote vote, int value);
  WarpValues meet(int line, uint32_t mask, uint64_t value);
  void* shared(const void* key, size_t size_bytes);
  void* dynamic() { return dynamic_.get(); }

 private:
  static void fiber_main();
  void run_threads();
  void finish(Thread& thread);
  void wait(At at, int line);
  Thread* pop();
  void push(Thread& thread);
  void release_block();
  void enter(Thread& thread);
  void switch_to(Stack& to);
  void arrived();
  Stack* free_stack();
  void draw_priority(Thread& thread);
  void report(const std::string& text);
  void report_stuck();

  const std::function<void()>* body_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<uint64_t> warp_priorities_;
  std::vector<Thread*> ready_;  // a heap, highest priority first
  Thread* current_ = nullptr;
  bool by_warp_ = false, reported_ = false;
  int alive_ = 0;

  // The barrier of the block.
  std::vector<Thread*> waiting_;
  int barrier_line_ = 0, vote_any_ = 0, vote_all_ = 1, voted_any_ = 0, voted_all_ = 1;

  struct Array {
    const void* key;
    std::unique_ptr<char[]> memory;
  };
  std::vector<Array> arrays_;
  std::unique_ptr<char[]> dynamic_;

  std::vector<std::unique_ptr<Stack>> stacks_;
  std::vector<Stack*> free_stacks_;
  Stack main_;
  Stack* running_ = &main_;
};

Engine& engine() {
  static Engine instance;  // under the emulator's lock: one kernel runs at a time
  return instance;
}

std::unique_ptr<char[]> fresh_memory(size_t size_bytes) {
  std::unique_ptr<char[]> memory(new char[size_bytes]);
  std::memset(memory.get(), 0xff, size_bytes);
  return memory;
}

bool less_urgent(const Thread* a, const Thread* b) { return a->priority < b->priority; }

void Engine::draw_priority(Thread& thread) {
  thread.priority = random_below(UINT32_MAX);
  if (by_warp_) thread.priority |= warp_priorities_[static_cast<size_t>(thread.warp)] << 32;
}

void Engine::push(Thread& thread) {
  thread.at = At::kNowhere;
  if (random_below(16) == 0) draw_priority(thread);
  ready_.push_back(&thread);
  std::push_heap(ready_.begin(), ready_.end(), less_urgent);
}

Thread* Engine::pop() {
  if (ready_.empty()) return nullptr;
  std::pop_heap(ready_.begin(), ready_.end(), less_urgent);
  Thread* thread = ready_.back();
  ready_.pop_back();
  return thread;
}

Stack* Engine::free_stack() {
  if (free_stacks_.empty()) {
    auto stack = std::make_unique<Stack>();
    void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) std::abort();
    stack->low = static_cast<char*>(memory) + kGuardBytes;
    stack->size = kStackBytes;
    free_stacks_.push_back(stack.get());
    stacks_.push_back(std::move(stack));
  }
  Stack* stack = free_stacks_.back();
  free_stacks_.pop_back();
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(stack->low, stack->size);  // of a block that was given up
#endif
  // As if fiber_main had called polyreme_switch_stack from its first instruction.
  auto* top = reinterpret_cast<void**>(stack->low + stack->size);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(&fiber_main);
  std::fill(top - 8, top - 2, nullptr);
  stack->pointer = top - 8;
  return stack;
}

void Engine::switch_to(Stack& to) {
  Stack& from = *running_;
  running_ = &to;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&from.fake, to.low, to.size);
#endif
  polyreme_switch_stack(&from.pointer, to.pointer);
  arrived();
}

// The first thing on a stack that goes on.
void Engine::arrived() {
#ifdef __SANITIZE_ADDRESS__
  const void* low = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(running_->fake, &low, &size);
  if (main_.low == nullptr) {  // the fiber that came first learns of the stack that it came from
    main_.low = const_cast<char*>(static_cast<const char*>(low));
    main_.size = size;
  }
#endif
}

void Engine::fiber_main() {
  engine().arrived();
  engine().run_threads();
}

// A fiber's life: runs threads from their first instruction, one after the other, and gives way to
// suspended ones. It ends in the list of free stacks, for good.
void Engine::run_threads() {
  while (true) {
    current_->stack = running_;
    kernel_thread_index = current_->index;
    (*body_)();
    finish(*current_);
    Thread* next = pop();
    if (next != nullptr && next->stack == nullptr) {
      current_ = next;
      continue;
    }
    free_stacks_.push_back(running_);
    current_ = next;
    switch_to(next == nullptr ? main_ : *next->stack);
    std::abort();
  }
}

void Engine::enter(Thread& thread) {
  current_ = &thread;
  if (thread.stack == nullptr) thread.stack = free_stack();
  switch_to(*thread.stack);
}

// Lets others run until somebody pushes the current thread.
void Engine::wait(At at, int line) {
  Thread& self = *current_;
  self.at = at;
  self.line = line;
  Thread* next = pop();
  if (next == nullptr) {
    current_ = nullptr;
    switch_to(main_);
  } else if (next != &self) {
    enter(*next);
  }
  self.at = At::kNowhere;
  current_ = &self;
  kernel_thread_index = self.index;
}

void Engine::finish(Thread& thread) {
  thread.done = true;
  --alive_;
  Warp& warp = warps_[static_cast<size_t>(thread.warp)];
  warp.alive &= ~(1u << thread.lane);
  for (const Meeting& meeting : warp.meetings)
    if (meeting.arrived != 0 && (meeting.mask >> thread.lane & 1) != 0)
      report("lane " + std::to_string(thread.lane) +
             " has returned, and lanes of its warp wait for it at line " + std::to_string(meeting.line));
  if (alive_ > 0 && static_cast<int>(waiting_.size()) == alive_) release_block();
}

void Engine::release_block() {
  voted_any_ = vote_any_;
  voted_all_ = vote_all_;
  vote_any_ = 0;
  vote_all_ = 1;
  for (Thread* thread : waiting_) push(*thread);
  waiting_.clear();
}

int Engine::sync_vote(int line, Vote vote, int value) {
  if (waiting_.empty()) barrier_line_ = line;
  if (barrier_line_ != line)
    report("threads of a block wait at the barriers of lines " + std::to_string(barrier_line_) + " and " +
           std::to_string(line));
  vote_any_ |= value != 0;
  vote_all_ &= value != 0;
  waiting_.push_back(current_);
  if (static_cast<int>(waiting_.size()) == alive_) release_block();
  wait(At::kBlock, line);
  return vote == Vote::kAny ? voted_any_ : voted_all_;
}

WarpValues Engine::meet(int line, uint32_t mask, uint64_t value) {
  Thread& self = *current_;
  Warp& warp = warps_[static_cast<size_t>(self.warp)];
  auto it = std::find_if(warp.meetings.begin(), warp.meetings.end(),
                         [mask](const Meeting& other) { return other.mask == mask; });
  if (it == warp.meetings.end()) it = warp.meetings.insert(it, Meeting{.mask = mask});
  Meeting& meeting = *it;
  if ((mask >> self.lane & 1) == 0)
    report("a lane is not in the mask that it names, line " + std::to_string(line));
  if ((mask & ~warp.alive) != 0)
    report("lanes of the mask have returned or do not exist, line " + std::to_string(line));
  if (meeting.arrived == 0) meeting.line = line;
  if (meeting.line != line)
    report("lanes of a warp meet at lines " + std::to_string(meeting.line) + " and " + std::to_string(line));
  const int turn = meeting.turn;
  meeting.values[turn][self.lane] = value;
  meeting.arrived |= 1u << self.lane;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    meeting.turn = 1 - turn;
    const size_t first = static_cast<size_t>(self.warp) * kLanesOfWarp;
    for (int lane = 0; lane < kLanesOfWarp; ++lane)
      if ((mask >> lane & 1) != 0) push(threads_[first + static_cast<size_t>(lane)]);
  }
  wait(At::kWarp, line);
  return {meeting.values[turn], mask, self.lane};
}

void* Engine::shared(const void* key, size_t size_bytes) {
  for (const Array& array : arrays_)
    if (array.key == key) return array.memory.get();
  arrays_.push_back({key, fresh_memory(size_bytes)});
  return arrays_.back().memory.get();
}

// The first fault of a block; the rest follows from it.
void Engine::report(const std::string& text) {
  if (!reported_) violation("kernel: " + text);
  reported_ = true;
}

void Engine::report_stuck() {
  for (const Thread& thread : threads_) {
    if (thread.done) continue;
    report("stuck: thread " + std::to_string(thread.index.x) + " of block " +
           std::to_string(kernel_block_index.x) + " waits for its " +
           (thread.at == At::kBlock ? "block" : "warp") + " at line " + std::to_string(thread.line));
    return;
  }
}

void Engine::run_block(const dim3& shape, size_t shared_bytes, const std::function<void()>& body) {
  const int count = static_cast<int>(shape.x * shape.y * shape.z);
  body_ = &body;
  threads_.assign(static_cast<size_t>(count), {});
  warps_.assign(static_cast<size_t>((count + kLanesOfWarp - 1) / kLanesOfWarp), {});
  warp_priorities_.resize(warps_.size());
  for (uint64_t& priority : warp_priorities_) priority = random_below(UINT32_MAX);
  by_warp_ = random_below(2) == 0;
  alive_ = count;
  reported_ = false;
  ready_.clear();
  waiting_.clear();
  vote_any_ = 0;
  vote_all_ = 1;
  arrays_.clear();
  dynamic_ = fresh_memory(shared_bytes);
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads_[static_cast<size_t>(i)];
    const auto n = static_cast<unsigned>(i);
    thread.index = {n % shape.x, n / shape.x % shape.y, n / shape.x / shape.y};
    thread.warp = i / kLanesOfWarp;
    thread.lane = i % kLanesOfWarp;
    warps_[static_cast<size_t>(thread.warp)].alive |= 1u << thread.lane;
    draw_priority(thread);
    push(thread);
  }
  enter(*pop());
  if (alive_ == 0) return;
  report_stuck();
  free_stacks_.clear();  // what hangs in them is given up
  for (const auto& stack : stacks_) free_stacks_.push_back(stack.get());
}

}  // namespace

void run_grid(const LaunchShape& shape, const std::function<void()>& thread) {
  const dim3 &blocks = shape.blocks, &threads = shape.threads;
  const uint64_t count = uint64_t{threads.x} * threads.y * threads.z;
  if (count == 0 || count > kMaxThreads || blocks.x == 0 || blocks.y == 0 || blocks.z == 0 ||
      blocks.y > 65535 || blocks.z > 65535 || shape.shared_bytes > kMaxSharedBytes) {
    violation("kernel: a launch that CUDA refuses: " + std::to_string(blocks.x) + " x " +
              std::to_string(blocks.y) + " x " + std::to_string(blocks.z) + " blocks of " +
              std::to_string(count) + " threads, " + std::to_string(shape.shared_bytes) +
              " bytes of shared memory");
    return;
  }
  kernel_grid = blocks;
  kernel_block = threads;
  for (unsigned z = 0; z < blocks.z; ++z)
    for (unsigned y = 0; y < blocks.y; ++y)
      for (unsigned x = 0; x < blocks.x; ++x) {
        kernel_block_index = {x, y, z};
        engine().run_block(threads, shape.shared_bytes, thread);
      }
}

void* shared_array(const void* key, size_t size_bytes) { return engine().shared(key, size_bytes); }
void* dynamic_shared() { return engine().dynamic(); }
void sync_threads(int line) { engine().sync(line); }
int sync_threads_vote(int line, Vote vote, int value) { return engine().sync_vote(line, vote, value); }
WarpValues meet_warp(int line, uint32_t mask, uint64_t value) { return engine().meet(line, mask, value); }

void check_source(const WarpValues& warp, int source) {
  if (source < 0 || source >= kLanesOfWarp || (warp.mask >> source & 1) == 0)
    violation("kernel: a shuffle reads lane " + std::to_string(source) + ", which takes no part");
}

uint32_t ballot(int line, uint32_t mask, int predicate) {
  const WarpValues warp = meet_warp(line, mask, predicate != 0);
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanesOfWarp; ++lane)
    if ((mask >> lane & 1) != 0 && warp.values[lane] != 0) bits |= 1u << lane;
  return bits;
}

}  // namespace polyreme::fake_gpu
