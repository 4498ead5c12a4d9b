// The innermost kernels of gemm.cpp: one tile of C in registers, one chain over k.
// Private to gemm.cpp; compiled once per instruction set.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace polyreme::cpu::POLYREME_ISA {
namespace {

#if defined(__AVX512F__)
typedef __m512 Vec;
constexpr int kWidth = 16;     // lanes of a register
constexpr int kTileRows = 14;  // 28 accumulators, 2 columns of B, 1-2 broadcasts: 32 registers
#else
typedef __m256 Vec;
constexpr int kWidth = 8;
constexpr int kTileRows = 6;  // 12 accumulators, 2 columns of B, 1-2 broadcasts: 16 registers
#endif
constexpr int kTileVecs = 2;
constexpr int kTileCols = kTileVecs * kWidth;

// One call of a micro-kernel: C tile [rows, cols] += a panel [k, rows] times b panel [k, cols].
struct Tile {
  int64_t k;
  const float* a;  // k-major, kTileRows apart
  const float* b;  // k-major, b_stride apart: kTileCols if packed, else the matrix's own
  int64_t b_stride;
  float* c;
  int64_t c_stride;
  const float* bias;    // of the tile's first column, or null
  const float* next_c;  // the tile to come, fetched into the caches meanwhile
  int cols;             // columns of C in this tile
  bool accumulate;
};

#if defined(__AVX512F__)
inline __attribute__((always_inline)) Vec vec_load(const float* p) { return _mm512_loadu_ps(p); }
inline __attribute__((always_inline)) Vec vec_set(float x) { return _mm512_set1_ps(x); }
inline __attribute__((always_inline)) Vec vec_zero() { return _mm512_setzero_ps(); }
inline __attribute__((always_inline)) void vec_store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline __attribute__((always_inline)) Vec vec_fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// The first n lanes, n in [1, kWidth].
inline __attribute__((always_inline)) Vec vec_load_first(const float* p, int n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1u), p);
}
inline __attribute__((always_inline)) void vec_store_first(float* p, Vec x, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1u), x);
}
#else
inline __attribute__((always_inline)) Vec vec_load(const float* p) { return _mm256_loadu_ps(p); }
inline __attribute__((always_inline)) Vec vec_set(float x) { return _mm256_set1_ps(x); }
inline __attribute__((always_inline)) Vec vec_zero() { return _mm256_setzero_ps(); }
inline __attribute__((always_inline)) void vec_store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline __attribute__((always_inline)) Vec vec_fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline __attribute__((always_inline)) __m256i vec_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
// The first n lanes, n in [1, kWidth].
inline __attribute__((always_inline)) Vec vec_load_first(const float* p, int n) {
  return _mm256_maskload_ps(p, vec_mask(n));
}
inline __attribute__((always_inline)) void vec_store_first(float* p, Vec x, int n) {
  _mm256_maskstore_ps(p, vec_mask(n), x);
}
#endif

// kRows x kVecs registers of C; with kPartial the last register holds fewer than kWidth columns.
template <int kRows, int kVecs, bool kPartial>
__attribute__((noinline)) void micro_kernel(const Tile& t) {
  const float* a = t.a;
  const float* b = t.b;
  float* const c = t.c;
  const int64_t c_stride = t.c_stride, b_stride = t.b_stride;
  const int last = t.cols - (kVecs - 1) * kWidth;
  Vec acc[kRows][kVecs];
  if (t.accumulate) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        const float* p = c + i * c_stride + j * kWidth;
        acc[i][j] = kPartial && j == kVecs - 1 ? vec_load_first(p, last) : vec_load(p);
      }
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) acc[i][j] = vec_zero();
    }
  }
  const auto step = [&]() __attribute__((always_inline)) {
    Vec bk[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      const float* p = b + j * kWidth;
      bk[j] = kPartial && j == kVecs - 1 ? vec_load_first(p, last) : vec_load(p);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec ai = vec_set(a[i]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) acc[i][j] = vec_fma(ai, bk[j], acc[i][j]);
    }
    a += kTileRows;
    b += b_stride;
  };
  // The next tile of C comes from far: it is fetched during this one, a row for every kRows-th part
  // of the sum. All rows at once would fill the miss buffers and stall the panels behind them.
  const float* fetch = t.next_c;
  const int64_t part = (t.k / (4 * kRows) + 1) * 4;
  for (int64_t left = t.k; left > 0; left -= part, fetch += c_stride) {
#pragma GCC unroll 4
    for (int j = 0; j < kTileCols; j += 16) __builtin_prefetch(fetch + j, 1, 3);
    __builtin_prefetch(fetch + kTileCols - 1, 1, 3);
    int64_t steps = left < part ? left : part;
    for (; steps >= 4; steps -= 4) {
      step();
      step();
      step();
      step();
    }
    for (; steps > 0; --steps) step();
  }
  if (t.bias != nullptr) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      const float* p = t.bias + j * kWidth;
      const Vec add = kPartial && j == kVecs - 1 ? vec_load_first(p, last) : vec_load(p);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) acc[i][j] = acc[i][j] + add;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      float* p = c + i * c_stride + j * kWidth;
      if (kPartial && j == kVecs - 1)
        vec_store_first(p, acc[i][j], last);
      else
        vec_store(p, acc[i][j]);
    }
  }
}

}  // namespace
}  // namespace polyreme::cpu::POLYREME_ISA
