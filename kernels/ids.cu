// check_ids_kernel: ids [count] -> two words.
// Grid: one block of 1024 threads, strides over the ids: a launch of its own costs more than they do.
// Bytes per element: 4 read. Accumulator: int32, minimum.
#include "kernels/ids.cuh"
#include "kernels/warp.cuh"

namespace polyreme::kernels {
namespace {

constexpr int kIdThreads = 1024;

__global__ void check_ids_kernel(const int32_t* ids, int32_t count, int64_t end, int32_t other,
                                 int32_t* bad) {
  POLYREME_SHARED(int32_t, first, kIdThreads / kWarp);
  int32_t found = kNoneIsBad;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kIdThreads)
    if ((ids[i] < 0 || ids[i] >= end) && ids[i] != other) {
      found = i;
      break;
    }
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int round = 0; round < 2; ++round) {
#pragma unroll
    for (int by = kWarp / 2; by > 0; by /= 2) {
      const int32_t theirs = __shfl_xor_sync(kAllLanes, found, by);
      found = theirs < found ? theirs : found;
    }
    if (round == 1) break;
    if (lane == 0) first[warp] = found;
    __syncthreads();
    found = first[lane];
  }
  if (threadIdx.x == 0) {
    bad[0] = found;
    bad[1] = found == kNoneIsBad ? 0 : ids[found];
  }
}

}  // namespace

cudaError_t launch_check_ids(const int32_t* ids, int64_t count, int64_t end, int32_t other, int32_t* bad,
                             cudaStream_t stream) {
  if (count > INT32_MAX - kIdThreads) return cudaErrorInvalidValue;
  void (*kernel)(const int32_t*, int32_t, int64_t, int32_t, int32_t*) = &check_ids_kernel;
  POLYREME_LAUNCH(kernel, 1, kIdThreads, stream, ids, static_cast<int32_t>(count), end, other, bad);
  return cudaGetLastError();
}

}  // namespace polyreme::kernels
