// Softmax cross-entropy on contiguous rows of logits of any format; fp32 and fp64 inside.
//
// Forward: blocks of 1024 logits, first the maximum, then the sum of exp(logit - maximum so far) in
// four fp32 chains of sixteen lanes and one tree; blocks are summed in double. Loss and log-sum-exp
// are formed in double and rounded once. 1 element in per logit.
// Backward: 1 element in, 1 out per logit.
#pragma once

#include <stdint.h>

#include "ops/cpu/kernels/element.h"

#define POLYREME_CROSS_ENTROPY_KERNELS(isa)                                                           \
  namespace isa {                                                                                     \
  void cross_entropy_forward(const CrossEntropyForward& args, int64_t first_row, int64_t end_row);    \
  void cross_entropy_backward(const CrossEntropyBackward& args, int64_t first_row, int64_t end_row);  \
  void cross_entropy_part_max(const CrossEntropyPart& args, int64_t first_row, int64_t end_row);      \
  void cross_entropy_part_sums(const CrossEntropyPart& args, int64_t first_row, int64_t end_row);     \
  void cross_entropy_finish(const CrossEntropyPart& args, int64_t first_row, int64_t end_row);        \
  void cross_entropy_part_backward(const CrossEntropyPart& args, int64_t first_row, int64_t end_row); \
  }

namespace polyreme::cpu {

// A target outside [0, vocab) is "ignore": loss 0, gradient 0.
struct CrossEntropyForward {
  int64_t vocab;
  Element type;            // of logits
  const void* logits;      // [rows, vocab]
  const int32_t* targets;  // [rows]
  float* loss;             // [rows]; NaN where a logit is NaN or +inf, or all are -inf
  float* log_sum_exp;      // [rows]
};

// logits[r, i] becomes scale * (exp(logits[r, i] - log_sum_exp[r]) - (i == target)).
struct CrossEntropyBackward {
  int64_t vocab;
  Element type;              // of logits
  void* logits;              // [rows, vocab]
  const int32_t* targets;    // [rows]
  const float* log_sum_exp;  // [rows]
  float scale;
};

// A part of the classes, see ops.h. Each kernel uses what it needs.
struct CrossEntropyPart {
  int64_t rows, cols;
  int64_t valid, first_class;
  Element type;            // of logits
  void* logits;            // [rows, cols]
  const int32_t* targets;  // [rows]
  float* top;              // [rows]
  float* sums;             // [2, rows]
  float* loss;             // [rows]
  float* log_sum_exp;      // [rows]
  float scale;
};

POLYREME_CROSS_ENTROPY_KERNELS(avx2)
POLYREME_CROSS_ENTROPY_KERNELS(avx512)
}  // namespace polyreme::cpu

#undef POLYREME_CROSS_ENTROPY_KERNELS
