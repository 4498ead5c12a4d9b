// What kernels/launch.h needs to run a kernel on the CPU: the built-in variables, and a launch that calls the
// kernel once for each thread, in order, when its stream comes to it. Enough for kernels whose threads do not
// talk to each other; others do not compile here.
#pragma once

#include <functional>

#include "emulator/fake_gpu.h"

namespace polyreme::fake_gpu {

inline thread_local dim3 kernel_grid, kernel_block;
inline thread_local uint3 kernel_block_index, kernel_thread_index;

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, cudaStream_t stream,
            Arguments... arguments) {
  enqueue_launch(stream, [=] {
    kernel_grid = dim3(blocks);
    kernel_block = dim3(threads);
    for (unsigned block = 0; block < blocks; ++block)
      for (unsigned thread = 0; thread < threads; ++thread) {
        kernel_block_index = {block, 0, 0};
        kernel_thread_index = {thread, 0, 0};
        kernel(arguments...);
      }
  });
}

}  // namespace polyreme::fake_gpu

#define gridDim (::polyreme::fake_gpu::kernel_grid)
#define blockDim (::polyreme::fake_gpu::kernel_block)
#define blockIdx (::polyreme::fake_gpu::kernel_block_index)
#define threadIdx (::polyreme::fake_gpu::kernel_thread_index)
#define POLYREME_LAUNCH(kernel, blocks, threads, stream, ...) \
  ::polyreme::fake_gpu::launch(kernel, blocks, threads, stream, __VA_ARGS__)
