// How kernels are started. Files that keep to this macro, and use neither __shared__ nor barriers, also
// run on the CPU in tests (tests/emulator/kernel_launch.h), thread by thread.
#pragma once

#include <cuda_runtime.h>

#ifdef __CUDACC__
// `kernel` is a function pointer.
#define POLYREME_LAUNCH(kernel, blocks, threads, stream, ...) \
  (kernel)<<<(blocks), (threads), 0, (stream)>>>(__VA_ARGS__)
#else
#include "emulator/kernel_launch.h"
#endif
