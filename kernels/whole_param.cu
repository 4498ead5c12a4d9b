// Flat arrays of `count` elements.
// moments_kernel. Grid: as norm_kernel of gradient_norm.cu, four threads a block of kNormBlock elements, see
// norm_block.cuh. The other kernels. Grid: one-dimensional, one thread per four elements, strides of the
// whole grid. Bytes per element: LAMB 16 read and 8 written, then 12 and 4; momentum 8 and 8; sums 8 and 4.
// Memory-bound. Accumulator: fp64 inside a block of 1024, exact integers in shared memory between them;
// elsewhere none.
#include "kernels/elements.cuh"
#include "kernels/exact.cuh"
#include "kernels/norm_block.cuh"
#include "kernels/whole_param.cuh"

namespace polyreme::kernels {
namespace {

constexpr int kOfThread = 4;

// LAMB's direction from moments that are up to date, as lamb_direction of the CPU forms it.
struct Direction {
  float step_size, eps, decay;
  __device__ explicit Direction(const PolyremeLamb& args)
      : step_size(args.step_size * args.sqrt_bias2), eps(args.eps * args.sqrt_bias2), decay(args.decay) {}
  __device__ float of(float param, float m, float v) const {
    return fmaf(decay, param, step_size * m / (sqrtf(v) + eps));
  }
};

// One element: moments up to date, squares added.
__device__ void take(const PolyremeLamb& args, const Direction& direction, float scale, int64_t at,
                     double& param_squares, double& direction_squares) {
  const float g = args.grad[at] * scale, old_m = args.m[at], param = args.param[at];
  const float m = fmaf(args.new_m, g - old_m, old_m);
  const float v = fmaf(args.new_v * g, g, args.v[at] * args.keep_v);
  args.m[at] = m;
  args.v[at] = v;
  const auto p = static_cast<double>(param), r = static_cast<double>(direction.of(param, m, v));
  param_squares = param_squares + p * p;
  direction_squares = direction_squares + r * r;
}

__global__ void moments_kernel(PolyremeLamb args) {
  POLYREME_SHARED(Limb, limbs, 2 * exact::kLimbs);
  const float scale = *args.scale;
  if (scale != scale) return;
  for (int i = static_cast<int>(threadIdx.x); i < 2 * exact::kLimbs; i += kThreads) limbs[i] = 0;
  __syncthreads();
  const Direction direction(args);
  const int64_t num_blocks = (args.count + kNormBlock - 1) / kNormBlock;
  const int quarter = static_cast<int>(threadIdx.x) % kThreadsOfBlock;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kBlocksAtOnce; base < num_blocks;
       base += static_cast<int64_t>(gridDim.x) * kBlocksAtOnce) {
    const int64_t block = base + threadIdx.x / kThreadsOfBlock;
    const int64_t end = (block + 1) * kNormBlock < args.count ? (block + 1) * kNormBlock : args.count;
    double of_param[4] = {0, 0, 0, 0}, of_direction[4] = {0, 0, 0, 0};
    for (int64_t i = block * kNormBlock + quarter * 4; i < end; i += kStep) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (i + e < end) take(args, direction, scale, i + e, of_param[e], of_direction[e]);
    }
    const double param_squares = add_accumulators(of_param),
                 direction_squares = add_accumulators(of_direction);
    if (quarter == 0 && block < num_blocks) {
      exact::add(limbs, param_squares);
      exact::add(limbs + exact::kLimbs, direction_squares);
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < 2 * exact::kLimbs; i += kThreads)
    if (limbs[i] != 0) atomicAdd(reinterpret_cast<Limb*>(args.sums) + i, limbs[i]);
}

__global__ void carry_kernel(int64_t* sums) { exact::propagate(sums + threadIdx.x * exact::kLimbs); }

// The root of a sum, by one thread; `limbs` is memory of the block.
__device__ double root(const int64_t* sum, int64_t* limbs) {
  for (int i = 0; i < exact::kLimbs; ++i) limbs[i] = sum[i];
  return sqrt(exact::value(limbs));
}

__global__ void apply_kernel(PolyremeLamb args, bool packs) {
  POLYREME_SHARED(int64_t, limbs, exact::kLimbs);
  POLYREME_SHARED(float, factors, 1);
  const float scale = *args.scale;
  if (scale != scale) return;
  if (threadIdx.x == 0) {
    const double weight_norm = root(args.sums, limbs),
                 direction_norm = root(args.sums + exact::kLimbs, limbs);
    const double ratio = weight_norm > 0 && direction_norm > 0 ? weight_norm / direction_norm : 1.0;
    factors[0] = static_cast<float>(args.lr * ratio);
  }
  __syncthreads();
  const float factor = factors[0];
  const Direction direction(args);
  for_elements<kOfThread>(args.count, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    float param[kCount], m[kCount], v[kCount];
    load_pack(args.param + i, param);
    load_pack(args.m + i, m);
    load_pack(args.v + i, v);
#pragma unroll
    for (int e = 0; e < kCount; ++e) param[e] = fmaf(-factor, direction.of(param[e], m[e], v[e]), param[e]);
    store_pack(args.param + i, param);
  });
}

