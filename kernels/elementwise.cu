// flat_kernel, cast_kernel, fill_kernel: flat arrays of `count` elements; swiglu kernels: rows of `cols`.
// Grid: one-dimensional, one thread per 16 bytes of the narrowest array, strides of the whole grid.
// Bytes per element of size s: add 2s read, s written; GELU s and s, backward 2s and s; cast s and s'; SwiGLU
// 2s and s per output, backward 3s and 2s; accumulate s and 4, 4 written; scale s and s. Memory-bound; an exp
// is some twenty operations on the way. Accumulator: none, arithmetic is fp32.
#include "kernels/elements.cuh"
#include "kernels/elementwise.cuh"
#include "kernels/math.cuh"

namespace polyreme::kernels {
namespace {

// GELU as csrc/ops/cpu/kernels/elementwise.cpp forms it.
constexpr float kLinear = 1.5957691216057308f;
constexpr float kCubic = 0.07135481282553505f;

__device__ float minus_two_u(float x, float square) { return x * fmaf(square, -kCubic, -kLinear); }

struct Add {
  static constexpr bool kReadsY = true;
  __device__ static float apply(float x, float y) { return x + y; }
};
struct GeluForward {
  static constexpr bool kReadsY = false;
  __device__ static float apply(float x, float) { return x / (1.0f + exp_f32(minus_two_u(x, x * x))); }
};
struct GeluBackward {
  static constexpr bool kReadsY = true;
  __device__ static float apply(float x, float dy) {
    const float square = x * x;
    const float exponent = minus_two_u(x, square);
    const float e = exp_f32(80.0f < exponent ? 80.0f : exponent);  // NaN stays
    const float s = 1.0f / (1.0f + e);
    const float slope = fmaf(square, 3.0f * kCubic, kLinear);
    return dy * fmaf(x * slope, e * s * s, s);
  }
};

template <typename T, typename Function>
__global__ void flat_kernel(PolyremeElementwise args, bool packs) {
  const auto* x = static_cast<const T*>(args.x);
  const auto* y = static_cast<const T*>(args.y);
  auto* out = static_cast<T*>(args.out);
  for_elements<kPack<T>>(args.count, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    float a[kCount], b[kCount] = {};
    load_pack(x + i, a);
    if constexpr (Function::kReadsY) load_pack(y + i, b);
#pragma unroll
    for (int e = 0; e < kCount; ++e) a[e] = Function::apply(a[e], b[e]);
    store_pack(out + i, a);
  });
}

template <typename Function>
cudaError_t launch_flat(const PolyremeElementwise& args, cudaStream_t stream) {
  if (args.count < 0) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.count == 0) return cudaSuccess;
    void (*kernel)(PolyremeElementwise, bool) = &flat_kernel<T, Function>;
    POLYREME_LAUNCH(kernel, blocks_for(args.count, kThreads * kPack<T>), kThreads, stream, args,
                    packs_fit(args.x, args.y, args.out));
    return cudaGetLastError();
  });
}

template <typename From, typename To>
__global__ void cast_kernel(PolyremeCast args, bool packs) {
  const auto* from = static_cast<const From*>(args.from);
  auto* to = static_cast<To*>(args.to);
  constexpr int kOfThread = kPack < From >> kPack<To> ? kPack<From> : kPack<To>;
  for_elements<kOfThread>(args.count, packs, [&](int64_t i, auto pack) {
    float values[decltype(pack)::value];
    load_pack(from + i, values);
    store_pack(to + i, values);
  });
}

template <typename T>
__global__ void fill_kernel(PolyremeFill args, bool packs) {
  auto* out = static_cast<T*>(args.out);
  for_elements<kPack<T>>(args.count, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    float values[kCount];
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[e] = args.value;
    store_pack(out + i, values);
  });
}

template <typename T>
__global__ void accumulate_kernel(PolyremeAccumulate args, bool packs) {
  const auto* x = static_cast<const T*>(args.x);
  bool finite = true;
  for_elements<kPack<T>>(args.count, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    float terms[kCount], sums[kCount];
    load_pack(x + i, terms);
    load_pack(args.out + i, sums);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      finite = finite && terms[e] - terms[e] == 0.0f;
      sums[e] = sums[e] + terms[e];
    }
    store_pack(args.out + i, sums);
  });
  if (!finite && args.not_finite != nullptr) atomicMax(args.not_finite, 1);
}

template <typename T>
__global__ void scale_kernel(PolyremeScale args, bool packs) {
  auto* x = static_cast<T*>(args.x);
  for_elements<kPack<T>>(args.count, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    float values[kCount];
    load_pack(x + i, values);
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[e] = values[e] * args.factor;
    store_pack(x + i, values);
  });
}

