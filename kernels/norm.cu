// norm_forward_kernel, norm_backward_kernel: x, dy, y, dx [rows, cols]; gamma, beta [cols]; mean, rstd
// [rows]. Grid: one-dimensional, one warp a row and up to eight warps a block, strides of the whole grid over
// rows. Bytes per element of size s: forward s read, s written; backward 2s and s. A row is read from memory
// once, in 16-byte loads, and staged in shared memory as fp32 (backward: 8 bytes per element); rows that do
// not fit its 48 KiB are read again from the caches in each pass. Blocks use as much shared memory as rows
// need: what a multiprocessor holds of it is in flight. Accumulator: fp32, 64 (first sum) or 32 chains in the
// CPU's order (warp.cuh).
#include "kernels/elements.cuh"
#include "kernels/norm.cuh"
#include "kernels/warp.cuh"

namespace polyreme::kernels {
namespace {

constexpr int kMaxWarps = 8;
constexpr int64_t kSharedBytes = 48 << 10;

// body(i, Int<n>{}) for all elements of a row, by one warp.
template <int kCount, typename Body>
__device__ void for_row(int64_t cols, bool packs, int lane, Body body) {
  const int64_t num_packs = packs ? cols / kCount : 0;
  for (int64_t i = lane; i < num_packs; i += kWarp) body(i * kCount, Int<kCount>{});
  for (int64_t i = num_packs * kCount + lane; i < cols; i += kWarp) body(i, Int<1>{});
}

struct Moments {
  float mean, variance;
};

// The corrected two-pass algorithm (Chan, Golub & LeVeque 1983), as row_moments of the CPU's kernel.
template <typename Value>
__device__ Moments row_moments(int64_t cols, int lane, Value value) {
  const float inverse_n = 1.0f / static_cast<float>(cols);
  float low = 0.0f, high = 0.0f;  // accumulators `lane` and `lane` + 32 of 64
#pragma unroll 4
  for (int64_t i = lane; i < cols; i += 2 * kWarp) {
    low = low + value(i);
    if (i + kWarp < cols) high = high + value(i + kWarp);
  }
  const float first_mean = warp_sum(low + high) * inverse_n;
  float rest = 0.0f, square = 0.0f;
#pragma unroll 4
  for (int64_t i = lane; i < cols; i += kWarp) {
    const float d = value(i) - first_mean;
    rest = rest + d;
    square = fmaf(d, d, square);
  }
  const float correction = warp_sum(rest) * inverse_n;
  const float variance = warp_sum(square) * inverse_n - correction * correction;
  return {first_mean + correction, variance < 0.0f ? 0.0f : variance};
}

template <typename Value>
__device__ float row_mean_square(int64_t cols, int lane, Value value) {
  float low = 0.0f, high = 0.0f;  // accumulators `lane` and `lane` + 32 of 64
#pragma unroll 4
  for (int64_t i = lane; i < cols; i += 2 * kWarp) {
    const float x = value(i);
    low = fmaf(x, x, low);
    if (i + kWarp < cols) {
      const float far = value(i + kWarp);
      high = fmaf(far, far, high);
    }
  }
  return warp_sum(low + high) * (1.0f / static_cast<float>(cols));
}

template <typename T, typename Param, bool kStaged>
__global__ void norm_forward_kernel(PolyremeNormForward args, bool packs) {
  POLYREME_DYNAMIC_SHARED(float, shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t num_warps = static_cast<int64_t>(blockDim.x) / kWarp, cols = args.cols;
  float* staged = shared + warp * cols;
  const auto* gamma = static_cast<const Param*>(args.gamma);
  const auto* beta = static_cast<const Param*>(args.beta);
  for (int64_t row = blockIdx.x * num_warps + warp; row < args.rows; row += gridDim.x * num_warps) {
    const T* x = static_cast<const T*>(args.x) + row * cols;
    T* y = static_cast<T*>(args.y) + row * cols;
    if constexpr (kStaged) {
      for_row<kPack<T>>(cols, packs, lane, [&](int64_t i, auto pack) {
        constexpr int kCount = decltype(pack)::value;
        float values[kCount];
        load_pack(x + i, values);
        store_pack(staged + i, values);
      });
      __syncwarp();
    }
    const auto value = [&](int64_t i) { return kStaged ? staged[i] : to_float(x[i]); };
    float mean = 0.0f, rstd;
    if (args.mean != nullptr) {
      const Moments moments = row_moments(cols, lane, value);
      mean = moments.mean;
      rstd = 1.0f / sqrtf(moments.variance + args.eps);
    } else {
      rstd = 1.0f / sqrtf(row_mean_square(cols, lane, value) + args.eps);
    }
    if (lane == 0) {
      if (args.mean != nullptr) args.mean[row] = mean;
      args.rstd[row] = rstd;
    }
    for_row<kPack<T>>(cols, packs, lane, [&](int64_t i, auto pack) {
      constexpr int kCount = decltype(pack)::value;
      float g[kCount], b[kCount] = {}, values[kCount];
      if constexpr (kStaged) {
        load_pack(staged + i, values);
      } else {
        load_pack(x + i, values);
      }
      load_pack(gamma + i, g);
      if (beta != nullptr) load_pack(beta + i, b);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const float xhat = (values[e] - mean) * rstd;
        values[e] = beta != nullptr ? fmaf(xhat, g[e], b[e]) : xhat * g[e];
      }
      store_pack(y + i, values);
    });
    __syncwarp();  // the next row is staged over this one
  }
}

// g = dy * gamma and xhat of kCount elements.
template <int kCount, typename T, typename Param>
__device__ void load_products(const T* dy, const T* x, const Param* gamma, float mean, float rstd,
                              float (&g)[kCount], float (&xhat)[kCount]) {
  float weight[kCount];
  load_pack(dy, g);
  load_pack(x, xhat);
  load_pack(gamma, weight);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    g[e] = g[e] * weight[e];
    xhat[e] = (xhat[e] - mean) * rstd;
  }
}

template <typename T, typename Param, bool kStaged>
__global__ void norm_backward_kernel(PolyremeNormBackwardInput args, bool packs) {
  POLYREME_DYNAMIC_SHARED(float, shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t num_warps = static_cast<int64_t>(blockDim.x) / kWarp, cols = args.cols;
  float* staged_g = shared + 2 * warp * cols;
  float* staged_xhat = staged_g + cols;
  const auto* gamma = static_cast<const Param*>(args.gamma);
  const float inverse_n = 1.0f / static_cast<float>(cols);
  const bool centred = args.mean != nullptr;
  for (int64_t row = blockIdx.x * num_warps + warp; row < args.rows; row += gridDim.x * num_warps) {
    const T* dy = static_cast<const T*>(args.dy) + row * cols;
    const T* x = static_cast<const T*>(args.x) + row * cols;
    T* dx = static_cast<T*>(args.dx) + row * cols;
    const float mean = centred ? args.mean[row] : 0.0f, rstd = args.rstd[row];
    if constexpr (kStaged) {
      for_row<kPack<T>>(cols, packs, lane, [&](int64_t i, auto pack) {
        float g[decltype(pack)::value], xhat[decltype(pack)::value];
        load_products(dy + i, x + i, gamma + i, mean, rstd, g, xhat);
        store_pack(staged_g + i, g);
        store_pack(staged_xhat + i, xhat);
      });
      __syncwarp();
    }
    const auto load = [&](int64_t i, auto& g, auto& xhat) {
      if constexpr (kStaged) {
        load_pack(staged_g + i, g);
        load_pack(staged_xhat + i, xhat);
      } else {
        load_products(dy + i, x + i, gamma + i, mean, rstd, g, xhat);
      }
    };
    float sum = 0.0f, dot = 0.0f;
#pragma unroll 4
    for (int64_t i = lane; i < cols; i += kWarp) {
      float g[1], xhat[1];
      load(i, g, xhat);
      sum = sum + g[0];
      dot = fmaf(g[0], xhat[0], dot);
    }
    const float average = centred ? warp_sum(sum) * inverse_n : 0.0f;
    const float projection = warp_sum(dot) * inverse_n;
    for_row<kPack<T>>(cols, packs, lane, [&](int64_t i, auto pack) {
      constexpr int kCount = decltype(pack)::value;
      float g[kCount], xhat[kCount];
      load(i, g, xhat);
#pragma unroll
      for (int e = 0; e < kCount; ++e) g[e] = rstd * fmaf(-xhat[e], projection, g[e] - average);
      store_pack(dx + i, g);
    });
    __syncwarp();  // the next row is staged over this one
  }
}

// Calls launch(T{}, Param{}); Param is T or float.
template <typename Launch>
cudaError_t with_types(int32_t dtype, int32_t param_dtype, Launch launch) {
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if (static_cast<DType>(param_dtype) == DType::kF32) return launch(type, float{});
    return param_dtype == dtype ? launch(type, T{}) : cudaErrorInvalidValue;
  });
}

