// begin_kernel: one thread, out = the hash of the size. sum_kernel: x of size_bytes, a term of every four
// bytes. Grid: one-dimensional, one thread per four bytes, strides of the whole grid; each block adds its sum
// to `out`. Bytes per byte: 1 read; some ten integer operations per four bytes. Accumulator: uint64, wraps.
#include "kernels/elements.cuh"
#include "kernels/fingerprint.cuh"
#include "kernels/warp.cuh"

namespace polyreme::kernels {
namespace {

using Word = unsigned long long;

// The finalizer of splitmix64 (Steele et al. 2014).
__device__ Word mix(Word z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

__global__ void begin_kernel(PolyremeFingerprint args) {
  *args.out = mix(static_cast<Word>(args.size_bytes));
}

__global__ void sum_kernel(PolyremeFingerprint args) {
  const auto* bytes = static_cast<const unsigned char*>(args.x);
  const int64_t num_words = (args.size_bytes + 3) / 4;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  Word sum = 0;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < num_words; n += stride) {
    uint32_t value = 0;
    if (4 * n + 4 <= args.size_bytes && reinterpret_cast<uintptr_t>(bytes) % 4 == 0) {
      value = reinterpret_cast<const uint32_t*>(bytes)[n];
    } else {
      for (int i = 0; i < 4 && 4 * n + i < args.size_bytes; ++i)
        value |= static_cast<uint32_t>(bytes[4 * n + i]) << (8 * i);
    }
    sum += mix(static_cast<Word>(n) << 32 ^ value);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) atomicAdd(reinterpret_cast<Word*>(args.out), sum);
}

}  // namespace

cudaError_t launch_fingerprint(const PolyremeFingerprint& args, cudaStream_t stream) {
  if (args.size_bytes < 0) return cudaErrorInvalidValue;
  void (*begin)(PolyremeFingerprint) = &begin_kernel;
  POLYREME_LAUNCH(begin, 1, 1, stream, args);
  if (args.size_bytes > 0) {
    void (*sum)(PolyremeFingerprint) = &sum_kernel;
    POLYREME_LAUNCH(sum, blocks_for((args.size_bytes + 3) / 4, int64_t{kThreads} * 8), kThreads, stream,
                    args);
  }
  return cudaGetLastError();
}

}  // namespace polyreme::kernels
