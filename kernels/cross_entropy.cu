// logits [rows, vocab]; targets, loss, log_sum_exp [rows].
// forward_kernel, max_kernel, sums_kernel. Grid: a block of eight warps per row; a warp takes blocks of 1024
// logits, brings each into shared memory by 16-byte loads, and finds maximum and sum of exponentials there.
// backward kernels. Grid: x rows, y pieces of 8192 logits, one thread per 16 bytes. finish_kernel. Grid: one
// thread a row. Bytes per logit of size s: forward s read; backward s read, s written; one exp each.
// Memory-bound: 33 KiB of shared memory a block, six blocks in flight per multiprocessor of an H100.
// Accumulator: 64 fp32 chains in a block of 1024 (warp.cuh), fp64 over blocks in ascending order with the
// maximum so far (Milakov & Gimelshein 2018), loss in fp64, rounded once.
#include "kernels/cross_entropy.cuh"
#include "kernels/elements.cuh"
#include "kernels/ids.cuh"
#include "kernels/math.cuh"
#include "kernels/warp.cuh"

namespace polyreme::kernels {
namespace {

constexpr int kBlock = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int64_t kPiece = 8192;

// One block of logits, staged by a warp.
template <typename T>
__device__ void stage(const T* x, int count, bool packs, float* staged) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int num_packs = packs ? count / kPack<T> : 0;
  for (int i = lane; i < num_packs; i += kWarp) {
    float values[kPack<T>];
    load_pack(x + i * kPack<T>, values);
    store_pack(staged + i * kPack<T>, values);
  }
  for (int i = num_packs * kPack<T> + lane; i < count; i += kWarp) staged[i] = to_float(x[i]);
  __syncwarp();
}
__device__ float block_max(const float* staged, int count) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float top = -infinity();
#pragma unroll 4
  for (int i = lane; i < count; i += kWarp) top = staged[i] > top ? staged[i] : top;
  return warp_max(top);
}
__device__ float block_sum_exp(const float* staged, int count, float shift) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float low = 0.0f, high = 0.0f;
#pragma unroll 4
  for (int i = lane; i < count; i += 2 * kWarp) {
    low = low + exp_f32(staged[i] - shift);
    if (i + kWarp < count) high = high + exp_f32(staged[i + kWarp] - shift);
  }
  return warp_sum(low + high);
}

// What is carried from block to block of a row.
struct Carry {
  float top = -infinity();
  double sum = 0;
};

// All blocks of a row in ascending order, eight at a time. Without a shift that is given, the maximum so far
// is the shift. Every thread ends with the same carry.
template <bool kShiftGiven, typename T>
__device__ Carry row_sum_exp(const T* x, int64_t cols, bool packs, float given_shift) {
  POLYREME_SHARED(float4, staged4, kWarps * kBlock / 4);
  POLYREME_SHARED(float, tops,
                  2 * kWarps);  // in turns: the last ones are still read while the next are written
  POLYREME_SHARED(float, sums, 2 * kWarps);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  float* staged = reinterpret_cast<float*>(staged4) + warp * kBlock;
  Carry carry;
  int turn = 0;
  for (int64_t first = 0; first < cols; first += kWarps * kBlock, turn ^= kWarps) {
    const int64_t begin = first + warp * kBlock;
    const int count = begin >= cols ? 0 : static_cast<int>(cols - begin < kBlock ? cols - begin : kBlock);
    if (count > 0) stage(x + begin, count, packs, staged);
    float shift = given_shift;
    if constexpr (!kShiftGiven) {
      const float own_top = block_max(staged, count);
      if (lane == 0) tops[turn + warp] = own_top;
      __syncthreads();
      shift = carry.top;
      for (int w = 0; w <= warp; ++w) shift = tops[turn + w] > shift ? tops[turn + w] : shift;
    }
    const float own_sum = block_sum_exp(staged, count, shift == -infinity() ? 0.0f : shift);
    if (lane == 0) sums[turn + warp] = own_sum;
    __syncthreads();
    for (int w = 0; w < kWarps && first + w * kBlock < cols; ++w) {
      if constexpr (!kShiftGiven) {
        const float block_top = tops[turn + w];
        if (block_top > carry.top) {
          carry.sum *= static_cast<double>(exp_f32(carry.top - block_top));
          carry.top = block_top;
        }
      }
      carry.sum += static_cast<double>(sums[turn + w]);
    }
  }
  return carry;
}

