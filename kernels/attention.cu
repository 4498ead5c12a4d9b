// qkv, dqkv [batch, seq, heads + 2 kv_heads, head_dim]; out, dout [batch, seq, heads, head_dim]; log_sum_exp
// [batch, heads, seq]. Grid of all kernels: x = (sample, head, block of 64 queries or keys), y = 64 columns
// of head_dim; 256 threads. Blocks of other columns form the same scores again, so head_dim above 64 costs
// more than it need. forward_kernel: blocks of queries; dq_kernel: the same; dkv_kernel: blocks of keys of a
// k and v head, with all its query heads in ascending order. dq and dk, dv are apart, so that nothing is
// added across blocks of threads. Bytes: per pair of blocks, 64 rows of q, k, v (backward: and dout) from the
// caches, in steps of 16 columns through 8 KiB of shared memory; scores stay in shared memory (17 KiB, dkv 33
// KiB). Bound by shared memory. Accumulator: fp32; chains over head_dim, keys or queries in ascending order
// within a block pair, and block after block.
#include "kernels/attention.cuh"
#include "kernels/elements.cuh"
#include "kernels/math.cuh"
#include "kernels/tile.cuh"

namespace polyreme::kernels {
namespace {

constexpr int kBlock = kTile;
constexpr int kStride =
    kBlock + 1;  // of scores, [key][query], in shared memory: columns lie in different banks
constexpr int kVirtualLanes = 16;

// Where this block of threads is: a k and v head of one sample, and one of the query heads that it serves.
// The grid counts heads, or k and v heads; then all query heads are visited.
template <typename T>
struct Head {
  const T* q;
  const T* k;
  const T* v;
  int64_t qkv_stride, out_stride, seq, head_dim, sample, group, first_head;
  int64_t first_q, first_k, first_v, first_out, first_sum;  // elements in qkv, out and log_sum_exp
  int64_t block, first_column;
  int columns;

