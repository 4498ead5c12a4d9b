// dropout_kernel: flat arrays of `count` elements.
// Grid: one-dimensional, one thread per 16 bytes (one or two blocks of four random words), strides of the
// whole grid. Elements whose blocks do not begin with the array's packs go one by one, each drawing its own
// block. Bytes per element of size s: s read, s written; ten rounds of Philox, 40 multiplications, per four
// elements. normal_kernel: out [count], one thread per block of four words, 4 bytes written per element;
// logarithm, sine and cosine in fp64 from written-out operations, so bound by fp64 units. round_kernel: x, y
// [count], one thread per block of four words, 4 bytes read and 2 written per element. Accumulator: none.
#include "base/philox.h"
#include "kernels/elements.cuh"
#include "kernels/math.cuh"
#include "kernels/random.cuh"

namespace polyreme::kernels {
namespace {

__device__ RandomKey key_of(const PolyremeRandomKey& key) {
  return {key.seed, static_cast<RandomPurpose>(key.purpose), key.stream, key.step};
}

template <typename T>
__global__ void dropout_kernel(PolyremeDropout args, bool packs) {
  const auto* x = static_cast<const T*>(args.x);
  auto* y = static_cast<T*>(args.y);
  const RandomKey key = key_of(args.key);
  for_elements<kPack<T>>(args.count, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    const auto element = static_cast<uint64_t>(args.first_element + i);
    float values[kCount];
    load_pack(x + i, values);
#pragma unroll
    for (int group = 0; group < kCount; group += 4) {
      const Philox4 random = random_block(key, (element + group) / 4);
#pragma unroll
      for (int e = group; e < group + 4 && e < kCount; ++e) {
        uint32_t word = random.word[e - group];
        if constexpr (kCount == 1) {  // indices into registers are constants
          const auto at = static_cast<int>(element % 4);
          word = at == 1 ? random.word[1] : at == 2 ? random.word[2] : at == 3 ? random.word[3] : word;
        }
        values[e] = values[e] * (word >= args.threshold ? args.keep_scale : 0.0f);
      }
    }
    store_pack(y + i, values);
  });
}

__global__ void normal_kernel(PolyremeFillNormal args, int64_t first_block, int64_t num_blocks, bool packs) {
  const RandomKey key = key_of(args.key);
  const auto std = static_cast<double>(args.std);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < num_blocks; n += stride) {
    const Philox4 random = random_block(key, static_cast<uint64_t>(first_block + n));
    float values[4];
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) {
      const double u = (static_cast<double>(random.word[pair]) + 0.5) * 0x1p-32;
      const double radius = sqrt(-2.0 * log_f64(u));
      const SinCos angle = sin_cos_turns(random.word[pair + 1]);
      values[pair] = static_cast<float>(radius * angle.cos * std);
      values[pair + 1] = static_cast<float>(radius * angle.sin * std);
    }
    const int64_t at = (first_block + n) * 4 - args.first_element;
    if (packs && at >= 0 && at + 4 <= args.count) {
      store_pack(args.out + at, values);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (at + e >= 0 && at + e < args.count) args.out[at + e] = values[e];
    }
  }
}

__global__ void round_kernel(PolyremeRoundStochastic args, int64_t first_block, int64_t num_blocks) {
  const RandomKey key = key_of(args.key);
  auto* y = static_cast<uint16_t*>(args.y);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < num_blocks; n += stride) {
    const Philox4 random = random_block(key, static_cast<uint64_t>(first_block + n));
    const int64_t at = (first_block + n) * 4 - args.first_element;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (at + e < 0 || at + e >= args.count) continue;
      auto bits = static_cast<uint32_t>(__float_as_int(args.x[at + e]));
      // Infinity keeps its bits; a carry into the exponent is the next number. NaN becomes a quiet one.
      if ((bits & 0x7fffffff) <= 0x7f800000) bits += random.word[e] & 0xffff;
      y[at + e] = static_cast<uint16_t>((bits & 0x7fffffff) <= 0x7f80ffff ? bits >> 16 : bits >> 16 | 0x40);
    }
  }
}

}  // namespace

cudaError_t launch_round_stochastic(const PolyremeRoundStochastic& args, cudaStream_t stream) {
  if (args.count < 0 || args.first_element < 0) return cudaErrorInvalidValue;
  if (args.count == 0) return cudaSuccess;
  const int64_t first_block = args.first_element / 4;
  const int64_t num_blocks = (args.first_element + args.count - 1) / 4 - first_block + 1;
  void (*kernel)(PolyremeRoundStochastic, int64_t, int64_t) = &round_kernel;
  POLYREME_LAUNCH(kernel, blocks_for(num_blocks, kThreads), kThreads, stream, args, first_block, num_blocks);
  return cudaGetLastError();
}

cudaError_t launch_dropout(const PolyremeDropout& args, cudaStream_t stream) {
  if (args.count < 0 || args.first_element < 0) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.count == 0) return cudaSuccess;
    void (*kernel)(PolyremeDropout, bool) = &dropout_kernel<T>;
    POLYREME_LAUNCH(kernel, blocks_for(args.count, kThreads * kPack<T>), kThreads, stream, args,
                    packs_fit(args.x, args.y) && args.first_element % 4 == 0);
    return cudaGetLastError();
  });
}

cudaError_t launch_fill_normal(const PolyremeFillNormal& args, cudaStream_t stream) {
  if (args.count < 0 || args.first_element < 0) return cudaErrorInvalidValue;
  if (args.count == 0) return cudaSuccess;
  const int64_t first_block = args.first_element / 4;
  const int64_t num_blocks = (args.first_element + args.count - 1) / 4 - first_block + 1;
  void (*kernel)(PolyremeFillNormal, int64_t, int64_t, bool) = &normal_kernel;
  POLYREME_LAUNCH(kernel, blocks_for(num_blocks, kThreads), kThreads, stream, args, first_block, num_blocks,
                  packs_fit(args.out) && args.first_element % 4 == 0);
  return cudaGetLastError();
}

}  // namespace polyreme::kernels
