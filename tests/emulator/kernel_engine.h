// Runs the blocks of a kernel on the CPU, one after the other, each CUDA thread on a fiber of its own. A
// thread runs until it waits at a barrier, a shuffle or a vote; then the ready thread of highest priority
// goes on. Priorities are random (fake_gpu::reset seeds them), of warps and of threads, and change now and
// then (the idea of PCT: Burckhardt et al. 2010), so that some threads run far ahead: what a missing barrier
// lets them read too early or overwrite too early shows as wrong numbers.
//
// Shared memory is fresh for every block: all bits set, from the heap, so that AddressSanitizer knows its
// ends. Threads that wait for what cannot come, meetings of a warp that its threads reach at different
// places, and lanes that left while others count on them are violations (fake_gpu.h); the block is then given
// up.
//
// Not seen: updates that a missing atomic loses (a thread is never interrupted between two meetings), weak
// memory order between blocks, speed, bank conflicts, limits of registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

namespace polyreme::fake_gpu {

// The built-in variables of the thread that runs.
inline thread_local dim3 kernel_grid, kernel_block;
inline thread_local uint3 kernel_block_index, kernel_thread_index;

struct LaunchShape {
  dim3 blocks, threads;
  size_t shared_bytes = 0;
};
// Calls `thread` once for each CUDA thread. Threads of different blocks never overlap.
void run_grid(const LaunchShape& shape, const std::function<void()>& thread);

// ---- what kernels call ----
// An array of the running block, named by the address `key`.
void* shared_array(const void* key, size_t size_bytes);
void* dynamic_shared();

enum class Vote { kAny, kAll };
// All threads of the block that still run meet here. `line` tells places apart.
void sync_threads(int line);
// The same; 1 if `value` is not 0 on any (all) of them.
int sync_threads_vote(int line, Vote vote, int value);

// The lanes of `mask` meet; each leaves a value and then sees all.
struct WarpValues {
  const uint64_t* values;  // [32], valid until the next meeting of this mask
  uint32_t mask;
  int lane;
};
WarpValues meet_warp(int line, uint32_t mask, uint64_t value);
// That lane `source` of a shuffle takes part; reports it otherwise.
void check_source(const WarpValues& warp, int source);

template <typename T>
T shuffle(int line, uint32_t mask, T value, int (*source_of)(int lane, int argument), int argument) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const WarpValues warp = meet_warp(line, mask, bits);
  const int source = source_of(warp.lane, argument);
  check_source(warp, source);
  T result;
  std::memcpy(&result, &warp.values[source], sizeof result);
  return result;
}
uint32_t ballot(int line, uint32_t mask, int predicate);

}  // namespace polyreme::fake_gpu
