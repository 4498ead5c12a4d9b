// Where the tests of kernels run: on the emulator, or, compiled with POLYREME_ON_GPU, on a real GPU
// (scripts/gpu_check.sh). Memory is visible to the host between kernels in both.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#ifdef POLYREME_ON_GPU

namespace polyreme::kernel_test {

// A GPU has no seeds: every case runs once.
inline const std::vector<uint64_t> kSeeds = {1};
inline void start_case(uint64_t) {}
inline std::vector<std::string> violations() { return {}; }
inline std::shared_ptr<void> allocate(size_t size_bytes) {
  void* memory = nullptr;
  if (cudaMallocManaged(&memory, size_bytes) != cudaSuccess) std::abort();
  return {memory, [](void* address) { cudaFree(address); }};
}

}  // namespace polyreme::kernel_test

#else

#include "emulator/fake_gpu.h"

namespace polyreme::kernel_test {

inline const std::vector<uint64_t> kSeeds = {1, 2, 3};
inline void start_case(uint64_t seed) { fake_gpu::reset(1, seed); }
inline std::vector<std::string> violations() { return fake_gpu::violations(); }
// From the heap: AddressSanitizer knows its ends.
inline std::shared_ptr<void> allocate(size_t size_bytes) { return {std::malloc(size_bytes), std::free}; }

}  // namespace polyreme::kernel_test

#endif
