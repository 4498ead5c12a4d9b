// Causal attention of one head, forward and backward, in blocks with an online softmax (Milakov & Gimelshein
// 2018; the backward pass as in Dao et al. 2022 and Dao 2023). Shared by attention_forward.cpp and
// attention_backward.cpp, which are compiled once per instruction set.
//
// Words. A query block is kBlock consecutive rows of q, a key block kBlock consecutive rows of k and v (the
// last ones may be shorter). Both begin at multiples of kBlock in the sample, so the order of every sum
// depends on nothing else. Scores are held transposed, one row a key and one lane a query: S^T = K Q^T. So
// the running maximum m, the sum l = sum exp(scale S - scale m) and D = rowsum(dout * out) are vectors over
// the queries of the block and need no horizontal step; k, v, q and dout serve as they are, and only q and
// dout are transposed as well, once per query block.
//
//   forward, key blocks ascending:  m' = max(m, max S); P = exp(scale S - scale m');
//     alpha = exp(scale m - scale m'); l = l alpha + sum P; O = O alpha + P V;
//     in the end  out = O / l,  log_sum_exp = scale m + log l
//   backward:  P = exp(scale S - log_sum_exp);  dS = P (dout V^T - D);
//     dV += P^T dout;  dK += dS^T Q (query blocks ascending);  dQ += dS K (key blocks ascending);
//     in the end dQ and dK are multiplied by scale
//
// Accumulator: fp32, one chain of fused multiply-adds per element and block over ascending head_dim (S, dP),
// keys (O, dQ) or queries (dK, dV). A block's chain begins at zero and is then added to the sum over the
// blocks before: one chain over a long sequence has twice the error or more. Queries see keys up to their
// own position: blocks and vectors above the diagonal are skipped, and the chains of diagonal tiles end (or
// begin) at the diagonal, so that not even a NaN passes from a later token to an earlier one. A NaN score
// makes its row NaN: max() skips it, exp() and the sums keep it.
//
// Storage: q, k, v, out and their gradients in any format, widened by pack_rows and rounded by unpack_rows.
//
// Bytes: per head, q, k, v, out and dout are read once and results written once. k and v (backward: and
// their gradients) live in scratch memory as rows of `width` floats, head_dim rounded up to whole vectors
// with zeros behind: rows of the tensors are pages apart and would share a few cache sets. Each block pair
// reads 2 (backward: reads 4 and writes 2) * kBlock * width floats of that; the rest stays in the L1 and L2
// caches.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "ops/cpu/kernels/vec.h"

namespace polyreme::cpu::POLYREME_ISA {
namespace {

constexpr int kBlock = 64;
constexpr int kVecs = kBlock / kLanes;  // vectors over the queries of a block

// A register tile is kTileRows rows of at most kTileVecs vectors: all accumulators and one row of
// the other operand fit the registers, and enough chains run side by side to hide the latency.
#if defined(__AVX512F__)
constexpr int kTileRows = 4;
constexpr int kTileVecs = 4;
#else
constexpr int kTileRows = 3;
constexpr int kTileVecs = 2;
#endif

template <int kRows, int kCols>
struct Tile {
  v16f at[kRows][kCols];
};

constexpr int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// ---- Register tiles -------------------------------------------------------------------------------

template <int kRows, int kCols>
POLYREME_INLINE void clear(Tile<kRows, kCols>& tile) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) tile.at[r][c] = zero();
  }
}

// tile[r][c] += sum over ascending i in [0, depth) of a[r * row_stride + i * step] * b[i * ldb + c].
template <int kRows, int kCols>
POLYREME_INLINE void multiply(Tile<kRows, kCols>& tile, const float* a, int64_t row_stride, int64_t step,
                              const float* b, int64_t ldb, int64_t depth) {
  for (int64_t i = 0; i < depth; ++i, a += step, b += ldb) {
    v16f row[kCols];
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) row[c] = load_aligned(b + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const v16f x = broadcast(a[r * row_stride]);
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) tile.at[r][c] = fma(x, row[c], tile.at[r][c]);
    }
  }
}

// The kRows steps of multiply() that cross the diagonal: step i counts for the rows r >= i
// (kLower, the rows are queries and the steps keys) or r <= i (the rows are keys).
template <bool kLower, int kRows, int kCols>
POLYREME_INLINE void multiply_diagonal(Tile<kRows, kCols>& tile, const float* a, int64_t row_stride,
                                       int64_t step, const float* b, int64_t ldb) {
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int r = kLower ? i : 0; r < (kLower ? kRows : i + 1); ++r) {
      const v16f x = broadcast(a[r * row_stride + i * step]);
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c)
        tile.at[r][c] = fma(x, load_aligned(b + i * ldb + c * kLanes), tile.at[r][c]);
    }
  }
}

// Calls body.operator()<kRows, cols>(row, vec) for tiles that cover the vectors [vec, end_vec).
template <int kRows, int kCols, typename Body>
POLYREME_INLINE void for_vecs(int row, int vec, int end_vec, Body& body) {
  for (; vec + kCols <= end_vec; vec += kCols) body.template operator()<kRows, kCols>(row, vec);
  if constexpr (kCols > 1) {
    if (vec < end_vec) for_vecs<kRows, kCols - 1>(row, vec, end_vec, body);
  }
}
// Calls body.operator()<rows>(row) for tiles that cover the rows [0, num_rows).
template <typename Body>
POLYREME_INLINE void for_rows(int num_rows, Body& body) {
  int row = 0;
  for (; row + kTileRows <= num_rows; row += kTileRows) body.template operator()<kTileRows>(row);
  for (; row < num_rows; ++row) body.template operator()<1>(row);
}

