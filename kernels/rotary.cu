// rotary_kernel: x [tokens, groups, heads, head_dim] in place; cosine, sine [seq, head_dim / 2].
// Grid: one-dimensional, one thread per 16 bytes of a head's first half and the same of the second, strides
// of the whole grid. Bytes per element of size s: s read, s written; the tables, 4 bytes per pair, come from
// the caches after the first head. Memory-bound. Accumulator: none; fp32.
// table_kernel: one thread per pair of the tables, 8 bytes written; exp, sine and cosine in fp64 from
// written-out operations, so bound by fp64 units: seq * head_dim / 2 of them, once per call.
#include "kernels/elements.cuh"
#include "kernels/math.cuh"
#include "kernels/rotary.cuh"

namespace polyreme::kernels {
namespace {

template <typename T>
__global__ void rotary_kernel(PolyremeRotary args, bool packs) {
  const int64_t half = args.head_dim / 2;
  for_elements<kPack<T>>(args.tokens * args.groups * args.heads * half, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    const int64_t head_index = i / half, within = i - head_index * half;
    const int64_t row = head_index / args.heads, head = head_index - row * args.heads;
    T* x = static_cast<T*>(args.x) + row * args.row_stride + head * args.head_dim + within;
    const int64_t angle = row / args.groups % args.seq * half + within;
    float a[kCount], b[kCount], c[kCount], s[kCount];
    load_pack(x, a);
    load_pack(x + half, b);
    load_pack(args.cosine + angle, c);
    load_pack(args.sine + angle, s);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const float sine = args.backward != 0 ? -s[e] : s[e];
      const float turned = fmaf(-b[e], sine, a[e] * c[e]);
      b[e] = fmaf(a[e], sine, b[e] * c[e]);
      a[e] = turned;
    }
    store_pack(x, a);
    store_pack(x + half, b);
  });
}

// An angle is a number of turns in 64-bit fixed point: multiplied by the position it wraps around exactly
// (csrc/ops/cpu/kernels/llama.cpp).
__global__ void table_kernel(PolyremeRotaryTable args) {
  const int64_t half = args.head_dim / 2, stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const double log_theta = log_f64(args.theta);
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < args.seq * half;
       at += stride) {
    const int64_t position = at / half, i = at - position * half;
    const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(args.head_dim);
    const double turns = exp_f64(exponent * log_theta) * 0.15915494309189535;  // 1 / (2 pi)
    const auto step = static_cast<uint64_t>(turns * 0x1p64);
    const uint64_t angle = step * static_cast<uint64_t>(position) + 0x80000000u;
    const SinCos turn = sin_cos_turns(static_cast<uint32_t>(angle >> 32));
    args.cosine[at] = static_cast<float>(turn.cos);
    args.sine[at] = static_cast<float>(turn.sin);
  }
}

}  // namespace

cudaError_t launch_rotary_table(const PolyremeRotaryTable& args, cudaStream_t stream) {
  if (args.seq < 0 || args.head_dim < 2 || args.head_dim % 2 != 0 || !(args.theta >= 1))
    return cudaErrorInvalidValue;
  if (args.seq == 0) return cudaSuccess;
  void (*kernel)(PolyremeRotaryTable) = &table_kernel;
  POLYREME_LAUNCH(kernel, blocks_for(args.seq * args.head_dim / 2, kThreads), kThreads, stream, args);
  return cudaGetLastError();
}

cudaError_t launch_rotary(const PolyremeRotary& args, cudaStream_t stream) {
  if (args.tokens < 0 || args.seq < 1 || args.groups < 1 || args.heads < 1 || args.head_dim < 2 ||
      args.head_dim % 2 != 0 || args.row_stride < args.heads * args.head_dim)
    return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.tokens == 0) return cudaSuccess;
    const bool packs = packs_fit(args.x, args.cosine, args.sine) && args.head_dim / 2 % kPack<T> == 0 &&
                       args.row_stride % kPack<T> == 0;
    void (*kernel)(PolyremeRotary, bool) = &rotary_kernel<T>;
    const int64_t pairs = args.tokens * args.groups * args.heads * args.head_dim / 2;
    POLYREME_LAUNCH(kernel, blocks_for(pairs, kThreads * kPack<T>), kThreads, stream, args, packs);
    return cudaGetLastError();
  });
}

}  // namespace polyreme::kernels
