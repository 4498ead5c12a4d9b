// Matrix multiplication in single precision whose bits depend on the operands only.
//
// Every element of C is one chain of fused multiply-adds in ascending k:
//
//   acc = accumulate ? C[i,j] : +0;   for k = 0..K-1: acc = fma(A[i,k], B[k,j], acc);
//   C[i,j] = bias ? acc + bias[j] : acc;
//
// A, B and C may each be stored as bf16 or fp16: operands are widened (exactly) while they are packed, and a
// narrow C is rounded once, after the bias, to nearest even. So a product of narrow operands is the
// fp32 product of their values.
//
// so the result does not depend on how M or N is cut, on blocking, threads or instruction set, nor
// on cutting K at any point and continuing with accumulate = true (bias in the last call only).
// The bits are those of this loop, also for zeros, infinities and subnormals; of a NaN only its
// presence is defined. Elements of A, B, C outside the given shapes are never read or written.
//
// Declared for both instruction sets; the caller picks a namespace that the CPU supports.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ops/cpu/kernels/element.h"

namespace polyreme {
class ThreadPool;
}  // namespace polyreme

namespace polyreme::cpu {

// C [m,n] = A [m,k] times B [k,n] (+ C) (+ bias [n]). Strides count elements. One of each operand's
// two strides is 1, the other is any leading dimension (for a single row or column both may be
// anything that addresses it). C has column stride 1. m, n, k may be 0. C overlaps no operand.
// `accumulate` needs a C of fp32.
struct GemmArgs {
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  int64_t a_row_stride = 0, a_col_stride = 1;
  const void* b = nullptr;
  int64_t b_row_stride = 0, b_col_stride = 1;
  void* c = nullptr;
  int64_t c_row_stride = 0;
  bool accumulate = false;
  const float* bias = nullptr;
  Element a_type = Element::kF32, b_type = Element::kF32, c_type = Element::kF32;
};

// gemm_f32: on the pool's threads. Uses the scratch memory of every thread it runs on, so what the
//   caller keeps in pool.scratch() is lost. Called inside a task it runs on that task's thread
//   alone. Throws std::bad_alloc.
//
// gemm_f32_serial: on the calling thread, for use inside a task. `scratch` is 64-byte aligned and
//   holds at least gemm_f32_scratch_bytes(m, n, k, c_type) bytes (monotonic in each size). Never throws.
//
// Packed operands, for an operand that is used several times. A is kept as panels of
// gemm_panel_rows() rows, B as panels of gemm_panel_cols() columns, each panel with all of its k:
//   A[i, p] at packed_a[(i / R) * R * k + p * R + i % R],  R = gemm_panel_rows()
//   B[p, j] at packed_b[(j / W) * W * k + p * W + j % W],  W = gemm_panel_cols()
// so rows from i0 (a multiple of R) start at packed_a + i0 * k, columns from j0 (a multiple of W) at
// packed_b + j0 * k. A C of W columns with row stride W is itself a packed B whose k is C's m: a
// chain of two products needs no copy in between. Buffers are 64-byte aligned, of
// gemm_packed_*_bytes (a little is spare; lanes past the last row or column hold anything).
//
// gemm_pack_a reads m, k, a and its strides of `args`; gemm_pack_b reads k, n, b and its strides.
// gemm_f32_packed reads m, n, k, c (fp32), c_row_stride, accumulate, bias; both operands were packed with
//   this k. Never throws.
#define POLYREME_DECLARE_GEMM(isa)                                                          \
  namespace isa {                                                                           \
  void gemm_f32(const GemmArgs& args, ThreadPool& pool);                                    \
  void gemm_f32_serial(const GemmArgs& args, void* scratch);                                \
  int64_t gemm_f32_scratch_bytes(int64_t m, int64_t n, int64_t k, Element c_type);          \
  int64_t gemm_panel_rows();                                                                \
  int64_t gemm_panel_cols();                                                                \
  int64_t gemm_packed_a_bytes(int64_t m, int64_t k);                                        \
  int64_t gemm_packed_b_bytes(int64_t k, int64_t n);                                        \
  void gemm_pack_a(const GemmArgs& args, float* packed);                                    \
  void gemm_pack_b(const GemmArgs& args, float* packed);                                    \
  void gemm_f32_packed(const GemmArgs& args, const float* packed_a, const float* packed_b); \
  }

POLYREME_DECLARE_GEMM(avx2)
POLYREME_DECLARE_GEMM(avx512)
#undef POLYREME_DECLARE_GEMM

}  // namespace polyreme::cpu
