// The forward pass of one head; attention_tiles.h defines the words and the method.
#include "ops/cpu/kernels/attention.h"
#include "ops/cpu/kernels/attention_tiles.h"

namespace polyreme::cpu::POLYREME_ISA {

namespace {

struct ForwardScratch {
  float* k;           // [seq, width]
  float* v;           // [seq, width]
  float* q;           // [kBlock, width]
  float* q_columns;   // [width, kBlock]
  float* sum_values;  // [kBlock, width]: O
  float* scores;      // [kBlock, kBlock]: S^T, then P^T
  float* max_score;   // [kBlock]: m
  float* sum;         // [kBlock]: l
  float* alpha;       // [kBlock]
};

// scores = K Q^T of num_keys keys; max_score rises to the largest of each query. On the diagonal block
// -inf stands where the key is later than the query.
template <bool kDiagonal>
void compute_scores(const ForwardScratch& s, const float* k, int num_keys, int64_t head_dim) {
  const int64_t width = padded(head_dim);
  const v16f minus_inf = broadcast(-__builtin_inff());
  auto tile = [&]<int kRows, int kCols>(int row, int vec) __attribute__((always_inline)) {
    Tile<kRows, kCols> t;
    clear(t);
    multiply(t, k + row * width, width, 1, s.q_columns + vec * kLanes, kBlock, head_dim);
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      const v16i query = iota() + broadcast_i((vec + c) * kLanes);
      v16f largest = load_aligned(s.max_score + (vec + c) * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        v16f x = t.at[r][c];
        if (kDiagonal) x = select(query < broadcast_i(row + r), minus_inf, x);
        largest = max(x, largest);
        store_aligned(s.scores + (row + r) * kBlock + (vec + c) * kLanes, x);
      }
      store_aligned(s.max_score + (vec + c) * kLanes, largest);
    }
  };
  auto rows = [&]<int kRows>(int row) __attribute__((always_inline)) {
    const int first_vec = kDiagonal ? row / kLanes : 0;
    for (int r = row; r < row + kRows; ++r)
      for (int v = 0; v < first_vec; ++v) store_aligned(s.scores + r * kBlock + v * kLanes, minus_inf);
    for_vecs<kRows, kTileVecs>(row, first_vec, kVecs, tile);
  };
  for_rows(num_keys, rows);
}

// scores become P^T; alpha and sum follow. old_max is max_score before this key block.
void exponentiate_scores(const ForwardScratch& s, int num_keys, float scale, const v16f* old_max) {
  const v16f factor = broadcast(scale);
  v16f shift[kVecs], sum[kVecs];
  for (int v = 0; v < kVecs; ++v) {
    shift[v] = -(load_aligned(s.max_score + v * kLanes) * factor);
    sum[v] = zero();
  }
  for (int key = 0; key < num_keys; ++key) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      float* p = s.scores + key * kBlock + v * kLanes;
      const v16f x = exp(fma(load_aligned(p), factor, shift[v]));
      sum[v] = sum[v] + x;
      store_aligned(p, x);
    }
  }
  for (int v = 0; v < kVecs; ++v) {
    const v16f alpha = exp(fma(old_max[v], factor, shift[v]));
    store_aligned(s.alpha + v * kLanes, alpha);
    store_aligned(s.sum + v * kLanes, fma(load_aligned(s.sum + v * kLanes), alpha, sum[v]));
  }
}

template <typename T>
void forward_block(const AttentionForwardHead& h, const ForwardScratch& s, int64_t first_query) {
  const int64_t width = padded(h.head_dim);
  const int64_t left = h.seq - first_query;
  const int num_queries = left < kBlock ? static_cast<int>(left) : kBlock;
  pack_rows(static_cast<const T*>(h.q) + first_query * h.qkv_stride, h.qkv_stride, num_queries, kBlock,
            h.head_dim, s.q);
  transpose_block(s.q, width, s.q_columns);
  for (int v = 0; v < kVecs; ++v) {
    store_aligned(s.max_score + v * kLanes, broadcast(-__builtin_inff()));
    store_aligned(s.sum + v * kLanes, zero());
  }
  clear_floats(s.sum_values, kBlock * width);
  for (int64_t key = 0; key <= first_query; key += kBlock) {
    const bool diagonal = key == first_query;
    const int n = diagonal ? num_queries : kBlock;
    const float* k = s.k + key * width;
    v16f old_max[kVecs];
    for (int v = 0; v < kVecs; ++v) old_max[v] = load_aligned(s.max_score + v * kLanes);
    if (diagonal)
      compute_scores<true>(s, k, n, h.head_dim);
    else
      compute_scores<false>(s, k, n, h.head_dim);
    exponentiate_scores(s, n, h.scale, old_max);
    add_products<true>(s.sum_values, s.alpha, num_queries, s.scores, s.v + key * width, n, diagonal, width);
  }
  for (int q = 0; q < num_queries; ++q) {
    const v16f sum = broadcast(s.sum[q]);
    float* row = s.sum_values + q * width;
    for (int64_t c = 0; c < width; c += kLanes) store_aligned(row + c, load_aligned(row + c) / sum);
  }
  unpack_rows(s.sum_values, num_queries, h.head_dim, 1.0f,
              static_cast<T*>(h.out) + first_query * h.out_stride, h.out_stride);
  for (int v = 0; v * kLanes < num_queries; ++v) {
    const v16f m = load_aligned(s.max_score + v * kLanes) * broadcast(h.scale);
    const int n = num_queries - v * kLanes < kLanes ? num_queries - v * kLanes : kLanes;
    store_partial(h.log_sum_exp + first_query + v * kLanes, m + log(load_aligned(s.sum + v * kLanes)), n);
  }
}

}  // namespace

int64_t attention_forward_scratch(int64_t seq, int64_t head_dim) {
  return (2 * seq + 3 * kBlock) * padded(head_dim) + kBlock * kBlock + 3 * kBlock;
}

void attention_forward_head(const AttentionForwardHead* head, float* scratch) {
  const AttentionForwardHead& h = *head;
  const int64_t width = padded(h.head_dim);
  ForwardScratch s;
  s.k = scratch;
  s.v = s.k + h.seq * width;
  s.q = s.v + h.seq * width;
  s.q_columns = s.q + kBlock * width;
  s.sum_values = s.q_columns + kBlock * width;
  s.scores = s.sum_values + kBlock * width;
  s.max_score = s.scores + kBlock * kBlock;
  s.sum = s.max_score + kBlock;
  s.alpha = s.sum + kBlock;
  with_element(h.type, [&](auto t) {
    using T = decltype(t);
    pack_rows(static_cast<const T*>(h.k), h.qkv_stride, h.seq, h.seq, h.head_dim, s.k);
    pack_rows(static_cast<const T*>(h.v), h.qkv_stride, h.seq, h.seq, h.head_dim, s.v);
    for (int64_t query = 0; query < h.seq; query += kBlock) forward_block<T>(h, s, query);
  });
}

}  // namespace polyreme::cpu::POLYREME_ISA
