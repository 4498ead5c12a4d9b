// Arguments of the kernels (kernels/*.cuh says what each does), as plain C types: they cross the border
// between the core and libpolyreme_cuda.so. Pointers are to device memory; dtype: base/dtype.h, fp32, bf16 or
// fp16.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// ---- optimizer.cuh ------------------------------------------------------------------------------
// What all rules share. `scale`: one number, gradients are multiplied by it; NaN: nothing changes.
// `weight`: null, or the new parameters in `weight_dtype`.
struct PolyremeUpdate {
  float* param;
  const float* grad;
  const float* scale;
  void* weight;
  int32_t weight_dtype;
  int32_t reserved;
  int64_t count;
};
struct PolyremeAdamW {
  struct PolyremeUpdate update;
  float* m;
  float* v;
  float new_m, keep_v, new_v;  // 1 - beta1, beta2, 1 - beta2
  float sqrt_bias2;            // sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
  float decay;      // 1 - lr * weight_decay
};
struct PolyremeSgd {
  struct PolyremeUpdate update;
  float* buffer;  // null: no momentum
  float momentum, lr, decay;
  int32_t first_step;  // the buffer starts as the gradient
};
struct PolyremeLion {
  struct PolyremeUpdate update;
  float* m;
  float new_u, new_m;  // 1 - beta1, 1 - beta2
  float lr, decay;
};

// ---- whole_param.cuh ----------------------------------------------------------------------------
struct PolyremeLamb {
  float* param;
  const float* grad;  // moments
  float* m;
  float* v;
  const float* scale;
  int64_t* sums;                     // two of ExactSum: the squares of the parameter and of the direction
  float new_m, keep_v, new_v;        // as AdamW's; moments
  float sqrt_bias2, eps, step_size;  // step_size: 1 / (1 - beta1^step)
  float decay;                       // the weight decay itself
  double lr;                         // apply
  int64_t count;
};
struct PolyremeMomentum {
  const float* grad;
  float* m;
  float* out;
  const float* scale;
  float new_m, momentum;
  int64_t count;
};
struct PolyremeWeightedSum {
  const float* x;
  const float* y;        // null: a x alone
  float* out;            // may be x or y
  const float* scale;    // null, or nothing changes where it is NaN
  const int64_t* limbs;  // null, or a is 1 / (root of this sum of ExactSum + tiny)
  double tiny;
  float a, b;
  int64_t count;
};

// ---- gradient_norm.cuh --------------------------------------------------------------------------
struct PolyremeGradientNorm {
  float* grad;
  const float* scale;  // null: grad is only read
  int32_t* overflow;   // null, or set to 1 where a number is not finite
  int64_t* limbs;      // null, or of ExactSum
  int64_t count;
};
struct PolyremeExactSum {
  const float* x;
  int64_t* limbs;
  int64_t count;
};
struct PolyremeClipScale {
  const int64_t* limbs;
  float* scale;
  double multiplier;
  float max_norm;
};

// ---- elementwise.cuh ----------------------------------------------------------------------------
struct PolyremeElementwise {
  const void* x;
  const void* y;
  void* out;
  int64_t count;
  int32_t dtype;
};
struct PolyremeCast {
  const void* from;
  void* to;
  int64_t count;
  int32_t from_dtype, to_dtype;
};
struct PolyremeFill {
  void* out;
  int64_t count;
  float value;
  int32_t dtype;
};
struct PolyremeAccumulate {
  const void* x;
  float* out;
  int32_t* not_finite;  // null, or set to 1 where x is not finite
  int64_t count;
  int32_t dtype;  // of x
};
struct PolyremeScale {
  void* x;
  int64_t count;
  float factor;
  int32_t dtype;
};
struct PolyremeSwiglu {
  const void* x;   // [rows, 2 * cols]
  const void* dy;  // backward: [rows, cols]
  void* out;
  int64_t rows, cols;
  int32_t dtype;
};

// ---- random.cuh ---------------------------------------------------------------------------------
struct PolyremeRandomKey {  // RandomKey of base/philox.h
  uint64_t seed;
  uint32_t purpose, stream, step;
};
struct PolyremeDropout {
  const void* x;
  void* y;
  int64_t count;
  int64_t first_element;
  struct PolyremeRandomKey key;
  uint32_t threshold;  // ceil(p * 2^32)
  float keep_scale;    // 1 / (1 - p)
  int32_t dtype;
};
struct PolyremeFillNormal {
  float* out;
  int64_t count;
  int64_t first_element;
  struct PolyremeRandomKey key;
  float std;
};

struct PolyremeRoundStochastic {
  const float* x;
  void* y;  // bf16
  int64_t count;
  int64_t first_element;
  struct PolyremeRandomKey key;
};

// ---- fingerprint.cuh ----------------------------------------------------------------------------
struct PolyremeFingerprint {
  const void* x;
  int64_t size_bytes;
  uint64_t* out;
};