// What fits into shared memory.
struct Shape {
  unsigned blocks, threads;
  size_t shared_bytes;
  bool staged;
};
Shape shape_for(int64_t rows, int64_t row_bytes) {
  const bool staged = row_bytes <= kSharedBytes;
  const int64_t fit = staged ? kSharedBytes / row_bytes : kMaxWarps;
  const int64_t warps = fit < kMaxWarps ? fit : kMaxWarps;
  return {blocks_for(rows, warps), static_cast<unsigned>(warps * kWarp),
          static_cast<size_t>(staged ? warps * row_bytes : 0), staged};
}

}  // namespace

cudaError_t launch_norm_forward(const PolyremeNormForward& args, cudaStream_t stream) {
  if (args.rows < 0 || args.cols < 1 || (args.mean == nullptr) != (args.beta == nullptr))
    return cudaErrorInvalidValue;
  return with_types(args.dtype, args.param_dtype, [&](auto type, auto param) {
    using T = decltype(type);
    using P = decltype(param);
    if (args.rows == 0) return cudaSuccess;
    const Shape shape = shape_for(args.rows, args.cols * static_cast<int64_t>(sizeof(float)));
    const bool packs = packs_fit(args.x, args.gamma, args.beta, args.y) && args.cols % kPack<T> == 0;
    void (*kernel)(PolyremeNormForward, bool) =
        shape.staged ? &norm_forward_kernel<T, P, true> : &norm_forward_kernel<T, P, false>;
    POLYREME_LAUNCH_SHARED(kernel, shape.blocks, shape.threads, shape.shared_bytes, stream, args, packs);
    return cudaGetLastError();
  });
}

cudaError_t launch_norm_backward_input(const PolyremeNormBackwardInput& args, cudaStream_t stream) {
  if (args.rows < 0 || args.cols < 1) return cudaErrorInvalidValue;
  return with_types(args.dtype, args.param_dtype, [&](auto type, auto param) {
    using T = decltype(type);
    using P = decltype(param);
    if (args.rows == 0) return cudaSuccess;
    const Shape shape = shape_for(args.rows, 2 * args.cols * static_cast<int64_t>(sizeof(float)));
    const bool packs = packs_fit(args.x, args.gamma, args.dy, args.dx) && args.cols % kPack<T> == 0;
    void (*kernel)(PolyremeNormBackwardInput, bool) =
        shape.staged ? &norm_backward_kernel<T, P, true> : &norm_backward_kernel<T, P, false>;
    POLYREME_LAUNCH_SHARED(kernel, shape.blocks, shape.threads, shape.shared_bytes, stream, args, packs);
    return cudaGetLastError();
  });
}

}  // namespace polyreme::kernels
