// Packing for gemm.cpp: copies of operand blocks in the order in which the micro-kernels read them.
// Private to gemm.cpp; compiled once per instruction set.
//
// An operand is seen as `count` lines (rows of A, columns of B) of `k` elements. A panel holds
// `width` lines, k-major: element (line, k) of a panel lies at k * width + line. Panels follow each
// other at panel_stride. Two layouts of the source occur: lines contiguous along k (a transposing
// copy) and lines interleaved, element (line, k) at k * stride + line (a plain copy). Sources of 16-bit
// elements are widened on the way: panels are always fp32.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "ops/cpu/kernels/gemm_micro.h"
#include "ops/cpu/kernels/vec.h"

namespace polyreme::cpu::POLYREME_ISA {
namespace {

inline __attribute__((always_inline)) int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- Widening loads of one register ---------------------------------------------------------------

#if defined(__AVX512F__)
inline __attribute__((always_inline)) Vec widen_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, x), 16));
}
inline __attribute__((always_inline)) Vec widen_f16(__m256i x) { return _mm512_maskz_cvtph_ps(0xffff, x); }
inline __attribute__((always_inline)) __m256i load_bits(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline __attribute__((always_inline)) __m256i load_first_bits(const void* p, int n) {
  return _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1u), p);
}
#else
inline __attribute__((always_inline)) Vec widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline __attribute__((always_inline)) Vec widen_f16(__m128i x) { return _mm256_cvtph_ps(x); }
inline __attribute__((always_inline)) __m128i load_bits(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
inline __attribute__((always_inline)) __m128i load_first_bits(const void* p, int n) {
  uint16_t lanes[8] = {};
  for (int i = 0; i < n; ++i) lanes[i] = static_cast<const uint16_t*>(p)[i];
  return load_bits(lanes);
}
#endif
inline __attribute__((always_inline)) Vec vec_load(const bf16* p) { return widen_bf16(load_bits(p)); }
inline __attribute__((always_inline)) Vec vec_load(const f16* p) { return widen_f16(load_bits(p)); }
inline __attribute__((always_inline)) Vec vec_load_first(const bf16* p, int n) {
  return widen_bf16(load_first_bits(p, n));
}
inline __attribute__((always_inline)) Vec vec_load_first(const f16* p, int n) {
  return widen_f16(load_first_bits(p, n));
}

// ---- Square transposes in registers -------------------------------------------------------------

#if defined(__AVX512F__)
// Rows r[0..15] become columns.
inline __attribute__((always_inline)) void transpose(Vec* r) {
  Vec t[16], u[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[i + 1] =
        __builtin_shufflevector(r[i], r[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      u[i + 2 * h] = __builtin_shufflevector(t[i + h], t[i + 2 + h], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25,
                                             12, 13, 28, 29);
      u[i + 2 * h + 1] = __builtin_shufflevector(t[i + h], t[i + 2 + h], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11,
                                                 26, 27, 14, 15, 30, 31);
    }
  }
  // u[4g + q] holds, in its 128-bit quarter p, column 4p + q of rows 4g..4g+3.
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const Vec a = u[q], b = u[4 + q], c = u[8 + q], d = u[12 + q];
    const Vec ab_even =
        __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const Vec ab_odd =
        __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const Vec cd_even =
        __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const Vec cd_odd =
        __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    r[q] =
        __builtin_shufflevector(ab_even, cd_even, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    r[8 + q] =
        __builtin_shufflevector(ab_even, cd_even, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    r[4 + q] =
        __builtin_shufflevector(ab_odd, cd_odd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    r[12 + q] =
        __builtin_shufflevector(ab_odd, cd_odd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
}
#else
// Rows r[0..7] become columns.
inline __attribute__((always_inline)) void transpose(Vec* r) {
  Vec t[8], u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      u[i + 2 * h] = _mm256_shuffle_ps(t[i + h], t[i + 2 + h], 0x44);
      u[i + 2 * h + 1] = _mm256_shuffle_ps(t[i + h], t[i + 2 + h], 0xee);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    r[q] = _mm256_permute2f128_ps(u[q], u[4 + q], 0x20);
    r[4 + q] = _mm256_permute2f128_ps(u[q], u[4 + q], 0x31);
  }
}
#endif

// ---- Panels -------------------------------------------------------------------------------------

// Stores kWidth lanes where the panel is wider, else exactly the panel's `kPanel` lanes.
template <int kPanel>
inline __attribute__((always_inline)) void store_panel_row(float* p, Vec x) {
  if (kPanel % kWidth == 0) {
    vec_store(p, x);
    return;
  }
#if defined(__AVX512F__)
  vec_store_first(p, x, kPanel);
#else
  // Masked stores are slow on some AVX2 machines; a panel of six is a quad and a pair.
  static_assert(kPanel % kWidth == 0 || kPanel == 6, "");
  _mm_storeu_ps(p, _mm256_castps256_ps128(x));
  _mm_storel_pi(reinterpret_cast<__m64*>(p + 4), _mm256_extractf128_ps(x, 1));
#endif
}

// Lines [0, lines) of one register-wide group, contiguous along k, into a panel of kPanel lines.
// Missing lines become zeros.
template <int kPanel, typename T>
void pack_group_transposed(const T* src, int64_t stride, int lines, int64_t k, float* dst) {
  constexpr int kUsed = kPanel < kWidth ? kPanel : kWidth;
  for (int64_t p = 0; p < k; p += kWidth) {
    const int depth = static_cast<int>(smaller(k - p, kWidth));
    Vec r[kWidth];
    if (depth == kWidth && lines == kUsed) {
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) r[i] = i < kUsed ? vec_load(src + i * stride + p) : vec_zero();
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) {
        r[i] = i < lines ? vec_load_first(src + i * stride + p, depth) : vec_zero();
      }
    }
    transpose(r);
    float* out = dst + p * kPanel;
    if (depth == kWidth) {
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) store_panel_row<kPanel>(out + i * kPanel, r[i]);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) {
        if (i < depth) store_panel_row<kPanel>(out + i * kPanel, r[i]);
      }
    }
  }
}

template <int kPanel, typename T>
void pack_transposed(const T* src, int64_t stride, int64_t count, int64_t k, float* dst,
                     int64_t panel_stride) {
  for (int64_t first = 0; first < count; first += kPanel) {
    for (int group = 0; group < kPanel; group += kWidth) {
      const int64_t left = count - first - group;
      const int64_t most = kPanel - group < kWidth ? kPanel - group : kWidth;
      const int lines = static_cast<int>(left < 0 ? 0 : smaller(left, most));
      pack_group_transposed<kPanel>(src + (first + group) * stride, stride, lines, k, dst + group);
    }
    dst += panel_stride;
  }
}

// One row of a whole panel, kPanel contiguous elements.
template <int kPanel, typename T>
inline __attribute__((always_inline)) void copy_panel_row(const T* in, float* out) {
  if (kPanel % kWidth == 0) {
#pragma GCC unroll 4
    for (int j = 0; j < kPanel; j += kWidth) vec_store(out + j, vec_load(in + j));
    return;
  }
#if defined(__AVX512F__)
  vec_store_first(out, vec_load_first(in, kPanel), kPanel);
#else
  if constexpr (sizeof(T) == sizeof(float)) {
    _mm_storeu_ps(out, _mm_loadu_ps(in));
    _mm_storel_pi(reinterpret_cast<__m64*>(out + 4),
                  _mm_loadl_pi(_mm_setzero_ps(), reinterpret_cast<const __m64*>(in + 4)));
  } else {
    T lanes[kWidth] = {};
    for (int i = 0; i < kPanel; ++i) lanes[i] = in[i];
    store_panel_row<kPanel>(out, vec_load(lanes));
  }
#endif
}

// Element (line, k) at src[k * stride + line].
template <int kPanel, typename T>
void pack_interleaved(const T* src, int64_t stride, int64_t count, int64_t k, float* dst,
                      int64_t panel_stride) {
  // A few rows at a time across all panels: reads run along memory, writes stay in few pages.
  constexpr int64_t kRowsAtOnce = 8;
  for (int64_t p = 0; p < k; p += kRowsAtOnce) {
    const int64_t depth = smaller(k - p, kRowsAtOnce);
    float* panel = dst + p * kPanel;
    int64_t first = 0;
    for (; first + kPanel <= count; first += kPanel, panel += panel_stride) {
      const T* in = src + p * stride + first;
      for (int64_t q = 0; q < depth; ++q) copy_panel_row<kPanel>(in + q * stride, panel + q * kPanel);
    }
    if (first < count) {
      const int lines = static_cast<int>(count - first);
      const T* in = src + p * stride + first;
      for (int64_t q = 0; q < depth; ++q, in += stride) {
        for (int j = 0; j < kPanel; ++j) panel[q * kPanel + j] = j < lines ? widen(in[j]) : 0.0f;
      }
    }
  }
}

template <int kPanel, typename T>
void pack_elements(const T* src, int64_t line_stride, int64_t k_stride, int64_t count, int64_t k, float* dst,
                   int64_t panel_stride) {
  // A single line with any k stride has interleaved form; line_stride is free when count <= 1.
  if (k_stride == 1 || k == 1) {
    pack_transposed<kPanel>(src, line_stride, count, k, dst, panel_stride);
  } else {
    pack_interleaved<kPanel>(src, k_stride, count, k, dst, panel_stride);
  }
}

// `src` is the operand's first element, `offset` elements into it the block begins.
template <int kPanel>
void pack(Element type, const void* src, int64_t offset, int64_t line_stride, int64_t k_stride, int64_t count,
          int64_t k, float* dst, int64_t panel_stride) {
  with_element(type, [=](auto t) {
    pack_elements<kPanel>(static_cast<const decltype(t)*>(src) + offset, line_stride, k_stride, count, k, dst,
                          panel_stride);
  });
}

}  // namespace
}  // namespace polyreme::cpu::POLYREME_ISA
