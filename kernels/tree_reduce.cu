// tree_kernel: terms [num_terms][count] -> out [count].
// Grid: one-dimensional, one thread per element and a stride of the whole grid beyond kMaxBlocks blocks.
// Bytes per element: num_terms reads and one write of the element's size.
// Accumulator: float for float16 and bfloat16, otherwise the element's type.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "base/dtype.h"
#include "kernels/launch.h"
#include "kernels/tree_reduce.cuh"

namespace polyreme::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;
constexpr int kLevels = 13;  // of the tree of kMaxTreeTerms
static_assert(kMaxTreeTerms < 1 << kLevels);

// In the order of ReduceOp.
enum class Reduce : int32_t { kSum, kProduct, kMax, kMin, kAverage };

template <typename T>
struct Arithmetic {
  using Accumulator = T;
  __device__ static T load(T x) { return x; }
  __device__ static T store(T x) { return x; }
};
// A bool as its byte: any value but 0 is true. max is "any", min is "all".
struct Truth {
  uint8_t byte;
};
template <>
struct Arithmetic<Truth> {
  using Accumulator = uint8_t;
  __device__ static uint8_t load(Truth x) { return x.byte != 0; }
  __device__ static Truth store(uint8_t x) { return {x}; }
};
template <>
struct Arithmetic<__half> {
  using Accumulator = float;
  __device__ static float load(__half x) { return __half2float(x); }
  __device__ static __half store(float x) { return __float2half_rn(x); }
};
template <>
struct Arithmetic<__nv_bfloat16> {
  using Accumulator = float;
  __device__ static float load(__nv_bfloat16 x) { return __bfloat162float(x); }
  __device__ static __nv_bfloat16 store(float x) { return __float2bfloat16_rn(x); }
};

template <typename T, Reduce kReduce>
__device__ T combine(T a, T b) {
  if constexpr (kReduce == Reduce::kMax) {
    return (a > b || a != a) ? a : b;
  } else if constexpr (kReduce == Reduce::kMin) {
    return (a < b || a != a) ? a : b;
  } else if constexpr (std::is_integral_v<T>) {
    // Unsigned arithmetic wraps; 64 bits, since smaller types are promoted to a signed one.
    const auto ua = static_cast<uint64_t>(a), ub = static_cast<uint64_t>(b);
    return static_cast<T>(kReduce == Reduce::kProduct ? ua * ub : ua + ub);
  } else {
    return kReduce == Reduce::kProduct ? a * b : a + b;
  }
}

// Term by term, as a binary counter: subtree[k] holds the open subtree of 2^k terms while bit k of the
// number of terms seen is set. What stays open at the end is joined from the right, which is the tree of
// tree_order for any number of terms. The loops over levels are unrolled: indices into registers are
// constants.
template <typename T, Reduce kReduce>
__global__ void tree_kernel(PolyremeTreeReduce reduction) {
  using A = typename Arithmetic<T>::Accumulator;
  constexpr Reduce kCombine = kReduce == Reduce::kAverage ? Reduce::kSum : kReduce;
  const auto* terms = static_cast<const char*>(reduction.terms);
  const auto* own_term = static_cast<const T*>(reduction.own_term);
  auto* out = static_cast<T*>(reduction.out);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < reduction.count;
       i += stride) {
    A subtree[kLevels] = {};
    for (int t = 0; t < reduction.num_terms; ++t) {
      const T* term =
          t == reduction.own
              ? own_term
              : reinterpret_cast<const T*>(terms + static_cast<uint64_t>(t) * reduction.stride_bytes);
      A value = Arithmetic<T>::load(term[i]);
      bool placed = false;
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {
        const bool open = (t >> level & 1) != 0;
        if (!placed && open) value = combine<A, kCombine>(subtree[level], value);
        if (!placed && !open) {
          subtree[level] = value;
          placed = true;
        }
      }
    }
    A result{};
    bool found = false;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      if ((reduction.num_terms >> level & 1) == 0) continue;
      result = found ? combine<A, kCombine>(subtree[level], result) : subtree[level];
      found = true;
    }
    if constexpr (kReduce == Reduce::kAverage) result = result / static_cast<A>(reduction.num_terms);
    out[i] = Arithmetic<T>::store(result);
  }
}

template <typename T, Reduce kReduce>
cudaError_t launch_one(const PolyremeTreeReduce& reduction, cudaStream_t stream) {
  if (reduction.num_terms == 1 && kReduce != Reduce::kAverage) {  // copied as it is
    const void* term = reduction.own == 0 ? reduction.own_term : reduction.terms;
    const size_t bytes = static_cast<size_t>(reduction.count) * sizeof(T);
    if (term == reduction.out) return cudaSuccess;
    return cudaMemcpyAsync(reduction.out, term, bytes, cudaMemcpyDeviceToDevice, stream);
  }
  const int64_t wanted = (reduction.count + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
  void (*kernel)(PolyremeTreeReduce) = &tree_kernel<T, kReduce>;
  POLYREME_LAUNCH(kernel, blocks, kThreads, stream, reduction);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_typed(Reduce reduce, const PolyremeTreeReduce& reduction, cudaStream_t stream) {
  switch (reduce) {
    case Reduce::kSum:
      return launch_one<T, Reduce::kSum>(reduction, stream);
    case Reduce::kProduct:
      return launch_one<T, Reduce::kProduct>(reduction, stream);
    case Reduce::kMax:
      return launch_one<T, Reduce::kMax>(reduction, stream);
    case Reduce::kMin:
      return launch_one<T, Reduce::kMin>(reduction, stream);
    case Reduce::kAverage:
      if constexpr (!std::is_integral_v<T>) return launch_one<T, Reduce::kAverage>(reduction, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_bool(Reduce reduce, const PolyremeTreeReduce& reduction, cudaStream_t stream) {
  switch (reduce) {
    case Reduce::kSum:
    case Reduce::kMax:
      return launch_one<Truth, Reduce::kMax>(reduction, stream);
    case Reduce::kProduct:
    case Reduce::kMin:
      return launch_one<Truth, Reduce::kMin>(reduction, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_tree_reduce(const PolyremeTreeReduce& reduction, cudaStream_t stream) {
  if (reduction.num_terms < 1 || reduction.num_terms > kMaxTreeTerms || reduction.count < 0)
    return cudaErrorInvalidValue;
  if (reduction.count == 0) return cudaSuccess;
  const auto reduce = static_cast<Reduce>(reduction.reduce);
  switch (static_cast<DType>(reduction.dtype)) {
    case DType::kF32:
      return launch_typed<float>(reduce, reduction, stream);
    case DType::kF64:
      return launch_typed<double>(reduce, reduction, stream);
    case DType::kBF16:
      return launch_typed<__nv_bfloat16>(reduce, reduction, stream);
    case DType::kF16:
      return launch_typed<__half>(reduce, reduction, stream);
    case DType::kI8:
      return launch_typed<int8_t>(reduce, reduction, stream);
    case DType::kU8:
      return launch_typed<uint8_t>(reduce, reduction, stream);
    case DType::kI32:
      return launch_typed<int32_t>(reduce, reduction, stream);
    case DType::kI64:
      return launch_typed<int64_t>(reduce, reduction, stream);
    case DType::kBool:
      return launch_bool(reduce, reduction, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace polyreme::kernels
