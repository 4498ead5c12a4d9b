#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "emulator/fake_gpu.h"
#include "emulator/happens_before.h"

using polyreme::fake_gpu::Step;

// The types that cuda_runtime.h leaves open.
struct CUstream_st {
  int gpu = 0;
  size_t id = 0;
  polyreme::fake_gpu::Clock clock;
  std::deque<Step> steps;
  uint64_t num_enqueued = 0, num_done = 0;
  bool destroyed = false;
};
struct CUevent_st {
  uint64_t recorded = 0, reached = 0;  // generations
  int gpu = 0;                         // of the last record
  // What the stream had seen at the last record; filled when that is reached.
  std::shared_ptr<polyreme::fake_gpu::Clock> clock = std::make_shared<polyreme::fake_gpu::Clock>();
};

namespace polyreme::fake_gpu {
namespace {

constexpr size_t kArenaBytes = size_t{512} << 20;
constexpr size_t kPage = 4096;
constexpr uint64_t kTotalMemory = uint64_t{128} << 20;

struct State {
  std::recursive_mutex mutex;
  int num_gpus = 1;
  uint64_t random = 1;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<CUevent_st>> events;  // steps refer to them, so all stay until reset
  std::map<int, CUstream_st*> default_streams;
  std::map<int, Clock> host_clocks;                     // by GPU: what its host has waited for
  std::map<std::string, std::pair<int, int>> failures;  // calls left, code
  std::set<int> frozen, broken;
  char* arena = nullptr;
  size_t used = 0;
  struct Block {
    size_t bytes;
    int gpu;
  };
  std::map<void*, Block> blocks;
  uint64_t in_use = 0;
  bool memory_is_out = false;
  int open = 0;  // MemoryAccess objects
};

State& state() {
  static State instance;
  return instance;
}

thread_local int current_gpu = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t give(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
bool is_broken(int gpu) { return state().broken.contains(gpu); }
// The outcome of a call that can be made to fail.
#define FAKE_CALL(name)                                                               \
  const Lock lock;                                                                    \
  if (const int code = failure_of(name)) return give(static_cast<cudaError_t>(code)); \
  if (is_broken(current_gpu)) return give(cudaErrorIllegalAddress)

CUstream_st* new_stream() {
  auto& streams = state().streams;
  streams.push_back(std::make_unique<CUstream_st>());
  streams.back()->gpu = current_gpu;
  streams.back()->id = streams.size() - 1;
  streams.back()->clock.resize(streams.size());
  return streams.back().get();
}

CUstream_st* stream_of(cudaStream_t stream) {
  if (stream != nullptr) return stream;
  CUstream_st*& own = state().default_streams[current_gpu];
  if (own == nullptr) own = new_stream();
  return own;
}

Operation operation_of(const CUstream_st* stream, const std::string& name) {
  return {name + " of GPU " + std::to_string(stream->gpu) + ", stream " + std::to_string(stream->id),
          stream->id, stream->clock};
}

// Lets one stream of all GPUs make one step, if any can.
bool progress() {
  std::vector<CUstream_st*> ready;
  for (const auto& stream : state().streams)
    if (!stream->steps.empty() && !state().frozen.contains(stream->gpu)) ready.push_back(stream.get());
  while (!ready.empty()) {
    const size_t pick = random_below(static_cast<uint32_t>(ready.size()));
    CUstream_st* stream = ready[pick];
    if (stream->steps.front()()) {
      stream->steps.pop_front();
      ++stream->num_done;
      return true;
    }
    ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(pick));
  }
  return false;
}

// Advances until `done`; other threads may have to enqueue something first.
template <typename Done>
void progress_until(const Done& done) {
  while (true) {
    bool moved;
    {
      const Lock lock;
      if (done()) return;
      moved = progress();
    }
    if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

bool is_device(const void* address) {
  const auto* at = static_cast<const char*>(address);
  return at >= state().arena && at < state().arena + kArenaBytes;
}

}  // namespace

Lock::Lock() { state().mutex.lock(); }
Lock::~Lock() { state().mutex.unlock(); }

MemoryAccess::MemoryAccess() {
  if (state().open++ == 0 && state().used > 0) mprotect(state().arena, state().used, PROT_READ | PROT_WRITE);
}
MemoryAccess::~MemoryAccess() {
  if (--state().open == 0 && state().used > 0) mprotect(state().arena, state().used, PROT_NONE);
}

uint32_t random_below(uint32_t bound) {
  uint64_t& x = state().random;  // splitmix64
  uint64_t z = (x += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 32) % bound;
}

void reset(int num_gpus, uint64_t seed) {
  const Lock lock;
  State& s = state();
  reset_nccl();
  if (s.arena == nullptr) {
    void* memory = mmap(nullptr, kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    s.arena = static_cast<char*>(memory);
  }
  watch_arena(s.arena, kArenaBytes);
  madvise(s.arena, kArenaBytes, MADV_DONTNEED);
  mprotect(s.arena, kArenaBytes, PROT_NONE);
  s.num_gpus = num_gpus;
  s.random = seed;
  s.streams.clear();
  s.events.clear();
  s.default_streams.clear();
  s.host_clocks.clear();
  s.failures.clear();
  s.frozen.clear();
  s.broken.clear();
  s.blocks.clear();
  s.used = s.in_use = 0;
  s.memory_is_out = false;
}

void fail_call(const std::string& function, int n, int code) {
  const Lock lock;
  state().failures[function] = {n, code};
}

int failure_of(const char* function) {
  const auto it = state().failures.find(function);
  if (it == state().failures.end() || --it->second.first > 0) return 0;
  const int code = it->second.second;
  state().failures.erase(it);
  return code;
}

void freeze_gpu(int index) {
  const Lock lock;
  state().frozen.insert(index);
}

void take_memory() {
  const Lock lock;
  state().memory_is_out = true;
}

void break_gpu(int index) {
  const Lock lock;
  state().broken.insert(index);
  state().frozen.insert(index);
}

void enqueue(cudaStream_t stream, Step step) {
  CUstream_st* target = stream_of(stream);
  target->steps.push_back([target, step = std::move(step), host = state().host_clocks[target->gpu]] {
    merge(target->clock, host);
    return step();
  });
  ++target->num_enqueued;
}

void count_operation(cudaStream_t stream) { ++stream->clock[stream->id]; }
void see(cudaStream_t stream, cudaStream_t other) { merge(stream->clock, other->clock); }
void touch(cudaStream_t stream, const char* name, const void* begin, size_t bytes, bool writes) {
  touch(operation_of(stream, name), begin, bytes, writes);
}

void enqueue_launch(cudaStream_t stream, const std::string& name, std::function<void()> body) {
  const Lock lock;
  int code = failure_of("cudaLaunchKernel");
  if (code == 0 && is_broken(stream_of(stream)->gpu)) code = cudaErrorIllegalAddress;
  if (code != 0) {
    last_error = static_cast<cudaError_t>(code);
    return;
  }
  enqueue(stream, [body = std::move(body), name, target = stream_of(stream)] {
    count_operation(target);
    run_watched(operation_of(target, name), state().used, body);
    return true;
  });
}

int gpu_of(cudaStream_t stream) { return stream_of(stream)->gpu; }

}  // namespace polyreme::fake_gpu

using namespace polyreme::fake_gpu;

extern "C" {

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  FAKE_CALL("cudaGetDeviceCount");
  *count = state().num_gpus;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
  FAKE_CALL("cudaGetDeviceProperties");
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "emulated GPU");
  std::snprintf(properties->uuid.bytes, sizeof properties->uuid.bytes, "fake%d", index);
  properties->major = 9;
  properties->multiProcessorCount = 1;
  properties->totalGlobalMem = kTotalMemory;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* index) {
  *index = current_gpu;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
  const Lock lock;
  if (const int code = failure_of("cudaSetDevice")) return give(static_cast<cudaError_t>(code));
  if (index < 0 || index >= state().num_gpus) return give(cudaErrorInvalidDevice);
  current_gpu = index;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    default:
      return "cudaErrorOfTheEmulator";
  }
}
const char* cudaGetErrorString(cudaError_t) { return "told by the emulator"; }

cudaError_t cudaMalloc(void** address, size_t size_bytes) {
  FAKE_CALL("cudaMalloc");
  const size_t bytes = (size_bytes + kPage - 1) / kPage * kPage;
  if (state().memory_is_out || state().in_use + bytes > kTotalMemory || state().used + bytes > kArenaBytes)
    return give(cudaErrorMemoryAllocation);
  *address = state().arena + state().used;
  state().used += bytes;
  state().in_use += bytes;
  state().blocks[*address] = {bytes, current_gpu};
  const MemoryAccess access;
  std::memset(*address, 0xff, bytes);
  return cudaSuccess;
}
// Waits for all that its GPU has to do.
cudaError_t cudaFree(void* address) {
  int gpu = -1;
  {
    const Lock lock;
    const auto it = state().blocks.find(address);
    if (it == state().blocks.end()) return give(cudaErrorInvalidValue);
    gpu = it->second.gpu;
  }
  progress_until([gpu] {
    return state().frozen.contains(gpu) ||
           std::all_of(state().streams.begin(), state().streams.end(),
                       [gpu](const auto& stream) { return stream->gpu != gpu || stream->steps.empty(); });
  });
  const Lock lock;
  const auto it = state().blocks.find(address);
  const size_t bytes = it->second.bytes;
  state().in_use -= bytes;
  {
    const MemoryAccess access;
    std::memset(address, 0xff, bytes);
  }
  forget_memory(address, bytes);
  state().blocks.erase(it);
  // The end of what is used: each access opens and closes all of it.
  const auto last = state().blocks.rbegin();
  state().used =
      last == state().blocks.rend()
          ? 0
          : static_cast<size_t>(static_cast<char*>(last->first) - state().arena) + last->second.bytes;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** address, size_t size_bytes) {
  FAKE_CALL("cudaMallocHost");
  *address = std::malloc(size_bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  FAKE_CALL("cudaStreamCreate");
  *stream = new_stream();
  return cudaSuccess;
}
// What is still in it runs; the object stays until reset.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock;
  stream->destroyed = true;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  { FAKE_CALL("cudaStreamSynchronize"); }
  CUstream_st* target;
  uint64_t wanted;
  {
    const Lock lock;
    target = stream_of(stream);
    wanted = target->num_enqueued;
  }
  progress_until([&] { return target->num_done >= wanted || is_broken(target->gpu); });
  const Lock lock;
  if (is_broken(target->gpu)) return give(cudaErrorIllegalAddress);
  merge(state().host_clocks[target->gpu], target->clock);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  FAKE_CALL("cudaEventCreate");
  state().events.push_back(std::make_unique<CUevent_st>());
  *event = state().events.back().get();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  FAKE_CALL("cudaEventRecord");
  CUstream_st* target = stream_of(stream);
  event->gpu = target->gpu;
  event->clock = std::make_shared<Clock>();
  enqueue(stream, [event, target, clock = event->clock, generation = ++event->recorded] {
    event->reached = std::max(event->reached, generation);
    *clock = target->clock;
    return true;
  });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  FAKE_CALL("cudaStreamWaitEvent");
  enqueue(stream, [event, target = stream_of(stream), clock = event->clock, generation = event->recorded] {
    if (event->reached < generation) return false;
    merge(target->clock, *clock);
    return true;
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  FAKE_CALL("cudaEventQuery");
  for (uint32_t i = random_below(8); i > 0; --i) progress();
  if (is_broken(event->gpu)) return give(cudaErrorIllegalAddress);
  if (event->reached < event->recorded) return give(cudaErrorNotReady);
  merge(state().host_clocks[event->gpu], *event->clock);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  { FAKE_CALL("cudaEventSynchronize"); }
  uint64_t wanted;
  std::shared_ptr<Clock> clock;
  {
    const Lock lock;
    wanted = event->recorded;
    clock = event->clock;
  }
  progress_until([&] { return event->reached >= wanted || is_broken(event->gpu); });
  const Lock lock;
  if (is_broken(event->gpu)) return give(cudaErrorIllegalAddress);
  merge(state().host_clocks[event->gpu], *clock);
  return cudaSuccess;
}

// Time does not pass here.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0F;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  FAKE_CALL("cudaMemcpyAsync");
  if (!is_device(to) && !is_device(from)) return give(cudaErrorInvalidValue);
  enqueue(stream, [=, target = stream_of(stream)] {
    count_operation(target);
    touch(target, "cudaMemcpyAsync", from, size_bytes, false);
    touch(target, "cudaMemcpyAsync", to, size_bytes, true);
    const MemoryAccess access;
    std::memcpy(to, from, size_bytes);
    return true;
  });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, size_bytes, kind, nullptr);
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}

}  // extern "C"