__device__ bool in_range(int32_t target, int64_t count) { return target >= 0 && target < count; }

template <typename T>
__global__ void forward_kernel(PolyremeCrossEntropy args, bool packs) {
  if (*args.bad != kNoneIsBad) return;
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(args.logits) + row * args.vocab;
  const Carry carry = row_sum_exp<false>(x, args.vocab, packs, 0.0f);
  if (threadIdx.x != 0) return;
  const double log_sum_exp =
      carry.sum > 0 ? static_cast<double>(carry.top) + log_f64(carry.sum) : static_cast<double>(quiet_nan());
  args.log_sum_exp[row] = static_cast<float>(log_sum_exp);
  const int32_t target = args.targets[row];
  args.loss[row] = in_range(target, args.vocab)
                       ? static_cast<float>(log_sum_exp - static_cast<double>(to_float(x[target])))
                       : 0.0f;
}

// `count` logits from x on, of which the first `used` become gradients and the others 0; `target` is the
// place of the target among them.
template <typename T>
__device__ void gradients(T* x, int64_t count, int64_t used, int64_t target, float log_sum_exp, float scale,
                          bool packs) {
  const auto gradient = [&](int64_t at, float logit) {
    const float probability = exp_f32(logit - log_sum_exp);
    const float result = at == target ? (probability - 1.0f) * scale : probability * scale;
    return at < used ? result : 0.0f;
  };
  const int64_t num_packs = packs ? count / kPack<T> : 0;
  for (int64_t i = threadIdx.x; i < num_packs; i += kThreads) {
    float values[kPack<T>];
    load_pack(x + i * kPack<T>, values);
#pragma unroll
    for (int e = 0; e < kPack<T>; ++e) values[e] = gradient(i * kPack<T> + e, values[e]);
    store_pack(x + i * kPack<T>, values);
  }
  for (int64_t i = num_packs * kPack<T> + threadIdx.x; i < count; i += kThreads)
    x[i] = from_float<T>(gradient(i, to_float(x[i])));
}

template <typename T>
__global__ void backward_kernel(PolyremeCrossEntropy args, bool packs) {
  if (*args.bad != kNoneIsBad) return;
  const int64_t row = blockIdx.x, begin = blockIdx.y * kPiece;
  const int64_t count = args.vocab - begin < kPiece ? args.vocab - begin : kPiece;
  gradients(static_cast<T*>(args.logits) + row * args.vocab + begin, count,
            in_range(args.targets[row], args.vocab) ? count : 0, args.targets[row] - begin,
            args.log_sum_exp[row], args.scale, packs);
}

template <typename T>
__global__ void max_kernel(PolyremeVocabPart args, bool packs) {
  POLYREME_SHARED(float, tops, kWarps);
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(args.logits) + row * args.cols;
  float top = -infinity();
  const auto take = [&](float value) { top = value > top ? value : top; };
  const int64_t num_packs = packs ? args.valid / kPack<T> : 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < num_packs; i += kThreads) {
    float values[kPack<T>];
    load_pack(x + i * kPack<T>, values);
#pragma unroll
    for (int e = 0; e < kPack<T>; ++e) take(values[e]);
  }
  for (int64_t i = num_packs * kPack<T> + threadIdx.x; i < args.valid; i += kThreads) take(to_float(x[i]));
  top = warp_max(top);
  if (threadIdx.x % kWarp == 0) tops[threadIdx.x / kWarp] = top;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) take(tops[w]);
  if (threadIdx.x == 0 && top > args.max[row]) args.max[row] = top;
}

template <typename T>
__global__ void sums_kernel(PolyremeVocabPart args, bool packs) {
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(args.logits) + row * args.cols;
  const Carry carry = row_sum_exp<true>(x, args.valid, packs, args.max[row]);
  if (threadIdx.x != 0) return;
  args.sum_exp[row] = static_cast<float>(carry.sum);
  const int64_t target = args.targets[row] - args.first_column;
  args.target_logit[row] = target >= 0 && target < args.valid ? to_float(x[target]) : 0.0f;
}

__global__ void finish_kernel(PolyremeVocabPart args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= args.rows) return;
  const auto sum = static_cast<double>(args.sum_exp[row]);
  const double log_sum_exp =
      sum > 0 ? static_cast<double>(args.max[row]) + log_f64(sum) : static_cast<double>(quiet_nan());
  args.log_sum_exp[row] = static_cast<float>(log_sum_exp);
  args.loss[row] = args.targets[row] >= 0
                       ? static_cast<float>(log_sum_exp - static_cast<double>(args.target_logit[row]))
                       : 0.0f;
}