  __device__ Head(const PolyremeAttention& args, int64_t heads_of_grid) {
    const int64_t num_blocks = (args.seq + kBlock - 1) / kBlock;
    const int64_t sample_head = blockIdx.x / num_blocks;
    sample = sample_head / heads_of_grid;
    first_head = sample_head % heads_of_grid * (args.heads / heads_of_grid);
    group = args.heads / args.kv_heads;
    seq = args.seq;
    head_dim = args.head_dim;
    out_stride = args.heads * head_dim;
    qkv_stride = (args.heads + 2 * args.kv_heads) * head_dim;
    const int64_t kv_head = first_head / group, first = sample * seq * qkv_stride;
    first_k = first + (args.by_group ? kv_head * (group + 2) + group : args.heads + kv_head) * head_dim;
    first_v = first_k + (args.by_group ? 1 : args.kv_heads) * head_dim;
    k = static_cast<const T*>(args.qkv) + first_k;
    v = static_cast<const T*>(args.qkv) + first_v;
    block = blockIdx.x % num_blocks;
    first_column = static_cast<int64_t>(blockIdx.y) * kTile;
    columns = static_cast<int>(head_dim - first_column < kTile ? head_dim - first_column : kTile);
    take_query_head(args, first_head);
  }
  __device__ void take_query_head(const PolyremeAttention& args, int64_t head) {
    const int64_t column = args.by_group ? head / group * (group + 2) + head % group : head;
    first_q = sample * seq * qkv_stride + column * head_dim;
    first_out = sample * seq * out_stride + head * head_dim;
    first_sum = (sample * args.heads + head) * seq;
    q = static_cast<const T*>(args.qkv) + first_q;
  }
  __device__ int size_of(int64_t first) const {
    return static_cast<int>(seq - first < kBlock ? seq - first : kBlock);
  }
};

// part[key][query] = chains over head_dim of a[key] * b[query], rows of `num_keys` and `num_queries`.
template <typename T>
__device__ void multiply_rows(Part& part, float* staged, const T* a, int64_t a_stride, int num_keys,
                              const T* b, int64_t b_stride, int num_queries, int64_t head_dim) {
  clear(part);
  multiply_tiles<true, true>(
      part, head_dim, staged,
      [&](int key, int64_t i) { return key < num_keys ? to_float(a[key * a_stride + i]) : 0.0f; },
      [&](int64_t i, int query) { return query < num_queries ? to_float(b[query * b_stride + i]) : 0.0f; });
}

// part[row][column] = chains over ascending steps of weight * values[step][column]. kLower: rows are queries
// and steps keys, weights[step][row]; otherwise rows are keys and steps queries, weights[row][step]. On the
// diagonal keys meet only queries that are not earlier. `values` begins at the first column.
template <bool kLower, typename T>
__device__ void multiply_weights(Part& part, float* staged, const float* weights, const T* values,
                                 int64_t stride, int num_steps, int columns, bool diagonal) {
  clear(part);
  for (int first = 0; first < num_steps; first += kDepth) {
    const int count = num_steps - first < kDepth ? num_steps - first : kDepth;
    for (int n = static_cast<int>(threadIdx.x); n < kDepth * kTile; n += kTileThreads) {
      const int step = n / kTile, column = n % kTile;
      if (step < count && column < columns) staged[n] = to_float(values[(first + step) * stride + column]);
    }
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      const int step = first + i;
      float x[kPart];
#pragma unroll
      for (int c = 0; c < kPart; ++c) x[c] = staged[i * kTile + tile_column(c)];
#pragma unroll
      for (int r = 0; r < kPart; ++r) {
        const int row = tile_row(r);
        if (diagonal && (kLower ? step > row : step < row)) continue;
        const float weight = weights[kLower ? step * kStride + row : row * kStride + step];
#pragma unroll
        for (int c = 0; c < kPart; ++c) part.at[r][c] = fmaf(weight, x[c], part.at[r][c]);
      }
    }
    __syncthreads();
  }
}

// body(result, row, column) for a thread's results.
template <typename Body>
__device__ void for_part(Part& part, Body body) {
#pragma unroll
  for (int r = 0; r < kPart; ++r) {
#pragma unroll
    for (int c = 0; c < kPart; ++c) body(part.at[r][c], tile_row(r), tile_column(c));
  }
}
__device__ void add_part(Part& sum, const Part& part) {
#pragma unroll
  for (int r = 0; r < kPart; ++r) {
#pragma unroll
    for (int c = 0; c < kPart; ++c) sum.at[r][c] = sum.at[r][c] + part.at[r][c];
  }
}

template <typename T>
__global__ void forward_kernel(PolyremeAttention args) {
  POLYREME_SHARED(float, staged, kStagedFloats);
  POLYREME_SHARED(float, scores, kBlock* kStride);  // S^T, then P^T
  POLYREME_SHARED(float, shift, kBlock);
  POLYREME_SHARED(float, alpha, kBlock);
  POLYREME_SHARED(float, total, kBlock);
  const Head<T> head(args, args.heads);
  const int64_t first_query = head.block * kBlock;
  const int num_queries = head.size_of(first_query);
  const auto thread = static_cast<int>(threadIdx.x);
  Part sum, part;
  clear(sum);
  float largest = -infinity(), exponentials = 0.0f;  // of query `thread`
  for (int64_t first_key = 0; first_key <= first_query; first_key += kBlock) {
    const bool diagonal = first_key == first_query;
    const int num_keys = diagonal ? num_queries : kBlock;
    multiply_rows(part, staged, head.k + first_key * head.qkv_stride, head.qkv_stride, num_keys,
                  head.q + first_query * head.qkv_stride, head.qkv_stride, num_queries, head.head_dim);
    for_part(part, [&](float x, int key, int query) {
      scores[key * kStride + query] = diagonal && query < key ? -infinity() : x;
    });
    __syncthreads();
    if (thread < kBlock) {
      const float before = largest;
      for (int key = 0; key < num_keys; ++key) {
        const float x = scores[key * kStride + thread];
        largest = x > largest ? x : largest;
      }
      shift[thread] = -(largest * args.scale);
      alpha[thread] = exp_f32(fmaf(before, args.scale, shift[thread]));
    }
    __syncthreads();
    for (int n = thread; n < num_keys * kBlock; n += kTileThreads) {
      float& x = scores[n / kBlock * kStride + n % kBlock];
      x = exp_f32(fmaf(x, args.scale, shift[n % kBlock]));
    }
    __syncthreads();
    if (thread < kBlock) {
      float of_block = 0.0f;
      for (int key = 0; key < num_keys; ++key) of_block = of_block + scores[key * kStride + thread];
      exponentials = fmaf(exponentials, alpha[thread], of_block);
      total[thread] = exponentials;
    }
    multiply_weights<true>(part, staged, scores, head.v + first_key * head.qkv_stride + head.first_column,
                           head.qkv_stride, num_keys, head.columns, diagonal);
#pragma unroll
    for (int r = 0; r < kPart; ++r) {
#pragma unroll
      for (int c = 0; c < kPart; ++c) sum.at[r][c] = fmaf(sum.at[r][c], alpha[tile_row(r)], part.at[r][c]);
    }
    __syncthreads();
  }
  T* out = static_cast<T*>(args.out) + head.first_out + first_query * head.out_stride + head.first_column;
  for_part(sum, [&](float x, int query, int column) {
    if (query < num_queries && column < head.columns)
      out[query * head.out_stride + column] = from_float<T>(x / total[query]);
  });
  if (blockIdx.y == 0 && thread < num_queries)
    args.log_sum_exp[head.first_sum + first_query + thread] = largest * args.scale + log_f32(exponentials);
}

// D = rowsum(dout * out) and log_sum_exp of a block of queries, in shared memory: sixteen chains and the tree
// of the CPU's vectors. `staged` is free again after it.
template <typename T>
__device__ void load_query_sums(const PolyremeAttention& args, const Head<T>& head, int64_t first_query,
                                float* staged, float* row_dot, float* log_sum_exp) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int num_queries = head.size_of(first_query);
  const int64_t first = head.first_out + first_query * head.out_stride;
  const auto* out = static_cast<const T*>(args.out) + first;
  const auto* dout = static_cast<const T*>(args.dout) + first;
  for (int n = thread; n < kBlock * kVirtualLanes; n += kTileThreads) {
    const int query = n / kVirtualLanes;
    float sum = 0.0f;
    for (int64_t c = n % kVirtualLanes; c < head.head_dim && query < num_queries; c += kVirtualLanes)
      sum =
          fmaf(to_float(out[query * head.out_stride + c]), to_float(dout[query * head.out_stride + c]), sum);
    staged[n] = sum;
  }
  __syncthreads();
  if (thread < kBlock) {
    float* lanes = staged + thread * kVirtualLanes;
    for (int half = kVirtualLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
    row_dot[thread] = lanes[0];
    log_sum_exp[thread] =
        thread < num_queries ? args.log_sum_exp[head.first_sum + first_query + thread] : 0.0f;
  }
  __syncthreads();
}

// P^T and dS^T of a pair of blocks; `probabilities` may be null.
template <typename T>
__device__ void score_gradients(const PolyremeAttention& args, const Head<T>& head, int64_t first_key,
                                int num_keys, int64_t first_query, int num_queries, float* staged,
                                const float* row_dot, const float* log_sum_exp, float* probabilities,
                                float* gradients) {
  Part scores, products;
  multiply_rows(scores, staged, head.k + first_key * head.qkv_stride, head.qkv_stride, num_keys,
                head.q + first_query * head.qkv_stride, head.qkv_stride, num_queries, head.head_dim);
  multiply_rows(products, staged, head.v + first_key * head.qkv_stride, head.qkv_stride, num_keys,
                static_cast<const T*>(args.dout) + head.first_out + first_query * head.out_stride,
                head.out_stride, num_queries, head.head_dim);
#pragma unroll
  for (int r = 0; r < kPart; ++r) {
#pragma unroll
    for (int c = 0; c < kPart; ++c) {
      const int at = tile_row(r) * kStride + tile_column(c), query = tile_column(c);
      const float p = exp_f32(fmaf(scores.at[r][c], args.scale, -log_sum_exp[query]));
      if (probabilities != nullptr) probabilities[at] = p;
      gradients[at] = p * (products.at[r][c] - row_dot[query]);
    }
  }
  __syncthreads();
}

template <typename T>
__global__ void dq_kernel(PolyremeAttention args) {
  POLYREME_SHARED(float, staged, kStagedFloats);
  POLYREME_SHARED(float, gradients, kBlock* kStride);
  POLYREME_SHARED(float, row_dot, kBlock);
  POLYREME_SHARED(float, log_sum_exp, kBlock);
  const Head<T> head(args, args.heads);
  const int64_t first_query = head.block * kBlock;
  const int num_queries = head.size_of(first_query);
  load_query_sums(args, head, first_query, staged, row_dot, log_sum_exp);
  Part sum, part;
  clear(sum);
  for (int64_t first_key = 0; first_key <= first_query; first_key += kBlock) {
    const bool diagonal = first_key == first_query;
    const int num_keys = diagonal ? num_queries : kBlock;
    score_gradients(args, head, first_key, num_keys, first_query, num_queries, staged, row_dot, log_sum_exp,
                    nullptr, gradients);
    multiply_weights<true>(part, staged, gradients, head.k + first_key * head.qkv_stride + head.first_column,
                           head.qkv_stride, num_keys, head.columns, diagonal);
    add_part(sum, part);
  }
  T* dq = static_cast<T*>(args.dqkv) + head.first_q + first_query * head.qkv_stride + head.first_column;
  for_part(sum, [&](float x, int query, int column) {
    if (query < num_queries && column < head.columns)
      dq[query * head.qkv_stride + column] = from_float<T>(x * args.scale);
  });
}

template <typename T>
__global__ void dkv_kernel(PolyremeAttention args) {
  POLYREME_SHARED(float, staged, kStagedFloats);
  POLYREME_SHARED(float, probabilities, kBlock* kStride);
  POLYREME_SHARED(float, gradients, kBlock* kStride);
  POLYREME_SHARED(float, row_dot, kBlock);
  POLYREME_SHARED(float, log_sum_exp, kBlock);
  Head<T> head(args, args.kv_heads);
  const int64_t first_key = head.block * kBlock;
  const int num_keys = head.size_of(first_key);
  Part dk, dv, part;
  clear(dk);
  clear(dv);
  for (int64_t of_group = 0; of_group < head.group; ++of_group) {
    head.take_query_head(args, head.first_head + of_group);
    for (int64_t first_query = first_key; first_query < head.seq; first_query += kBlock) {
      const bool diagonal = first_key == first_query;
      const int num_queries = head.size_of(first_query);
      load_query_sums(args, head, first_query, staged, row_dot, log_sum_exp);
      score_gradients(args, head, first_key, num_keys, first_query, num_queries, staged, row_dot, log_sum_exp,
                      probabilities, gradients);
      multiply_weights<false>(part, staged, probabilities,
                              static_cast<const T*>(args.dout) + head.first_out +
                                  first_query * head.out_stride + head.first_column,
                              head.out_stride, num_queries, head.columns, diagonal);
      add_part(dv, part);
      multiply_weights<false>(part, staged, gradients,
                              head.q + first_query * head.qkv_stride + head.first_column, head.qkv_stride,
                              num_queries, head.columns, diagonal);
      add_part(dk, part);
    }
  }
  const auto store = [&](Part& sum, int64_t first, float factor) {
    T* rows = static_cast<T*>(args.dqkv) + first + first_key * head.qkv_stride + head.first_column;
    for_part(sum, [&](float x, int key, int column) {
      if (key < num_keys && column < head.columns)
        rows[key * head.qkv_stride + column] = from_float<T>(x * factor);
    });
  };
  store(dk, head.first_k, args.scale);
  store(dv, head.first_v, 1.0f);
}

// Calls launch(T{}, blocks_of) where there is something to do; blocks_of(heads): the grid over so many heads.
template <typename Launch>
cudaError_t launch_heads(const PolyremeAttention& args, Launch launch) {
  if (args.batch < 0 || args.seq < 0 || args.heads < 1 || args.head_dim < 1 || args.kv_heads < 1 ||
      args.heads % args.kv_heads != 0)
    return cudaErrorInvalidValue;
  const int64_t blocks_of_head = (args.seq + kBlock - 1) / kBlock * args.batch;
  if (blocks_of_head * args.heads > INT32_MAX) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    if (blocks_of_head > 0)
      launch(type, [&](int64_t heads) {
        return dim3(static_cast<unsigned>(blocks_of_head * heads),
                    static_cast<unsigned>((args.head_dim + kTile - 1) / kTile));
      });
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_attention_forward(const PolyremeAttention& args, cudaStream_t stream) {
  return launch_heads(args, [&](auto type, auto blocks_of) {
    void (*kernel)(PolyremeAttention) = &forward_kernel<decltype(type)>;
    POLYREME_LAUNCH(kernel, blocks_of(args.heads), kTileThreads, stream, args);
  });
}

cudaError_t launch_attention_backward(const PolyremeAttention& args, cudaStream_t stream) {
  return launch_heads(args, [&](auto type, auto blocks_of) {
    void (*dq)(PolyremeAttention) = &dq_kernel<decltype(type)>;
    void (*dkv)(PolyremeAttention) = &dkv_kernel<decltype(type)>;
    POLYREME_LAUNCH(dq, blocks_of(args.heads), kTileThreads, stream, args);
    POLYREME_LAUNCH(dkv, blocks_of(args.kv_heads), kTileThreads, stream, args);
  });
}

}  // namespace polyreme::kernels
