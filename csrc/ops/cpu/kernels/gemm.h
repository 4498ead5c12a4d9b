// Single-precision matrix multiplication whose bits depend on the operands only.
//
// Every element of C is one chain of fused multiply-adds in ascending k:
//
//   acc = accumulate ? C[i,j] : +0;   for k = 0..K-1: acc = fma(A[i,k], B[k,j], acc);
//   C[i,j] = bias ? acc + bias[j] : acc;
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

namespace polyreme {
class ThreadPool;
}  // namespace polyreme

namespace polyreme::cpu {

// C [m,n] = A [m,k] times B [k,n] (+ C) (+ bias [n]). Strides count elements. One of each operand's
// two strides is 1, the other is any leading dimension (for a single row or column both may be
// anything that addresses it). C has column stride 1. m, n, k may be 0. C overlaps no operand.
struct GemmArgs {
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;
  int64_t a_row_stride = 0, a_col_stride = 1;
  const float* b = nullptr;
  int64_t b_row_stride = 0, b_col_stride = 1;
  float* c = nullptr;
  int64_t c_row_stride = 0;
  bool accumulate = false;
  const float* bias = nullptr;
};

#define POLYREME_DECLARE_GEMM(isa)                                                                \
  namespace isa {                                                                                 \
  /* On the pool's threads; also from inside a task, then on that task's thread alone. Uses the */ \
  /* pool's scratch. Throws std::bad_alloc. */                                                    \
  void gemm_f32(const GemmArgs& args, ThreadPool& pool);                                          \
                                                                                                  \
  /* On the calling thread, for use inside a task. `scratch` is 64-byte aligned and holds at */   \
  /* least gemm_f32_scratch_bytes(m, n, k) bytes. Never throws. */                                \
  void gemm_f32_serial(const GemmArgs& args, void* scratch);                                      \
  int64_t gemm_f32_scratch_bytes(int64_t m, int64_t n, int64_t k);                                \
                                                                                                  \
  /* The same in two steps, for an operand that is used several times. A packed operand keeps */  \
  /* whole rows of k: A as panels of gemm_panel_rows() rows, B as panels of gemm_panel_cols() */  \
  /* columns, each panel k-major; panels are packed_panel_stride apart, so that a block that */   \
  /* starts at a multiple of the panel width can be used alone, see gemm_f32_packed. */           \
  int64_t gemm_panel_rows();                                                                      \
  int64_t gemm_panel_cols();                                                                      \
  int64_t gemm_packed_a_bytes(int64_t m, int64_t k);                                              \
  int64_t gemm_packed_b_bytes(int64_t k, int64_t n);                                              \
  void gemm_pack_a(const GemmArgs& args, float* packed); /* reads m, k, a and its strides */      \
  void gemm_pack_b(const GemmArgs& args, float* packed); /* reads k, n, b and its strides */      \
                                                                                                  \
  /* Multiplies packed operands; reads m, n, k, c, c_row_stride, accumulate, bias of `args`. */   \
  /* Both operands were packed with this k. Row i0 (a multiple of gemm_panel_rows()) of a packed */ \
  /* A starts at packed_a + i0 * k, column j0 (a multiple of gemm_panel_cols()) of a packed B at */ \
  /* packed_b + k * j0. */                                                                        \
  void gemm_f32_packed(const GemmArgs& args, const float* packed_a, const float* packed_b);       \
  }

POLYREME_DECLARE_GEMM(avx2)
POLYREME_DECLARE_GEMM(avx512)
#undef POLYREME_DECLARE_GEMM

}  // namespace polyreme::cpu