__global__ void momentum_kernel(PolyremeMomentum args, bool packs) {
  const float scale = *args.scale;
  const bool skips = scale != scale;
  for_elements<kOfThread>(args.count, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    float grad[kCount], m[kCount], out[kCount] = {};
    if (!skips) {
      load_pack(args.grad + i, grad);
      load_pack(args.m + i, m);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const float g = grad[e] * scale;
        m[e] = fmaf(args.new_m, g - m[e], m[e]);
        out[e] = fmaf(args.momentum, m[e] - g, g);
      }
      store_pack(args.m + i, m);
    }
    store_pack(args.out + i, out);
  });
}

__global__ void weighted_sum_kernel(PolyremeWeightedSum args, bool packs) {
  POLYREME_SHARED(int64_t, limbs, exact::kLimbs);
  POLYREME_SHARED(float, factors, 1);
  if (args.scale != nullptr && *args.scale != *args.scale) return;
  if (threadIdx.x == 0)
    factors[0] =
        args.limbs == nullptr ? args.a : static_cast<float>(1.0 / (root(args.limbs, limbs) + args.tiny));
  __syncthreads();
  const float a = factors[0];
  for_elements<kOfThread>(args.count, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    float x[kCount], y[kCount];
    load_pack(args.x + i, x);
    if (args.y != nullptr) load_pack(args.y + i, y);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      x[e] = a * x[e];
      if (args.y != nullptr) x[e] = fmaf(args.b, y[e], x[e]);
    }
    store_pack(args.out + i, x);
  });
}

template <typename Args>
cudaError_t launch_flat(void (*kernel)(Args, bool), const Args& args, bool packs, cudaStream_t stream) {
  if (args.count < 0) return cudaErrorInvalidValue;
  if (args.count == 0) return cudaSuccess;
  POLYREME_LAUNCH(kernel, blocks_for(args.count, kThreads * kOfThread), kThreads, stream, args, packs);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_lamb_moments(const PolyremeLamb& args, cudaStream_t stream) {
  if (args.count < 0) return cudaErrorInvalidValue;
  if (args.count == 0) return cudaSuccess;
  void (*kernel)(PolyremeLamb) = &moments_kernel;
  POLYREME_LAUNCH(kernel, blocks_for(args.count, int64_t{kBlocksAtOnce} * kNormBlock), kThreads, stream,
                  args);
  void (*carry)(int64_t*) = &carry_kernel;
  POLYREME_LAUNCH(carry, 1, 2, stream, args.sums);
  return cudaGetLastError();
}

cudaError_t launch_lamb_apply(const PolyremeLamb& args, cudaStream_t stream) {
  return launch_flat(&apply_kernel, args, packs_fit(args.param, args.m, args.v), stream);
}
cudaError_t launch_muon_momentum(const PolyremeMomentum& args, cudaStream_t stream) {
  return launch_flat(&momentum_kernel, args, packs_fit(args.grad, args.m, args.out), stream);
}
cudaError_t launch_weighted_sum(const PolyremeWeightedSum& args, cudaStream_t stream) {
  return launch_flat(&weighted_sum_kernel, args, packs_fit(args.x, args.y, args.out), stream);
}

}  // namespace polyreme::kernels
