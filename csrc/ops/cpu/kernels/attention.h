#pragma once

#include <stdint.h>

#include "ops/cpu/kernels/element.h"

// Causal attention of one head of one sample; attention_tiles.h explains the method.
// No inline functions here: this header is included by code of every instruction-set level.

namespace polyreme::cpu {

// Rows of q, k, v, dq, dk, dv are qkv_stride elements apart, rows of out and dout out_stride. No
// alignment is needed. Each row holds head_dim elements, there are seq rows; log_sum_exp holds seq.
struct AttentionForwardHead {
  Element type;  // of q, k, v and out
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* log_sum_exp;
  int64_t qkv_stride;
  int64_t out_stride;
  int64_t seq;
  int64_t head_dim;
  float scale;  // of the scores: 1 / sqrt(head_dim)
};
// `group` query heads that share k and v, one after the other: head_dim elements apart in q, out, dout and
// dq, seq apart in log_sum_exp. Their shares of dk and dv are added in ascending order of heads.
struct AttentionBackwardHead {
  Element type;  // of all but log_sum_exp
  const void* q;
  const void* k;
  const void* v;
  const void* out;
  const float* log_sum_exp;
  const void* dout;
  void* dq;
  void* dk;
  void* dv;
  int64_t qkv_stride;
  int64_t out_stride;
  int64_t seq;
  int64_t head_dim;
  int64_t group;
  float scale;
};

// `scratch` is aligned to 64 bytes and holds the number of floats that *_scratch returns.
#define POLYREME_DECLARE_ATTENTION(isa)                                            \
  namespace isa {                                                                  \
  int64_t attention_forward_scratch(int64_t seq, int64_t head_dim);                \
  int64_t attention_backward_scratch(int64_t seq, int64_t head_dim);               \
  void attention_forward_head(const AttentionForwardHead* head, float* scratch);   \
  void attention_backward_head(const AttentionBackwardHead* head, float* scratch); \
  }
POLYREME_DECLARE_ATTENTION(avx2)
POLYREME_DECLARE_ATTENTION(avx512)
#undef POLYREME_DECLARE_ATTENTION

}  // namespace polyreme::cpu
