// tokens [batch, seq]; token_rows [vocab, cols]; position_rows [seq, cols]; rows [batch, seq, cols].
// gather_kernel. Grid: one-dimensional, one thread per 16 bytes of rows, strides of the whole grid. Bytes per
// element of size s: s (with positions 2s) read, s written; memory-bound. scatter_kernel. Grid: a block per
// token of the batch. The block of a token's first occurrence adds all its occurrences, in order; other
// blocks find that they are not the first and end. So every block looks through the tokens once, count / 256
// steps: beyond some 10^5 tokens per call that takes longer than the rows themselves. Bytes per element: s
// read, and 8 per element of the distinct tokens' rows. positions_kernel. Grid: one thread per 16 bytes of a
// position's row, batch rows each. Bytes: s read, 8 / batch. Accumulator: fp32, chains from what the
// gradients hold. part kernels: as gather (s read, 4 written) and scatter.
#include "kernels/elements.cuh"
#include "kernels/embedding.cuh"
#include "kernels/ids.cuh"
#include "kernels/warp.cuh"

namespace polyreme::kernels {
namespace {

template <typename T>
__global__ void gather_kernel(PolyremeEmbedding args, bool packs) {
  if (*args.bad != kNoneIsBad) return;
  const auto* token_rows = static_cast<const T*>(args.token_rows);
  const auto* position_rows = static_cast<const T*>(args.position_rows);
  auto* rows = static_cast<T*>(args.rows);
  for_elements<kPack<T>>(args.batch * args.seq * args.cols, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    const int64_t at = i / args.cols, column = i - at * args.cols;
    float values[kCount];
    load_pack(token_rows + args.tokens[at] * args.cols + column, values);
    if (position_rows != nullptr) {
      float more[kCount];
      load_pack(position_rows + at % args.seq * args.cols + column, more);
#pragma unroll
      for (int e = 0; e < kCount; ++e) values[e] = values[e] + more[e];
    }
    store_pack(rows + i, values);
  });
}

// Adds `count` rows, whose numbers `list` holds in ascending order, to the row `sums`, column by column.
template <int kCount, typename T>
__device__ void add_listed(const T* rows, const int32_t* list, int count, int64_t cols, float* sums) {
  for (int64_t column = static_cast<int64_t>(threadIdx.x) * kCount; column < cols;
       column += static_cast<int64_t>(kThreads) * kCount) {
    float sum[kCount];
    load_pack(sums + column, sum);
#pragma unroll 4
    for (int n = 0; n < count; ++n) {
      float values[kCount];
      load_pack(rows + list[n] * cols + column, values);
#pragma unroll
      for (int e = 0; e < kCount; ++e) sum[e] = sum[e] + values[e];
    }
    store_pack(sums + column, sum);
  }
}

// Adds the rows of all occurrences of the block's token, if it is the first one, to the token's row of
// `table`, which is that of token first_token on.
template <typename T>
__device__ void scatter_block(const int32_t* tokens, int32_t count, const T* rows, float* table,
                              int64_t first_token, int64_t num_rows, int64_t cols, bool packs) {
  POLYREME_SHARED(int32_t, list, kThreads);
  POLYREME_SHARED(int32_t, found_by_warp, kThreads / kWarp);
  const auto own = static_cast<int32_t>(blockIdx.x), thread = static_cast<int32_t>(threadIdx.x);
  const int warp = thread / kWarp, lane = thread % kWarp;
  const int32_t token = tokens[own];
  const int64_t row = token - first_token;
  if (row < 0 || row >= num_rows) return;
  for (int32_t first = 0; first < own; first += kThreads) {
    const int32_t at = first + thread;
    if (__syncthreads_or(at < own && tokens[at] == token)) return;
  }
  float* sums = table + row * cols;
  for (int32_t first = own; first < count; first += kThreads) {
    const int32_t at = first + thread;
    const bool found = at < count && tokens[at] == token;
    const unsigned votes = __ballot_sync(kAllLanes, found);
    if (lane == 0) found_by_warp[warp] = __popc(votes);
    __syncthreads();
    int before = 0, total = 0;
    for (int w = 0; w < kThreads / kWarp; ++w) {
      before += w < warp ? found_by_warp[w] : 0;
      total += found_by_warp[w];
    }
    if (found) list[before + __popc(votes & ((1u << lane) - 1))] = at;
    __syncthreads();
    if (packs) {
      add_listed<kPack<T>>(rows, list, total, cols, sums);
    } else {
      add_listed<1>(rows, list, total, cols, sums);
    }
    __syncthreads();  // before the list is written again
  }
}

template <typename T>
__global__ void scatter_kernel(PolyremeEmbedding args, int32_t count, bool packs) {
  if (*args.bad != kNoneIsBad) return;
  scatter_block(args.tokens, count, static_cast<const T*>(args.rows), static_cast<float*>(args.token_rows), 0,
                args.vocab, args.cols, packs);
}

template <typename T>
__global__ void part_scatter_kernel(PolyremeEmbeddingPart args, bool packs) {
  scatter_block(args.tokens, static_cast<int32_t>(args.count), static_cast<const T*>(args.table), args.out,
                args.first_token, args.vocab, args.cols, packs);
}

template <typename T>
__global__ void part_gather_kernel(PolyremeEmbeddingPart args, bool packs) {
  const auto* table = static_cast<const T*>(args.table);
  for_elements<kPack<T>>(args.count * args.cols, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    const int64_t at = i / args.cols, column = i - at * args.cols;
    const int64_t row = args.tokens[at] - args.first_token;
    float values[kCount] = {};
    if (row >= 0 && row < args.vocab) load_pack(table + row * args.cols + column, values);
    store_pack(args.out + i, values);
  });
}

