// Sixteen virtual fp32 lanes, the same on every instruction set.
//
// v16f is one zmm register on AVX-512 and two ymm registers (lanes 0-7 and 8-15) on AVX2. Every
// function below gives the same bits in every lane on both, except for the payload and sign of a
// NaN: elementwise operations are single IEEE operations, fused multiply-adds happen only where
// fma() or fnma() is written, and horizontal reductions follow one fixed tree. A kernel written
// only with these functions is therefore bit-identical across instruction sets by construction.
//
// Included only by files under kernels/ (and *_shim.cpp in the tests), which are compiled once per
// instruction set with POLYREME_ISA set. Everything is static and inlined into that namespace, so
// no weak symbol can carry AVX-512 code into an AVX2 build.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "ops/cpu/kernels/element.h"

#ifndef POLYREME_ISA
#error "vec.h is for files that are compiled once per instruction set"
#endif

#define POLYREME_INLINE static inline __attribute__((always_inline))

namespace polyreme::cpu::POLYREME_ISA {

// ---- Types --------------------------------------------------------------------------------------

inline constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct v16f {
  __m512 v;
};
struct v16i {
  __m512i v;
};
struct m16 {  // one truth value a lane
  __mmask16 v;
};

#else

struct v16f {
  __m256 lo, hi;
};
struct v16i {
  __m256i lo, hi;
};
struct m16 {  // all ones or all zeros a lane
  __m256i lo, hi;
};

#endif

// ---- Memory -------------------------------------------------------------------------------------
// load/store take any address; *_aligned need 64 bytes. *_partial touch lanes [0, n) only, for n in
// [0, 16]: memory past them is neither read nor written, and a partial load returns zeros there.

#if defined(__AVX512F__)

POLYREME_INLINE __mmask16 lane_mask_bits(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

POLYREME_INLINE v16f load(const float* p) { return {_mm512_loadu_ps(p)}; }
POLYREME_INLINE v16f load_aligned(const float* p) { return {_mm512_load_ps(p)}; }
POLYREME_INLINE v16f load_partial(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(lane_mask_bits(n), p)};
}
POLYREME_INLINE void store(float* p, v16f a) { _mm512_storeu_ps(p, a.v); }
POLYREME_INLINE void store_aligned(float* p, v16f a) { _mm512_store_ps(p, a.v); }
POLYREME_INLINE void store_partial(float* p, v16f a, int n) {
  _mm512_mask_storeu_ps(p, lane_mask_bits(n), a.v);
}
// Writes past the caches; p is 64-byte aligned and the kernel ends with stream_fence().
POLYREME_INLINE void store_stream(float* p, v16f a) { _mm512_stream_ps(p, a.v); }

POLYREME_INLINE v16i load_i(const void* p) { return {_mm512_loadu_si512(p)}; }
POLYREME_INLINE void store_i(void* p, v16i a) { _mm512_storeu_si512(p, a.v); }

POLYREME_INLINE v16f broadcast(float x) { return {_mm512_set1_ps(x)}; }
POLYREME_INLINE v16f zero() { return {_mm512_setzero_ps()}; }
POLYREME_INLINE v16i broadcast_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
POLYREME_INLINE v16i zero_i() { return {_mm512_setzero_si512()}; }
POLYREME_INLINE v16i iota() {  // 0, 1, ..., 15
  return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}

#else

POLYREME_INLINE __m256i lane_mask_half(int n, int first) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

POLYREME_INLINE v16f load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
POLYREME_INLINE v16f load_aligned(const float* p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
POLYREME_INLINE v16f load_partial(const float* p, int n) {
  return {_mm256_maskload_ps(p, lane_mask_half(n, 0)), _mm256_maskload_ps(p + 8, lane_mask_half(n, 8))};
}
POLYREME_INLINE void store(float* p, v16f a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
POLYREME_INLINE void store_aligned(float* p, v16f a) {
  _mm256_store_ps(p, a.lo);
  _mm256_store_ps(p + 8, a.hi);
}
POLYREME_INLINE void store_partial(float* p, v16f a, int n) {
  _mm256_maskstore_ps(p, lane_mask_half(n, 0), a.lo);
  _mm256_maskstore_ps(p + 8, lane_mask_half(n, 8), a.hi);
}
// Writes past the caches; p is 64-byte aligned and the kernel ends with stream_fence().
POLYREME_INLINE void store_stream(float* p, v16f a) {
  _mm256_stream_ps(p, a.lo);
  _mm256_stream_ps(p + 8, a.hi);
}

POLYREME_INLINE v16i load_i(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
POLYREME_INLINE void store_i(void* p, v16i a) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, a.lo);
  _mm256_storeu_si256(q + 1, a.hi);
}

POLYREME_INLINE v16f broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
POLYREME_INLINE v16f zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
POLYREME_INLINE v16i broadcast_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
POLYREME_INLINE v16i zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
POLYREME_INLINE v16i iota() {  // 0, 1, ..., 15
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}

#endif

POLYREME_INLINE void stream_fence() { _mm_sfence(); }

// ---- Elementwise arithmetic ---------------------------------------------------------------------
// max(a, b) is a > b ? a : b and min(a, b) is a < b ? a : b: when either operand is NaN the result
// is b. So max(x, running) skips a NaN in x; max_nan and min_nan return NaN if either operand is.

#if defined(__AVX512F__)

POLYREME_INLINE v16f operator+(v16f a, v16f b) { return {a.v + b.v}; }
POLYREME_INLINE v16f operator-(v16f a, v16f b) { return {a.v - b.v}; }
POLYREME_INLINE v16f operator*(v16f a, v16f b) { return {a.v * b.v}; }
POLYREME_INLINE v16f operator/(v16f a, v16f b) { return {a.v / b.v}; }
POLYREME_INLINE v16f fma(v16f a, v16f b, v16f c) {  // a * b + c, rounded once
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
POLYREME_INLINE v16f fnma(v16f a, v16f b, v16f c) {  // c - a * b, rounded once
  return {_mm512_fnmadd_ps(a.v, b.v, c.v)};
}
// The zero-masked forms keep g++ 12 from warning about its own "undefined" pass-through operand.
POLYREME_INLINE v16f max(v16f a, v16f b) { return {_mm512_maskz_max_ps(0xffff, a.v, b.v)}; }
POLYREME_INLINE v16f min(v16f a, v16f b) { return {_mm512_maskz_min_ps(0xffff, a.v, b.v)}; }
POLYREME_INLINE v16f sqrt(v16f a) { return {_mm512_maskz_sqrt_ps(0xffff, a.v)}; }

POLYREME_INLINE v16i as_int(v16f a) { return {_mm512_castps_si512(a.v)}; }
POLYREME_INLINE v16f as_float(v16i a) { return {_mm512_castsi512_ps(a.v)}; }

#else

POLYREME_INLINE v16f operator+(v16f a, v16f b) { return {a.lo + b.lo, a.hi + b.hi}; }
POLYREME_INLINE v16f operator-(v16f a, v16f b) { return {a.lo - b.lo, a.hi - b.hi}; }
POLYREME_INLINE v16f operator*(v16f a, v16f b) { return {a.lo * b.lo, a.hi * b.hi}; }
POLYREME_INLINE v16f operator/(v16f a, v16f b) { return {a.lo / b.lo, a.hi / b.hi}; }
POLYREME_INLINE v16f fma(v16f a, v16f b, v16f c) {  // a * b + c, rounded once
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
POLYREME_INLINE v16f fnma(v16f a, v16f b, v16f c) {  // c - a * b, rounded once
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
POLYREME_INLINE v16f max(v16f a, v16f b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
POLYREME_INLINE v16f min(v16f a, v16f b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
POLYREME_INLINE v16f sqrt(v16f a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }

POLYREME_INLINE v16i as_int(v16f a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
POLYREME_INLINE v16f as_float(v16i a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }

#endif

// ---- Integer lanes (32-bit, wrapping) -----------------------------------------------------------

#if defined(__AVX512F__)

POLYREME_INLINE v16i operator+(v16i a, v16i b) { return {_mm512_add_epi32(a.v, b.v)}; }
POLYREME_INLINE v16i operator-(v16i a, v16i b) { return {_mm512_sub_epi32(a.v, b.v)}; }
POLYREME_INLINE v16i operator*(v16i a, v16i b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
POLYREME_INLINE v16i operator^(v16i a, v16i b) { return {_mm512_xor_si512(a.v, b.v)}; }
POLYREME_INLINE v16i operator&(v16i a, v16i b) { return {_mm512_and_si512(a.v, b.v)}; }
POLYREME_INLINE v16i operator|(v16i a, v16i b) { return {_mm512_or_si512(a.v, b.v)}; }
// Shift counts are compile-time constants in [0, 31].
template <int kBits>
POLYREME_INLINE v16i shift_left(v16i a) {
  return {_mm512_maskz_slli_epi32(0xffff, a.v, kBits)};
}
template <int kBits>
POLYREME_INLINE v16i shift_right(v16i a) {  // zeros enter
  return {_mm512_maskz_srli_epi32(0xffff, a.v, kBits)};
}
template <int kBits>
POLYREME_INLINE v16i shift_right_signed(v16i a) {  // copies of the sign enter
  return {_mm512_maskz_srai_epi32(0xffff, a.v, kBits)};
}
// High 32 bits of the unsigned 64-bit product.
POLYREME_INLINE v16i mul_high_unsigned(v16i a, v16i b) {
  const __m512i even = _mm512_maskz_mul_epu32(0xff, a.v, b.v);
  const __m512i odd = _mm512_maskz_mul_epu32(0xff, _mm512_maskz_srli_epi64(0xff, a.v, 32),
                                             _mm512_maskz_srli_epi64(0xff, b.v, 32));
  return {_mm512_mask_blend_epi32(0xaaaa, _mm512_maskz_srli_epi64(0xff, even, 32), odd)};
}
// Nearest integer, ties to even; out of range and NaN give INT32_MIN.
POLYREME_INLINE v16i round_to_int(v16f a) { return {_mm512_maskz_cvtps_epi32(0xffff, a.v)}; }
POLYREME_INLINE v16f to_float(v16i a) { return {_mm512_maskz_cvtepi32_ps(0xffff, a.v)}; }

// Sixteen unsigned 16-bit values to and from the low halves of the lanes.
POLYREME_INLINE v16i load_u16(const uint16_t* p) {
  return {_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
POLYREME_INLINE void store_u16(uint16_t* p, v16i a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(0xffff, a.v));
}

#else

POLYREME_INLINE v16i operator+(v16i a, v16i b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
POLYREME_INLINE v16i operator-(v16i a, v16i b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
POLYREME_INLINE v16i operator*(v16i a, v16i b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
POLYREME_INLINE v16i operator^(v16i a, v16i b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
POLYREME_INLINE v16i operator&(v16i a, v16i b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
POLYREME_INLINE v16i operator|(v16i a, v16i b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
// Shift counts are compile-time constants in [0, 31].
template <int kBits>
POLYREME_INLINE v16i shift_left(v16i a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}
template <int kBits>
POLYREME_INLINE v16i shift_right(v16i a) {  // zeros enter
  return {_mm256_srli_epi32(a.lo, kBits), _mm256_srli_epi32(a.hi, kBits)};
}
template <int kBits>
POLYREME_INLINE v16i shift_right_signed(v16i a) {  // copies of the sign enter
  return {_mm256_srai_epi32(a.lo, kBits), _mm256_srai_epi32(a.hi, kBits)};
}
POLYREME_INLINE __m256i mul_high_half(__m256i a, __m256i b) {
  const __m256i even = _mm256_mul_epu32(a, b);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
  return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
// High 32 bits of the unsigned 64-bit product.
POLYREME_INLINE v16i mul_high_unsigned(v16i a, v16i b) {
  return {mul_high_half(a.lo, b.lo), mul_high_half(a.hi, b.hi)};
}
// Nearest integer, ties to even; out of range and NaN give INT32_MIN.
POLYREME_INLINE v16i round_to_int(v16f a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
POLYREME_INLINE v16f to_float(v16i a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

// Sixteen unsigned 16-bit values to and from the low halves of the lanes.
POLYREME_INLINE v16i load_u16(const uint16_t* p) {
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
POLYREME_INLINE void store_u16(uint16_t* p, v16i a) {
  // packus saturates, so the high halves are cleared first; it works per 128-bit half, so the
  // middle quarters are swapped back.
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

#endif

POLYREME_INLINE v16f operator-(v16f a) {  // flips the sign bit, also of zeros and NaN
  return as_float(as_int(a) ^ broadcast_i(INT32_MIN));
}
POLYREME_INLINE v16f abs(v16f a) { return as_float(as_int(a) & broadcast_i(INT32_MAX)); }
// Magnitude of a, sign bit of b.
POLYREME_INLINE v16f copy_sign(v16f a, v16f b) {
  return as_float((as_int(a) & broadcast_i(INT32_MAX)) | (as_int(b) & broadcast_i(INT32_MIN)));
}

// ---- Comparisons and selection ------------------------------------------------------------------
// Comparisons with a NaN are false, except not_equal.

#if defined(__AVX512F__)

POLYREME_INLINE m16 operator<(v16f a, v16f b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
POLYREME_INLINE m16 operator<=(v16f a, v16f b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
POLYREME_INLINE m16 operator==(v16f a, v16f b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
POLYREME_INLINE m16 not_equal(v16f a, v16f b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ)}; }
POLYREME_INLINE m16 is_nan(v16f a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
POLYREME_INLINE m16 operator<(v16i a, v16i b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
POLYREME_INLINE m16 operator==(v16i a, v16i b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }

POLYREME_INLINE m16 operator&(m16 a, m16 b) { return {static_cast<__mmask16>(a.v & b.v)}; }
POLYREME_INLINE m16 operator|(m16 a, m16 b) { return {static_cast<__mmask16>(a.v | b.v)}; }
POLYREME_INLINE m16 operator~(m16 a) { return {static_cast<__mmask16>(~a.v)}; }

POLYREME_INLINE v16f select(m16 m, v16f yes, v16f no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
POLYREME_INLINE v16i select(m16 m, v16i yes, v16i no) { return {_mm512_mask_blend_epi32(m.v, no.v, yes.v)}; }
POLYREME_INLINE uint32_t mask_bits(m16 m) { return m.v; }  // bit i is lane i
POLYREME_INLINE m16 mask_from_bits(uint32_t bits) { return {static_cast<__mmask16>(bits)}; }

#else

POLYREME_INLINE m16 mask_of(__m256 lo, __m256 hi) {
  return {_mm256_castps_si256(lo), _mm256_castps_si256(hi)};
}
POLYREME_INLINE m16 operator<(v16f a, v16f b) {
  return mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ));
}
POLYREME_INLINE m16 operator<=(v16f a, v16f b) {
  return mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ));
}
POLYREME_INLINE m16 operator==(v16f a, v16f b) {
  return mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
}
POLYREME_INLINE m16 not_equal(v16f a, v16f b) {
  return mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_NEQ_UQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_NEQ_UQ));
}
POLYREME_INLINE m16 is_nan(v16f a) {
  return mask_of(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q));
}
POLYREME_INLINE m16 operator<(v16i a, v16i b) {
  return {_mm256_cmpgt_epi32(b.lo, a.lo), _mm256_cmpgt_epi32(b.hi, a.hi)};
}
POLYREME_INLINE m16 operator==(v16i a, v16i b) {
  return {_mm256_cmpeq_epi32(a.lo, b.lo), _mm256_cmpeq_epi32(a.hi, b.hi)};
}

POLYREME_INLINE m16 operator&(m16 a, m16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
POLYREME_INLINE m16 operator|(m16 a, m16 b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
POLYREME_INLINE m16 operator~(m16 a) {
  const __m256i ones = _mm256_set1_epi32(-1);
  return {_mm256_xor_si256(a.lo, ones), _mm256_xor_si256(a.hi, ones)};
}

POLYREME_INLINE v16f select(m16 m, v16f yes, v16f no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_castsi256_ps(m.lo)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_castsi256_ps(m.hi))};
}
POLYREME_INLINE v16i select(m16 m, v16i yes, v16i no) {
  return {_mm256_blendv_epi8(no.lo, yes.lo, m.lo), _mm256_blendv_epi8(no.hi, yes.hi, m.hi)};
}
POLYREME_INLINE uint32_t mask_bits(m16 m) {  // bit i is lane i
  const uint32_t lo = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(m.lo)));
  const uint32_t hi = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(m.hi)));
  return lo | (hi << 8);
}
POLYREME_INLINE m16 mask_from_bits(uint32_t bits) {
  const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i lo = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane_bit);
  const __m256i hi = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits >> 8)), lane_bit);
  return {_mm256_cmpeq_epi32(lo, lane_bit), _mm256_cmpeq_epi32(hi, lane_bit)};
}

#endif

POLYREME_INLINE m16 operator>(v16f a, v16f b) { return b < a; }
POLYREME_INLINE m16 operator>=(v16f a, v16f b) { return b <= a; }
POLYREME_INLINE m16 operator>(v16i a, v16i b) { return b < a; }
POLYREME_INLINE bool any(m16 m) { return mask_bits(m) != 0; }
POLYREME_INLINE bool all(m16 m) { return mask_bits(m) == 0xffffu; }
// True in lanes [0, n), for any n (all lanes from 16 on, none up to 0).
POLYREME_INLINE m16 first_lanes(int n) { return iota() < broadcast_i(n); }

POLYREME_INLINE v16f max_nan(v16f a, v16f b) { return select(is_nan(a), a, max(a, b)); }
POLYREME_INLINE v16f min_nan(v16f a, v16f b) { return select(is_nan(a), a, min(a, b)); }

// ---- Horizontal reductions ----------------------------------------------------------------------
// One fixed tree: lane i with i + 8, then i + 4, i + 2, i + 1.

#if defined(__AVX512F__)
POLYREME_INLINE __m256 low_half(v16f a) { return __builtin_shufflevector(a.v, a.v, 0, 1, 2, 3, 4, 5, 6, 7); }
POLYREME_INLINE __m256 high_half(v16f a) {
  return __builtin_shufflevector(a.v, a.v, 8, 9, 10, 11, 12, 13, 14, 15);
}
#else
POLYREME_INLINE __m256 low_half(v16f a) { return a.lo; }
POLYREME_INLINE __m256 high_half(v16f a) { return a.hi; }
#endif

POLYREME_INLINE float reduce_sum(v16f a) {
  const __m256 s8 = low_half(a) + high_half(a);
  const __m128 s4 = _mm256_castps256_ps128(s8) + _mm256_extractf128_ps(s8, 1);
  const __m128 s2 = s4 + _mm_movehl_ps(s4, s4);
  return s2[0] + s2[1];
}
// Takes max() pairwise as above; the result is unspecified (but not a trap) if a lane is NaN.
POLYREME_INLINE float reduce_max(v16f a) {
  const __m256 s8 = _mm256_max_ps(low_half(a), high_half(a));
  const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
  return s2[0] > s2[1] ? s2[0] : s2[1];
}

// ---- bf16 and fp16 in memory ----------------------------------------------------------------------
// Loads widen exactly. Stores round to nearest, ties to even; overflow goes to infinity, subnormal
// numbers are kept, NaN stays a (quiet) NaN. As with float, *_partial touch lanes [0, n) only.

POLYREME_INLINE v16f load_bf16(const uint16_t* p) { return as_float(shift_left<16>(load_u16(p))); }
POLYREME_INLINE v16i bf16_bits(v16f a) {
  const v16i bits = as_int(a);
  const v16i odd = shift_right<16>(bits) & broadcast_i(1);
  const v16i rounded = shift_right<16>(bits + broadcast_i(0x7fff) + odd);
  const v16i quiet = shift_right<16>(bits) | broadcast_i(0x40);
  return select(is_nan(a), quiet, rounded);
}
POLYREME_INLINE void store_bf16(uint16_t* p, v16f a) { store_u16(p, bf16_bits(a)); }

#if defined(__AVX512F__)

POLYREME_INLINE v16f load_f16(const uint16_t* p) {
  return {_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
POLYREME_INLINE void store_f16(uint16_t* p, v16f a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else

POLYREME_INLINE v16f load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
POLYREME_INLINE void store_f16(uint16_t* p, v16f a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, kNearest));
}

#endif

POLYREME_INLINE v16f load(const bf16* p) { return load_bf16(&p->bits); }
POLYREME_INLINE v16f load(const f16* p) { return load_f16(&p->bits); }
POLYREME_INLINE void store(bf16* p, v16f a) { store_bf16(&p->bits, a); }
POLYREME_INLINE void store(f16* p, v16f a) { store_f16(&p->bits, a); }

// Rows end in at most one partial vector, so a copy through the stack is cheap enough.
template <typename Half>
POLYREME_INLINE v16f load_partial(const Half* p, int n) {
  Half lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <typename Half>
POLYREME_INLINE void store_partial(Half* p, v16f a, int n) {
  Half lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

// One element, with the bits that it has in a lane.
POLYREME_INLINE float widen(float x) { return x; }
POLYREME_INLINE float widen(bf16 x) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(uint32_t{x.bits} << 16))));
}
POLYREME_INLINE float widen(f16 x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits))); }
POLYREME_INLINE void narrow(float x, float* p) { *p = x; }
template <typename Half>
POLYREME_INLINE void narrow(float x, Half* p) {
  store_partial(p, broadcast(x), 1);
}

// Calls body(T()) with the type T of an element.
template <typename Body>
POLYREME_INLINE void with_element(Element element, Body body) {
  switch (element) {
    case Element::kF32:
      return body(float());
    case Element::kBF16:
      return body(bf16());
    case Element::kF16:
      return body(f16());
  }
}

// ---- Elementary functions -----------------------------------------------------------------------

// exp(x): n = round(x / ln 2), r = x - n ln 2 in two parts (Cody and Waite), exp(r) by the minimax
// polynomial of Cephes expf (Moshier), times 2^n through the exponent field. Within 1 ulp.
// Results below the smallest normal number are +0, exp(-inf) = 0, overflow gives +inf, NaN passes.
POLYREME_INLINE v16f exp(v16f x) {
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer for |x / ln 2| < 2^22.
  const v16f magic = broadcast(12582912.0f);
  const v16f n = fma(x, broadcast(1.44269504088896341f), magic) - magic;
  v16f r = fnma(n, broadcast(0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  v16f p = fma(broadcast(1.9875691500e-4f), r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + broadcast(1.0f);
  // A NaN converts to INT32_MIN, which the shift clears: the polynomial's NaN passes untouched.
  v16f y = as_float(as_int(p) + shift_left<23>(round_to_int(n)));
  // log(2^-126) and log(FLT_MAX), rounded inwards.
  y = select(x < broadcast(-87.336540f), zero(), y);
  return select(x > broadcast(0x1.62e42ep+6f), broadcast(__builtin_inff()), y);
}

// tanh(x): below 0.625 the odd polynomial of Cephes tanhf (Moshier), above it
// 1 - 2 / (exp(2 |x|) + 1). Within 2 ulp, odd, exactly +-1 from |x| = 9.02 on, NaN passes.
POLYREME_INLINE v16f tanh(v16f x) {
  const v16f a = abs(x);
  const v16f z = x * x;
  v16f p = fma(broadcast(-5.70498872745e-3f), z, broadcast(2.06390887954e-2f));
  p = fma(p, z, broadcast(-5.37397155531e-2f));
  p = fma(p, z, broadcast(1.33314422036e-1f));
  p = fma(p, z, broadcast(-3.33332819422e-1f));
  const v16f small = fma(p * z, x, x);
  const v16f large = broadcast(1.0f) - broadcast(2.0f) / (exp(a + a) + broadcast(1.0f));
  return select(a < broadcast(0.625f), small, copy_sign(large, x));
}

// log(x): x = 2^e m with m in [sqrt(1/2), sqrt(2)), the polynomial of Cephes logf (Moshier) in
// m - 1, e ln 2 added in two parts. Within 1 ulp for normal x. log(0) = log(subnormal) = -inf,
// negative x gives NaN, log(+inf) = +inf, NaN passes.
POLYREME_INLINE v16f log(v16f x) {
  const v16i bits = as_int(x);
  // Offsetting by the bits of sqrt(1/2) makes the exponent field count from there.
  const v16i offset = bits - broadcast_i(0x3f3504f3);
  const v16f e = to_float(shift_right_signed<23>(offset));
  const v16f m = as_float((offset & broadcast_i(0x007fffff)) + broadcast_i(0x3f3504f3));
  const v16f f = m - broadcast(1.0f);
  const v16f z = f * f;
  v16f p = fma(broadcast(7.0376836292e-2f), f, broadcast(-1.1514610310e-1f));
  p = fma(p, f, broadcast(1.1676998740e-1f));
  p = fma(p, f, broadcast(-1.2420140846e-1f));
  p = fma(p, f, broadcast(1.4249322787e-1f));
  p = fma(p, f, broadcast(-1.6668057665e-1f));
  p = fma(p, f, broadcast(2.0000714765e-1f));
  p = fma(p, f, broadcast(-2.4999993993e-1f));
  p = fma(p, f, broadcast(3.3333331174e-1f));
  p = p * z * f;
  p = fma(e, broadcast(-2.12194440e-4f), p);
  p = fnma(broadcast(0.5f), z, p);
  v16f y = fma(e, broadcast(0.693359375f), f + p);
  y = select(x < broadcast(1.17549435e-38f), broadcast(-__builtin_inff()), y);
  y = select(x < zero(), broadcast(__builtin_nanf("")), y);
  const v16f inf = broadcast(__builtin_inff());
  return select((x == inf) | is_nan(x), x, y);
}

}  // namespace polyreme::cpu::POLYREME_ISA
