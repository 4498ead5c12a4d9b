// Elements of storage types as floats, sixteen bytes at a time, and loops over them. All arithmetic of the
// kernels is in fp32 (sums of squares and log-sum-exp: fp64); fp32, bf16 and fp16 are ways of storing it,
// rounded once, to nearest, ties to even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "kernels/launch.h"

namespace polyreme::kernels {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// Elements of sixteen bytes.
template <typename T>
inline constexpr int kPack = 16 / static_cast<int>(sizeof(T));

// kCount elements from p on; more than one: p is aligned to 16 bytes, in steps of 16 bytes (8 where kCount
// elements are 8 bytes).
template <int kCount, typename T>
__device__ void load_pack(const T* p, float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    values[0] = to_float(*p);
  } else {
    using Word = std::conditional_t<kCount * sizeof(T) % 16 == 0, uint4, uint2>;
    constexpr int kOfWord = static_cast<int>(sizeof(Word) / sizeof(T));
#pragma unroll
    for (int w = 0; w < kCount / kOfWord; ++w) {
      const Word word = reinterpret_cast<const Word*>(p)[w];
      T parts[kOfWord];
      memcpy(static_cast<void*>(parts), &word, sizeof word);
#pragma unroll
      for (int i = 0; i < kOfWord; ++i) values[w * kOfWord + i] = to_float(parts[i]);
    }
  }
}
template <int kCount, typename T>
__device__ void store_pack(T* p, const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    *p = from_float<T>(values[0]);
  } else {
    using Word = std::conditional_t<kCount * sizeof(T) % 16 == 0, uint4, uint2>;
    constexpr int kOfWord = static_cast<int>(sizeof(Word) / sizeof(T));
#pragma unroll
    for (int w = 0; w < kCount / kOfWord; ++w) {
      T parts[kOfWord];
#pragma unroll
      for (int i = 0; i < kOfWord; ++i) parts[i] = from_float<T>(values[w * kOfWord + i]);
      Word word;
      memcpy(&word, parts, sizeof word);
      reinterpret_cast<Word*>(p)[w] = word;
    }
  }
}

// A number as a type: the pack size of a loop's body.
template <int kValue>
using Int = std::integral_constant<int, kValue>;

// Whether packs of these arrays start at addresses that are multiples of 16; null: not used. Arrays begin at
// multiples of 256 unless somebody cut them elsewhere.
template <typename... Pointers>
bool packs_fit(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// body(i, Int<n>{}) for the n elements from i on: packs of kCount and single ones behind them, or single ones
// alone. One thread a pack, strides of the whole grid.
template <int kCount, typename Body>
__device__ void for_elements(int64_t count, bool packs, Body body) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t num_packs = packs ? count / kCount : 0;
  for (int64_t i = thread; i < num_packs; i += stride) body(i * kCount, Int<kCount>{});
  for (int64_t i = num_packs * kCount + thread; i < count; i += stride) body(i, Int<1>{});
}

// Blocks of kThreads for a loop over `count` items: enough for every multiprocessor, the rest by strides.
inline constexpr int kThreads = 256;
inline unsigned blocks_for(int64_t count, int64_t items_of_block) {
  constexpr int64_t kMaxBlocks = 4096;
  const int64_t wanted = (count + items_of_block - 1) / items_of_block;
  return static_cast<unsigned>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
}

// Calls launch(T{}) for the type of a dtype: fp32, bf16 or fp16; cudaErrorInvalidValue for others.
template <typename Launch>
cudaError_t with_type(int32_t dtype, Launch launch) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF32:
      return launch(float{});
    case DType::kBF16:
      return launch(__nv_bfloat16{});
    case DType::kF16:
      return launch(__half{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace polyreme::kernels