template <typename T>
__global__ void part_backward_kernel(PolyremeVocabPart args, bool packs) {
  const int64_t row = blockIdx.x, begin = blockIdx.y * kPiece;
  const int64_t count = args.cols - begin < kPiece ? args.cols - begin : kPiece;
  const int64_t used = args.targets[row] < 0 ? 0 : args.valid;
  gradients(static_cast<T*>(args.logits) + row * args.cols + begin, count, used - begin,
            args.targets[row] - args.first_column < used ? args.targets[row] - args.first_column - begin : -1,
            args.log_sum_exp[row], args.scale, packs);
}

// One block a row.
template <typename Args, typename Pick>
cudaError_t launch_rows(const Args& args, int64_t cols, cudaStream_t stream, Pick pick) {
  if (args.rows < 0 || cols < 1) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.rows == 0) return cudaSuccess;
    void (*kernel)(Args, bool) = pick(type);
    POLYREME_LAUNCH(kernel, static_cast<unsigned>(args.rows), kThreads, stream, args,
                    packs_fit(args.logits) && cols % kPack<T> == 0);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_cross_entropy_forward(const PolyremeCrossEntropy& args, cudaStream_t stream) {
  const cudaError_t error =
      launch_check_ids(args.targets, args.rows, args.vocab, kIgnoreTarget, args.bad, stream);
  if (error != cudaSuccess) return error;
  return launch_rows(args, args.vocab, stream, [](auto type) { return &forward_kernel<decltype(type)>; });
}

cudaError_t launch_cross_entropy_backward(const PolyremeCrossEntropy& args, cudaStream_t stream) {
  if (args.rows < 0 || args.vocab < 1 || args.vocab > 65535 * kPiece) return cudaErrorInvalidValue;
  const cudaError_t error =
      launch_check_ids(args.targets, args.rows, args.vocab, kIgnoreTarget, args.bad, stream);
  if (error != cudaSuccess) return error;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.rows == 0) return cudaSuccess;
    void (*kernel)(PolyremeCrossEntropy, bool) = &backward_kernel<T>;
    const dim3 blocks(static_cast<unsigned>(args.rows),
                      static_cast<unsigned>((args.vocab + kPiece - 1) / kPiece));
    POLYREME_LAUNCH(kernel, blocks, kThreads, stream, args,
                    packs_fit(args.logits) && args.vocab % kPack<T> == 0);
    return cudaGetLastError();
  });
}

cudaError_t launch_vocab_part_max(const PolyremeVocabPart& args, cudaStream_t stream) {
  return launch_rows(args, args.cols, stream, [](auto type) { return &max_kernel<decltype(type)>; });
}
cudaError_t launch_vocab_part_sums(const PolyremeVocabPart& args, cudaStream_t stream) {
  return launch_rows(args, args.cols, stream, [](auto type) { return &sums_kernel<decltype(type)>; });
}

cudaError_t launch_vocab_part_finish(const PolyremeVocabPart& args, cudaStream_t stream) {
  if (args.rows < 0) return cudaErrorInvalidValue;
  if (args.rows == 0) return cudaSuccess;
  void (*kernel)(PolyremeVocabPart) = &finish_kernel;
  POLYREME_LAUNCH(kernel, static_cast<unsigned>((args.rows + kThreads - 1) / kThreads), kThreads, stream,
                  args);
  return cudaGetLastError();
}
cudaError_t launch_vocab_part_backward(const PolyremeVocabPart& args, cudaStream_t stream) {
  if (args.rows < 0 || args.cols < 1 || args.cols > 65535 * kPiece) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.rows == 0) return cudaSuccess;
    void (*kernel)(PolyremeVocabPart, bool) = &part_backward_kernel<T>;
    const dim3 blocks(static_cast<unsigned>(args.rows),
                      static_cast<unsigned>((args.cols + kPiece - 1) / kPiece));
    POLYREME_LAUNCH(kernel, blocks, kThreads, stream, args,
                    packs_fit(args.logits) && args.cols % kPack<T> == 0);
    return cudaGetLastError();
  });
}

}  // namespace polyreme::kernels
