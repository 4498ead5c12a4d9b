// The one exported function of libpolyreme_cuda.so, and the calls behind it.
//
// self_test_kernel: shapes out [n], one thread per element in a single block, 4 bytes written per
// element, no accumulation.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "device/cuda/cuda_table.h"

namespace {

constexpr int kSelfTestThreads = 64;
// Not one of CUDA's own numbers.
constexpr int kWrongResult = -1;

PolyremeCudaStatus status_of(cudaError_t error) {
  PolyremeCudaStatus status{static_cast<int32_t>(error), ""};
  if (error != cudaSuccess)
    std::snprintf(status.text, sizeof status.text, "%s (%d): %s", cudaGetErrorName(error),
                  static_cast<int>(error), cudaGetErrorString(error));
  return status;
}

PolyremeCudaStatus runtime_version(int32_t* version) { return status_of(cudaRuntimeGetVersion(version)); }

PolyremeCudaStatus driver_version(int32_t* version) { return status_of(cudaDriverGetVersion(version)); }

PolyremeCudaStatus device_count(int32_t* count) {
  *count = 0;
  const cudaError_t error = cudaGetDeviceCount(count);
  if (error != cudaSuccess) *count = 0;
  return status_of(error);
}

PolyremeCudaStatus device_info(int32_t index, PolyremeCudaGpu* gpu) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, index);
  if (error != cudaSuccess) return status_of(error);
  *gpu = {};
  static_assert(sizeof gpu->name == sizeof properties.name);
  std::memcpy(gpu->name, properties.name, sizeof gpu->name);
  gpu->compute_major = properties.major;
  gpu->compute_minor = properties.minor;
  gpu->multiprocessors = properties.multiProcessorCount;
  gpu->total_memory_bytes = properties.totalGlobalMem;
  return status_of(cudaSuccess);
}

__host__ __device__ uint32_t expected_word(uint32_t i) { return i * 2654435761u + 1u; }

__global__ void self_test_kernel(uint32_t* out) { out[threadIdx.x] = expected_word(threadIdx.x); }

// `words` gets what the kernel wrote.
cudaError_t run_self_test(uint32_t* device_words, uint32_t* words) {
  self_test_kernel<<<1, kSelfTestThreads>>>(device_words);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return cudaMemcpy(words, device_words, kSelfTestThreads * sizeof *words, cudaMemcpyDeviceToHost);
}

PolyremeCudaStatus self_test(int32_t index) {
  int previous = 0;
  cudaError_t error = cudaGetDevice(&previous);
  if (error == cudaSuccess) error = cudaSetDevice(index);
  uint32_t* device_words = nullptr;
  uint32_t words[kSelfTestThreads] = {};
  if (error == cudaSuccess) error = cudaMalloc(&device_words, sizeof words);
  if (error == cudaSuccess) error = run_self_test(device_words, words);
  // The first error is the one to report; the clean-up may fail for the same reason.
  if (device_words != nullptr) cudaFree(device_words);
  cudaSetDevice(previous);
  if (error != cudaSuccess) return status_of(error);
  for (uint32_t i = 0; i < kSelfTestThreads; ++i) {
    if (words[i] == expected_word(i)) continue;
    PolyremeCudaStatus status{kWrongResult, ""};
    std::snprintf(status.text, sizeof status.text,
                  "a test kernel wrote 0x%08x at element %u; expected 0x%08x", words[i], i, expected_word(i));
    return status;
  }
  return status_of(cudaSuccess);
}

constexpr PolyremeCudaTable kTable = {
    POLYREME_CUDA_TABLE_VERSION,
    sizeof(PolyremeCudaTable),
    runtime_version,
    driver_version,
    device_count,
    device_info,
    self_test,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const PolyremeCudaTable* polyreme_cuda_table() {
  return &kTable;
}
