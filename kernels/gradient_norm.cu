// norm_kernel: grad [count] in blocks of kNormBlock.
// Grid: one-dimensional; four threads hold the sixteen accumulators of a block, thread q those of lanes 4 q
// to 4 q + 3, so a load instruction of a warp reads 64 bytes of eight blocks. Strides of the whole grid.
// Bytes per element: 4 read, 4 written where it is scaled. Memory-bound; 16-byte loads, four in flight.
// Accumulator: fp64 inside a block of 1024, exact integers in shared memory between them.
// exact_sum_kernel: one thread per element, 4 bytes read. carry_kernel and clip_kernel: one thread.
#include "kernels/elements.cuh"
#include "kernels/exact.cuh"
#include "kernels/gradient_norm.cuh"
#include "kernels/norm_block.cuh"

namespace polyreme::kernels {
namespace {

__device__ void clear_limbs(Limb* limbs) {
  for (int i = static_cast<int>(threadIdx.x); i < exact::kLimbs; i += static_cast<int>(blockDim.x))
    limbs[i] = 0;
  __syncthreads();
}
__device__ void flush_limbs(const Limb* limbs, int64_t* to) {
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < exact::kLimbs; i += static_cast<int>(blockDim.x))
    if (limbs[i] != 0) atomicAdd(reinterpret_cast<Limb*>(to) + i, limbs[i]);
}

// Four elements of a block: scaled and written back, checked, squared.
template <int kCount>
__device__ void take(const PolyremeGradientNorm& args, int64_t at, int first, float scale, double (&sum)[4],
                     bool& finite) {
  float x[kCount];
  load_pack(args.grad + at, x);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (args.scale != nullptr) x[e] = x[e] * scale;
    finite = finite && x[e] - x[e] == 0.0f;
    const auto wide = static_cast<double>(x[e]);
    sum[first + e] = sum[first + e] + wide * wide;
  }
  if (args.scale != nullptr) store_pack(args.grad + at, x);
}

__global__ void norm_kernel(PolyremeGradientNorm args, bool packs) {
  POLYREME_SHARED(Limb, limbs, exact::kLimbs);
  clear_limbs(limbs);
  const float scale = args.scale == nullptr ? 1.0f : *args.scale;
  const int64_t num_blocks = (args.count + kNormBlock - 1) / kNormBlock;
  const int quarter = static_cast<int>(threadIdx.x) % kThreadsOfBlock;
  bool finite = true;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kBlocksAtOnce; base < num_blocks;
       base += static_cast<int64_t>(gridDim.x) * kBlocksAtOnce) {
    const int64_t block = base + threadIdx.x / kThreadsOfBlock;
    const int64_t begin = block * kNormBlock + quarter * 4;
    const int64_t end = (block + 1) * kNormBlock < args.count ? (block + 1) * kNormBlock : args.count;
    double sum[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int64_t i = begin; i < end; i += kStep) {
      if (packs && i + 4 <= end) {
        take<4>(args, i, 0, scale, sum, finite);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (i + e < end) take<1>(args, i + e, e, scale, sum, finite);
      }
    }
    const double squares = add_accumulators(sum);
    if (quarter == 0 && block < num_blocks && args.limbs != nullptr) exact::add(limbs, squares);
  }
  if (!finite && args.overflow != nullptr) atomicMax(args.overflow, 1);
  if (args.limbs != nullptr) flush_limbs(limbs, args.limbs);
}

__global__ void exact_sum_kernel(PolyremeExactSum args) {
  POLYREME_SHARED(Limb, limbs, exact::kLimbs);
  clear_limbs(limbs);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < args.count; i += stride)
    exact::add(limbs, static_cast<double>(args.x[i]));
  flush_limbs(limbs, args.limbs);
}

__global__ void carry_kernel(int64_t* limbs) { exact::propagate(limbs); }

__global__ void clip_kernel(PolyremeClipScale args) {
  POLYREME_SHARED(int64_t, limbs, exact::kLimbs);
  for (int i = 0; i < exact::kLimbs; ++i) limbs[i] = args.limbs[i];
  const double norm = sqrt(exact::value(limbs)) * args.multiplier;
  const auto limit = static_cast<double>(args.max_norm);
  const double clip = limit > 0 && norm > limit ? limit / norm : 1.0;
  *args.scale = norm <= 1.7976931348623157e308 ? static_cast<float>(args.multiplier * clip) : quiet_nan();
}

}  // namespace

cudaError_t launch_gradient_norm(const PolyremeGradientNorm& args, cudaStream_t stream) {
  if (args.count < 0) return cudaErrorInvalidValue;
  if (args.count == 0) return cudaSuccess;
  void (*kernel)(PolyremeGradientNorm, bool) = &norm_kernel;
  POLYREME_LAUNCH(kernel, blocks_for(args.count, int64_t{kBlocksAtOnce} * kNormBlock), kThreads, stream, args,
                  packs_fit(args.grad));
  if (args.limbs != nullptr) {
    void (*carry)(int64_t*) = &carry_kernel;
    POLYREME_LAUNCH(carry, 1, 1, stream, args.limbs);
  }
  return cudaGetLastError();
}

cudaError_t launch_exact_sum(const PolyremeExactSum& args, cudaStream_t stream) {
  if (args.count < 0 || args.count >= int64_t{1} << 30) return cudaErrorInvalidValue;
  if (args.count == 0) return cudaSuccess;
  void (*kernel)(PolyremeExactSum) = &exact_sum_kernel;
  POLYREME_LAUNCH(kernel, blocks_for(args.count, kThreads * 16), kThreads, stream, args);
  void (*carry)(int64_t*) = &carry_kernel;
  POLYREME_LAUNCH(carry, 1, 1, stream, args.limbs);
  return cudaGetLastError();
}

cudaError_t launch_clip_scale(const PolyremeClipScale& args, cudaStream_t stream) {
  void (*kernel)(PolyremeClipScale) = &clip_kernel;
  POLYREME_LAUNCH(kernel, 1, 1, stream, args);
  return cudaGetLastError();
}

}  // namespace polyreme::kernels