// ---- Products with P or dS ------------------------------------------------------------------------

// One block's share of O or dQ (kLower: rows are queries, steps are keys) or of dK or dV (rows are keys,
// steps are queries): sum[row] = sum[row] * factor[row] + sum over steps of weights * values[step].
// `weights` is P^T or dS^T, [kBlock keys, kBlock queries]; sum and values have `width` floats a row;
// factor may be null for 1. `diagonal`: row and step 0 are the same token; a row takes the steps
// up to itself (kLower) or from itself on.
template <bool kLower>
POLYREME_INLINE void add_products(float* sum, const float* factor, int num_rows, const float* weights,
                                  const float* values, int num_steps, bool diagonal, int64_t width) {
  constexpr int64_t kRowStride = kLower ? 1 : kBlock;
  constexpr int64_t kStep = kLower ? kBlock : 1;
  auto tile = [&]<int kRows, int kCols>(int row, int vec) __attribute__((always_inline)) {
    Tile<kRows, kCols> t;
    clear(t);
    const float* w = weights + row * kRowStride;
    const float* x = values + vec * kLanes;
    const int64_t begin = diagonal && !kLower ? row + kRows : 0;
    const int64_t end = diagonal && kLower ? row : num_steps;
    if (diagonal && !kLower)
      multiply_diagonal<false>(t, w + row * kStep, kRowStride, kStep, x + row * width, width);
    multiply(t, w + begin * kStep, kRowStride, kStep, x + begin * width, width, end - begin);
    if (diagonal && kLower)
      multiply_diagonal<true>(t, w + row * kStep, kRowStride, kStep, x + row * width, width);
    float* s = sum + row * width + vec * kLanes;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const v16f f = broadcast(factor ? factor[row + r] : 1.0f);
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) {
        float* p = s + r * width + c * kLanes;
        store_aligned(p, fma(load_aligned(p), f, t.at[r][c]));
      }
    }
  };
  const int num_vecs = static_cast<int>(width / kLanes);
  for (int vec = 0; vec < num_vecs; vec += kTileVecs) {  // outside: a strip of values stays in the L1 cache
    const int end_vec = vec + kTileVecs < num_vecs ? vec + kTileVecs : num_vecs;
    auto rows = [&]<int kRows>(int row) __attribute__((always_inline)) {
      for_vecs<kRows, kTileVecs>(row, vec, end_vec, tile);
    };
    for_rows(num_rows, rows);
  }
}

// ---- Packing --------------------------------------------------------------------------------------

// Rows of the tensors lie pages apart, where the hardware does not prefetch: ask this many rows ahead.
constexpr int64_t kRowsAhead = 8;

void clear_floats(float* to, int64_t count) {  // count: a multiple of kLanes
  for (int64_t i = 0; i < count; i += kLanes) store_aligned(to + i, zero());
}

// Widens rows of head_dim elements to rows of `width` floats, zeros behind them and in the rows from
// `rows` to `padded_rows`.
template <typename T>
void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t padded_rows, int64_t head_dim,
               float* to) {
  const int64_t width = padded(head_dim);
  for (int64_t r = 0; r < rows; ++r, from += stride, to += width) {
    for (int64_t c = 0; c < width; c += kLanes) {
      const int64_t n = head_dim - c;
      if (r + kRowsAhead < rows) __builtin_prefetch(from + kRowsAhead * stride + c);
      store_aligned(to + c, n >= kLanes ? load(from + c) : load_partial(from + c, static_cast<int>(n)));
    }
  }
  clear_floats(to, (padded_rows - rows) * width);
}

// Rows of head_dim elements = packed rows * factor.
template <typename T>
void unpack_rows(const float* from, int64_t rows, int64_t head_dim, float factor, T* to, int64_t stride) {
  const int64_t width = padded(head_dim);
  const v16f f = broadcast(factor);
  for (int64_t r = 0; r < rows; ++r, from += width, to += stride) {
    for (int64_t c = 0; c < width; c += kLanes) {
      if (r + kRowsAhead < rows) __builtin_prefetch(to + kRowsAhead * stride + c, 1);
      const v16f x = load_aligned(from + c) * f;
      const int64_t n = head_dim - c;
      if (n >= kLanes)
        store(to + c, x);
      else
        store_partial(to + c, x, static_cast<int>(n));
    }
  }
}

// to[width][kBlock] = transposed from[kBlock][width].
void transpose_block(const float* from, int64_t width, float* to) {
  for (int64_t r = 0; r < kBlock; r += 4) {
    for (int64_t c = 0; c < width; c += 4) {
      const float* p = from + r * width + c;
      __m128 r0 = _mm_load_ps(p), r1 = _mm_load_ps(p + width);
      __m128 r2 = _mm_load_ps(p + 2 * width), r3 = _mm_load_ps(p + 3 * width);
      _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
      float* q = to + c * kBlock + r;
      _mm_store_ps(q, r0);
      _mm_store_ps(q + kBlock, r1);
      _mm_store_ps(q + 2 * kBlock, r2);
      _mm_store_ps(q + 3 * kBlock, r3);
    }
  }
}

}  // namespace
}  // namespace polyreme::cpu::POLYREME_ISA