template <typename T, bool kBackward>
__global__ void swiglu_kernel(PolyremeSwiglu args, bool packs) {
  const auto* x = static_cast<const T*>(args.x);
  const auto* dy = static_cast<const T*>(args.dy);
  auto* out = static_cast<T*>(args.out);
  for_elements<kPack<T>>(args.rows * args.cols, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    const int64_t gate_at = i + i / args.cols * args.cols, up_at = gate_at + args.cols;
    float gate[kCount], up[kCount], result[kCount];
    load_pack(x + gate_at, gate);
    load_pack(x + up_at, up);
    if constexpr (kBackward) load_pack(dy + i, result);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const float g = gate[e];
      if constexpr (kBackward) {
        const float gradient = result[e];
        const float exponential = exp_f32(80.0f < -g ? 80.0f : -g);  // finite; NaN stays
        const float s = 1.0f / (1.0f + exponential);
        result[e] = gradient * (g * s);
        gate[e] = gradient * up[e] * fmaf(g, exponential * s * s, s);
      } else {
        result[e] = g / (1.0f + exp_f32(-g)) * up[e];
      }
    }
    if constexpr (kBackward) {
      store_pack(out + gate_at, gate);
      store_pack(out + up_at, result);
    } else {
      store_pack(out + i, result);
    }
  });
}

template <bool kBackward>
cudaError_t launch_swiglu(const PolyremeSwiglu& args, cudaStream_t stream) {
  if (args.rows < 0 || args.cols < 1) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.rows == 0) return cudaSuccess;
    const bool packs = packs_fit(args.x, args.dy, args.out) && args.cols % kPack<T> == 0;
    void (*kernel)(PolyremeSwiglu, bool) = &swiglu_kernel<T, kBackward>;
    POLYREME_LAUNCH(kernel, blocks_for(args.rows * args.cols, kThreads * kPack<T>), kThreads, stream, args,
                    packs);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_add(const PolyremeElementwise& args, cudaStream_t stream) {
  return launch_flat<Add>(args, stream);
}
cudaError_t launch_gelu_forward(const PolyremeElementwise& args, cudaStream_t stream) {
  return launch_flat<GeluForward>(args, stream);
}
cudaError_t launch_gelu_backward(const PolyremeElementwise& args, cudaStream_t stream) {
  return launch_flat<GeluBackward>(args, stream);
}

cudaError_t launch_cast(const PolyremeCast& args, cudaStream_t stream) {
  if (args.count < 0) return cudaErrorInvalidValue;
  return with_type(args.from_dtype, [&](auto from) {
    return with_type(args.to_dtype, [&](auto to) {
      if (args.count == 0) return cudaSuccess;
      void (*kernel)(PolyremeCast, bool) = &cast_kernel<decltype(from), decltype(to)>;
      POLYREME_LAUNCH(kernel, blocks_for(args.count, kThreads * kPack<decltype(to)>), kThreads, stream, args,
                      packs_fit(args.from, args.to));
      return cudaGetLastError();
    });
  });
}

cudaError_t launch_fill(const PolyremeFill& args, cudaStream_t stream) {
  if (args.count < 0) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.count == 0) return cudaSuccess;
    void (*kernel)(PolyremeFill, bool) = &fill_kernel<T>;
    POLYREME_LAUNCH(kernel, blocks_for(args.count, kThreads * kPack<T>), kThreads, stream, args,
                    packs_fit(args.out));
    return cudaGetLastError();
  });
}

cudaError_t launch_accumulate(const PolyremeAccumulate& args, cudaStream_t stream) {
  if (args.count < 0) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.count == 0) return cudaSuccess;
    void (*kernel)(PolyremeAccumulate, bool) = &accumulate_kernel<T>;
    POLYREME_LAUNCH(kernel, blocks_for(args.count, kThreads * kPack<T>), kThreads, stream, args,
                    packs_fit(args.x, args.out));
    return cudaGetLastError();
  });
}

cudaError_t launch_scale(const PolyremeScale& args, cudaStream_t stream) {
  if (args.count < 0) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.count == 0) return cudaSuccess;
    void (*kernel)(PolyremeScale, bool) = &scale_kernel<T>;
    POLYREME_LAUNCH(kernel, blocks_for(args.count, kThreads * kPack<T>), kThreads, stream, args,
                    packs_fit(args.x));
    return cudaGetLastError();
  });
}

cudaError_t launch_swiglu_forward(const PolyremeSwiglu& args, cudaStream_t stream) {
  return launch_swiglu<false>(args, stream);
}
cudaError_t launch_swiglu_backward(const PolyremeSwiglu& args, cudaStream_t stream) {
  return launch_swiglu<true>(args, stream);
}

}  // namespace polyreme::kernels
