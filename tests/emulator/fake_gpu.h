// A CUDA runtime and an NCCL without a GPU, for tests: fake_cuda.cpp and fake_nccl.cpp define the functions
// of cuda_runtime.h and nccl.h that the backends call. A program that links them has several GPUs; its ranks
// are threads, each with a GPU of its own.
//
// Nothing runs when it is enqueued. Streams advance while somebody asks for an event or waits for a stream,
// in random order as far as streams and events allow, on all GPUs. Fresh memory is NaN (all bits set), and
// device memory is accessible inside operations only: a host that touches it dies by SIGSEGV. An operation of
// NCCL runs when it is the next one of its stream on all its ranks. Memory that two streams use without a
// wait between them is a violation that names both operations (happens_before.h).
//
// What it cannot show: speed, overlap, the quirks of the driver and of NCCL, and rules that it has wrong
// itself.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace polyreme::fake_gpu {

// Forgets everything: `num_gpus` fresh GPUs, streams advance by `seed`.
void reset(int num_gpus, uint64_t seed);
// The n-th call of `function` ("ncclAllReduce", "cudaMalloc", ...) from now on fails with `code`; n from 1.
void fail_call(const std::string& function, int n, int code);
// No more memory on any GPU.
void take_memory();
// An illegal address on this GPU: every call that concerns it fails from now on, and nothing of it runs.
void break_gpu(int index);
// A rank that went away: what it enqueued never runs, and its NCCL communicators report nothing any more.
void freeze_gpu(int index);
// NCCL communicators of this GPU that were made and neither destroyed nor aborted.
int num_open_communicators(int gpu);
// Groups of aborts so far.
int num_abort_groups();
// Rules of CUDA's kernels and of NCCL that were broken, as texts.
std::vector<std::string> violations();

// ---- between the files of the emulator ----
void violation(const std::string& text);
// A step of a stream: false if it cannot run yet, then it is asked again. Runs under the lock of the
// emulator.
using Step = std::function<bool()>;
void enqueue(cudaStream_t stream, Step step);
void enqueue_launch(cudaStream_t stream, const std::string& name, std::function<void()> body);
// What an operation of NCCL does, while it runs: it counts in its stream, which then has seen what others
// have.
void count_operation(cudaStream_t stream);
void see(cudaStream_t stream, cudaStream_t other);
void touch(cudaStream_t stream, const char* name, const void* begin, size_t bytes, bool writes);
// The GPU of a stream.
int gpu_of(cudaStream_t stream);
// 0, or the code with which this call of `function` is to fail.
int failure_of(const char* function);
// A random number below `bound`.
uint32_t random_below(uint32_t bound);
// Device memory is accessible while it lives.
class MemoryAccess {
 public:
  MemoryAccess();
  ~MemoryAccess();
};
// The emulator's one lock.
class Lock {
 public:
  Lock();
  ~Lock();
};
void reset_nccl();

}  // namespace polyreme::fake_gpu
