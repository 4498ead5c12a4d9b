// How kernels are started and how they get shared memory. Files that keep to these macros also run on the CPU
// in tests (tests/emulator/kernel_launch.h): there the macros, barriers, shuffles, votes and atomics are
// functions of the emulator. scripts/check_layers.py refuses what would go past them.
//
//   POLYREME_LAUNCH(kernel, blocks, threads, stream, arguments...)           kernel: a function pointer
//   POLYREME_LAUNCH_SHARED(kernel, blocks, threads, shared_bytes, stream, arguments...)
//   POLYREME_SHARED(type, name, count)      in a kernel: `name`, an array of the block
//   POLYREME_DYNAMIC_SHARED(type, name)     in a kernel: `name`, the shared_bytes of the launch, 16-byte
//   aligned
#pragma once

#include <cuda_runtime.h>

#ifdef __CUDACC__
#define POLYREME_LAUNCH_SHARED(kernel, blocks, threads, shared_bytes, stream, ...) \
  (kernel)<<<(blocks), (threads), (shared_bytes), (stream)>>>(__VA_ARGS__)
#define POLYREME_SHARED(type, name, count) __shared__ type name[count]
#define POLYREME_DYNAMIC_SHARED(type, name)                         \
  extern __shared__ __align__(16) unsigned char polyreme_dynamic[]; \
  type* const name = reinterpret_cast<type*>(polyreme_dynamic)
#else
#include "emulator/kernel_launch.h"
#endif

#define POLYREME_LAUNCH(kernel, blocks, threads, stream, ...) \
  POLYREME_LAUNCH_SHARED(kernel, blocks, threads, 0, stream, __VA_ARGS__)