// ---- norm.cuh -----------------------------------------------------------------------------------
struct PolyremeNormForward {
  const void* x;
  const void* gamma;
  const void* beta;  // null: RMSNorm
  void* y;
  float* mean;  // null: RMSNorm
  float* rstd;
  int64_t rows, cols;
  float eps;
  int32_t dtype, param_dtype;
};
struct PolyremeNormBackwardInput {
  const void* dy;
  const void* x;
  const void* gamma;
  const float* mean;  // null: RMSNorm
  const float* rstd;
  void* dx;
  int64_t rows, cols;
  int32_t dtype, param_dtype;
};

// ---- rows.cuh -----------------------------------------------------------------------------------
struct PolyremeAccumulateRows {
  const void* x;
  float* out;
  int64_t rows, cols;
  int32_t dtype;
};
struct PolyremeAddRows {
  const float* x;     // [rows, cols]
  const void* table;  // [period, cols]
  void* out;
  int64_t rows, cols, period;
  int32_t table_dtype, out_dtype;
};
struct PolyremeNormBackwardWeight {
  const void* dy;
  const void* x;
  const float* mean;  // null: RMSNorm
  const float* rstd;
  float* dgamma;
  float* dbeta;  // null: RMSNorm
  int64_t rows, cols;
  int32_t dtype;
};

// ---- rotary.cuh ---------------------------------------------------------------------------------
struct PolyremeRotary {
  void* x;              // [tokens, groups, heads, head_dim], groups row_stride elements apart
  const float* cosine;  // [seq, head_dim / 2]
  const float* sine;
  int64_t tokens, seq, groups, heads, head_dim, row_stride;
  int32_t backward;
  int32_t dtype;
};
struct PolyremeRotaryTable {
  float* cosine;  // [seq, head_dim / 2]
  float* sine;
  int64_t seq, head_dim;
  double theta;
};

// ---- embedding.cuh ------------------------------------------------------------------------------
struct PolyremeEmbedding {
  const int32_t* tokens;  // [batch, seq]
  void* token_rows;       // [vocab, cols]; backward: float
  void* position_rows;    // [>= seq, cols]; null: none; backward: float
  void* rows;             // [batch, seq, cols]
  int32_t* bad;           // two words: the first position of a token outside of [0, vocab), INT32_MAX
                          // without, and that token
  int64_t batch, seq, cols, vocab;
  int32_t dtype;
};
// The rows of tokens [first_token, first_token + vocab); `count` tokens.
struct PolyremeEmbeddingPart {
  const int32_t* tokens;
  const void* table;  // [vocab, cols] of dtype; backward: rows of dtype, [count, cols]
  float* out;         // [count, cols]; backward: [vocab, cols]
  int64_t count, cols, vocab, first_token;
  int32_t dtype;
};

// ---- cross_entropy.cuh --------------------------------------------------------------------------
struct PolyremeCrossEntropy {
  void* logits;  // [rows, vocab]
  const int32_t* targets;
  float* loss;         // [rows]; forward
  float* log_sum_exp;  // [rows]
  int32_t* bad;        // two words: the first row with a target that is none, INT32_MAX without, and it
  int64_t rows, vocab;
  float scale;  // backward
  int32_t dtype;
};
// Columns of the logits from first_column on: `cols` of them, of which `valid` are of the vocabulary.
struct PolyremeVocabPart {
  void* logits;  // [rows, cols]
  const int32_t* targets;
  float* max;           // [rows]; in and out for maxima
  float* sum_exp;       // [rows]
  float* target_logit;  // [rows]
  float* loss;          // [rows]; finish
  float* log_sum_exp;   // [rows]; finish, backward
  int64_t rows, cols, valid, first_column;
  float scale;  // backward
  int32_t dtype;
};

// ---- attention.cuh ------------------------------------------------------------------------------
struct PolyremeAttention {
  const void* qkv;     // [batch, seq, heads + 2 kv_heads, head_dim]
  void* out;           // [batch, seq, heads, head_dim]; backward: read
  float* log_sum_exp;  // [batch, heads, seq]
  const void* dout;    // backward
  void* dqkv;          // backward
  int64_t batch, seq, heads, head_dim;
  int64_t kv_heads;  // divides heads
  int32_t by_group;  // a token of qkv is q ... q k v of each k and v head; else all q, all k, all v
  float scale;
  int32_t dtype;
};

// ---- gemm.cuh -----------------------------------------------------------------------------------
struct PolyremeGemm {
  const void* a;     // element [i, k] at i * a_row + k * a_column
  const void* b;     // element [k, j] at k * b_row + j * b_column
  void* c;           // element [i, j] at i * c_row + j
  const void* bias;  // [n] or null
  int64_t m, n, k;
  int64_t a_row, a_column, b_row, b_column, c_row;
  int32_t accumulate;
  int32_t a_dtype, b_dtype, c_dtype, bias_dtype;
};

#ifdef __cplusplus
}
#endif
