// The backward pass of one head; attention_tiles.h defines the words and the method.
#include "ops/cpu/kernels/attention.h"
#include "ops/cpu/kernels/attention_tiles.h"

namespace polyreme::cpu::POLYREME_ISA {

namespace {

struct BackwardScratch {
  float* k;             // [seq, width]
  float* v;             // [seq, width]
  float* dk;            // [seq, width]
  float* dv;            // [seq, width]
  float* q;             // [kBlock, width]
  float* dout;          // [kBlock, width]
  float* q_columns;     // [width, kBlock]
  float* dout_columns;  // [width, kBlock]
  float* dq;            // [kBlock, width]
  float* p;             // [kBlock, kBlock]: P^T
  float* ds;            // [kBlock, kBlock]: dS^T
  float* log_sum_exp;   // [kBlock]
  float* row_dot;       // [kBlock]: D
};

// P^T and dS^T of num_keys keys; on the diagonal block, only vectors that reach the diagonal are
// written, and what they hold above it is not read later.
void compute_score_gradients(const BackwardScratch& s, const float* k, const float* v, int num_keys,
                             bool diagonal, int64_t head_dim, float scale) {
  const int64_t width = padded(head_dim);
  const v16f factor = broadcast(scale);
  auto tile = [&]<int kRows, int kCols>(int row, int vec) __attribute__((always_inline)) {
    Tile<kRows, kCols> t;
    clear(t);
    multiply(t, k + row * width, width, 1, s.q_columns + vec * kLanes, kBlock, head_dim);
    float* p = s.p + row * kBlock + vec * kLanes;
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      const v16f shift = -load_aligned(s.log_sum_exp + (vec + c) * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
        store_aligned(p + r * kBlock + c * kLanes, exp(fma(t.at[r][c], factor, shift)));
    }
    clear(t);
    multiply(t, v + row * width, width, 1, s.dout_columns + vec * kLanes, kBlock, head_dim);
    float* ds = s.ds + row * kBlock + vec * kLanes;
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      const v16f dot = load_aligned(s.row_dot + (vec + c) * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const v16f x = load_aligned(p + r * kBlock + c * kLanes);
        store_aligned(ds + r * kBlock + c * kLanes, x * (t.at[r][c] - dot));
      }
    }
  };
  auto rows = [&]<int kRows>(int row) __attribute__((always_inline)) {
    for_vecs<kRows, kTileVecs>(row, diagonal ? row / kLanes : 0, kVecs, tile);
  };
  for_rows(num_keys, rows);
}

template <typename T>
void backward_block(const AttentionBackwardHead& h, const BackwardScratch& s, int64_t head,
                    int64_t first_query) {
  const int64_t width = padded(h.head_dim);
  const int64_t left = h.seq - first_query;
  const int num_queries = left < kBlock ? static_cast<int>(left) : kBlock;
  const int64_t column = head * h.head_dim;
  const int64_t first_qkv = first_query * h.qkv_stride + column;
  const int64_t first_out = first_query * h.out_stride + column;
  const float* log_sum_exp = h.log_sum_exp + head * h.seq + first_query;
  pack_rows(static_cast<const T*>(h.q) + first_qkv, h.qkv_stride, num_queries, kBlock, h.head_dim, s.q);
  pack_rows(static_cast<const T*>(h.dout) + first_out, h.out_stride, num_queries, kBlock, h.head_dim, s.dout);
  pack_rows(static_cast<const T*>(h.out) + first_out, h.out_stride, num_queries, kBlock, h.head_dim, s.dq);
  transpose_block(s.q, width, s.q_columns);
  transpose_block(s.dout, width, s.dout_columns);
  for (int q = 0; q < kBlock; ++q) {
    v16f sum = zero();
    for (int64_t c = 0; c < width; c += kLanes)
      sum = fma(load_aligned(s.dq + q * width + c), load_aligned(s.dout + q * width + c), sum);
    s.row_dot[q] = reduce_sum(sum);
    s.log_sum_exp[q] = q < num_queries ? log_sum_exp[q] : 0.0f;
  }
  clear_floats(s.dq, kBlock * width);
  for (int64_t key = 0; key <= first_query; key += kBlock) {
    const bool diagonal = key == first_query;
    const int num_keys = diagonal ? num_queries : kBlock;
    const float* k = s.k + key * width;
    compute_score_gradients(s, k, s.v + key * width, num_keys, diagonal, h.head_dim, h.scale);
    add_products<false>(s.dv + key * width, nullptr, num_keys, s.p, s.dout, num_queries, diagonal, width);
    add_products<false>(s.dk + key * width, nullptr, num_keys, s.ds, s.q, num_queries, diagonal, width);
    add_products<true>(s.dq, nullptr, num_queries, s.ds, k, num_keys, diagonal, width);
  }
  unpack_rows(s.dq, num_queries, h.head_dim, h.scale, static_cast<T*>(h.dq) + first_qkv, h.qkv_stride);
}

}  // namespace

int64_t attention_backward_scratch(int64_t seq, int64_t head_dim) {
  return (4 * seq + 5 * kBlock) * padded(head_dim) + 2 * kBlock * kBlock + 2 * kBlock;
}

void attention_backward_head(const AttentionBackwardHead* head, float* scratch) {
  const AttentionBackwardHead& h = *head;
  const int64_t width = padded(h.head_dim);
  BackwardScratch s;
  s.k = scratch;
  s.v = s.k + h.seq * width;
  s.dk = s.v + h.seq * width;
  s.dv = s.dk + h.seq * width;
  s.q = s.dv + h.seq * width;
  s.dout = s.q + kBlock * width;
  s.q_columns = s.dout + kBlock * width;
  s.dout_columns = s.q_columns + kBlock * width;
  s.dq = s.dout_columns + kBlock * width;
  s.p = s.dq + kBlock * width;
  s.ds = s.p + kBlock * kBlock;
  s.log_sum_exp = s.ds + kBlock * kBlock;
  s.row_dot = s.log_sum_exp + kBlock;
  clear_floats(s.dk, h.seq * width);
  clear_floats(s.dv, h.seq * width);
  with_element(h.type, [&](auto t) {
    using T = decltype(t);
    pack_rows(static_cast<const T*>(h.k), h.qkv_stride, h.seq, h.seq, h.head_dim, s.k);
    pack_rows(static_cast<const T*>(h.v), h.qkv_stride, h.seq, h.seq, h.head_dim, s.v);
    for (int64_t head_of_group = 0; head_of_group < h.group; ++head_of_group)
      for (int64_t query = 0; query < h.seq; query += kBlock) backward_block<T>(h, s, head_of_group, query);
    unpack_rows(s.dk, h.seq, h.head_dim, h.scale, static_cast<T*>(h.dk), h.qkv_stride);
    unpack_rows(s.dv, h.seq, h.head_dim, 1.0f, static_cast<T*>(h.dv), h.qkv_stride);
  });
}

}  // namespace polyreme::cpu::POLYREME_ISA
