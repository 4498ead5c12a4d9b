// rotary_kernel: x [tokens, heads, head_dim] in place; cosine, sine [seq, head_dim / 2].
// Grid: one-dimensional, one thread per 16 bytes of a head's first half and the same of the second, strides
// of the whole grid. Bytes per element of size s: s read, s written; the tables, 4 bytes per pair, come from
// the caches after the first head. Memory-bound. Accumulator: none; fp32, no fused operations.
#include "kernels/elements.cuh"
#include "kernels/rotary.cuh"

namespace polyreme::kernels {
namespace {

template <typename T>
__global__ void rotary_kernel(PolyremeRotary args, bool packs) {
  const int64_t half = args.head_dim / 2;
  for_elements<kPack<T>>(args.tokens * args.heads * half, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    const int64_t head_index = i / half, within = i - head_index * half;
    const int64_t token = head_index / args.heads, head = head_index - token * args.heads;
    T* x = static_cast<T*>(args.x) + token * args.row_stride + head * args.head_dim + within;
    const int64_t angle = token % args.seq * half + within;
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

}  // namespace

cudaError_t launch_rotary(const PolyremeRotary& args, cudaStream_t stream) {
  if (args.tokens < 0 || args.seq < 1 || args.heads < 1 || args.head_dim < 2 || args.head_dim % 2 != 0 ||
      args.row_stride < args.heads * args.head_dim)
    return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.tokens == 0) return cudaSuccess;
    const bool packs = packs_fit(args.x, args.cosine, args.sine) && args.head_dim / 2 % kPack<T> == 0 &&
                       args.row_stride % kPack<T> == 0;
    void (*kernel)(PolyremeRotary, bool) = &rotary_kernel<T>;
    POLYREME_LAUNCH(kernel, blocks_for(args.tokens * args.heads * args.head_dim / 2, kThreads * kPack<T>),
                    kThreads, stream, args, packs);
    return cudaGetLastError();
  });
}

}  // namespace polyreme::kernels