template <typename T>
__global__ void positions_kernel(PolyremeEmbedding args, bool packs) {
  if (*args.bad != kNoneIsBad) return;
  const auto* rows = static_cast<const T*>(args.rows);
  auto* sums = static_cast<float*>(args.position_rows);
  const int64_t sample = args.seq * args.cols;
  for_elements<kPack<T>>(sample, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    float sum[kCount];
    load_pack(sums + i, sum);
#pragma unroll 4
    for (int64_t b = 0; b < args.batch; ++b) {
      float values[kCount];
      load_pack(rows + b * sample + i, values);
#pragma unroll
      for (int e = 0; e < kCount; ++e) sum[e] = sum[e] + values[e];
    }
    store_pack(sums + i, sum);
  });
}

template <typename Launch>
cudaError_t launch_checked(const PolyremeEmbedding& args, cudaStream_t stream, Launch launch) {
  if (args.batch < 0 || args.seq < 0 || args.cols < 1 || args.vocab < 1) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t count = args.batch * args.seq;
    const cudaError_t error = launch_check_ids(args.tokens, count, args.vocab, 0, args.bad, stream);
    if (error != cudaSuccess || count == 0) return error;
    const bool packs = packs_fit(args.token_rows, args.position_rows, args.rows) && args.cols % kPack<T> == 0;
    launch(type, count, packs);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_embedding_forward(const PolyremeEmbedding& args, cudaStream_t stream) {
  return launch_checked(args, stream, [&](auto type, int64_t count, bool packs) {
    using T = decltype(type);
    void (*kernel)(PolyremeEmbedding, bool) = &gather_kernel<T>;
    POLYREME_LAUNCH(kernel, blocks_for(count * args.cols, kThreads * kPack<T>), kThreads, stream, args,
                    packs);
  });
}

cudaError_t launch_embedding_backward(const PolyremeEmbedding& args, cudaStream_t stream) {
  return launch_checked(args, stream, [&](auto type, int64_t count, bool packs) {
    using T = decltype(type);
    void (*scatter)(PolyremeEmbedding, int32_t, bool) = &scatter_kernel<T>;
    POLYREME_LAUNCH(scatter, static_cast<unsigned>(count), kThreads, stream, args,
                    static_cast<int32_t>(count), packs);
    if (args.position_rows == nullptr) return;
    void (*positions)(PolyremeEmbedding, bool) = &positions_kernel<T>;
    POLYREME_LAUNCH(positions, blocks_for(args.seq * args.cols, kThreads * kPack<T>), kThreads, stream, args,
                    packs);
  });
}

cudaError_t launch_embedding_part_forward(const PolyremeEmbeddingPart& args, cudaStream_t stream) {
  if (args.count < 0 || args.cols < 1 || args.vocab < 0) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.count == 0) return cudaSuccess;
    void (*kernel)(PolyremeEmbeddingPart, bool) = &part_gather_kernel<T>;
    POLYREME_LAUNCH(kernel, blocks_for(args.count * args.cols, kThreads * kPack<T>), kThreads, stream, args,
                    packs_fit(args.table, args.out) && args.cols % kPack<T> == 0);
    return cudaGetLastError();
  });
}

cudaError_t launch_embedding_part_backward(const PolyremeEmbeddingPart& args, cudaStream_t stream) {
  if (args.count < 0 || args.count > INT32_MAX - 1024 || args.cols < 1 || args.vocab < 0)
    return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.count == 0) return cudaSuccess;
    void (*kernel)(PolyremeEmbeddingPart, bool) = &part_scatter_kernel<T>;
    POLYREME_LAUNCH(kernel, static_cast<unsigned>(args.count), kThreads, stream, args,
                    packs_fit(args.table, args.out) && args.cols % kPack<T> == 0);
    return cudaGetLastError();
  });
}

}  // namespace polyreme::kernels
