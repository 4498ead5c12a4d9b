#pragma once

#include <cstdint>

#include "base/exact_sum.h"
#include "base/philox.h"
#include "device/device.h"
#include "tensor/tensor.h"

// Operations on tensors. Each checks its arguments (InvalidArgument, before anything is enqueued),
// then enqueues on `stream`; errors while it runs surface at Stream::synchronize. Tensors are
// contiguous unless said otherwise. Rows = tokens: [rows, cols] with one token a row.
//
// Element types: "F" marks tensors that are fp32, bf16 or fp16, all those of one operation alike;
// "P" marks parameters that are fp32 or F. All others are fp32. 16-bit formats are storage only:
// inputs are widened exactly, arithmetic, statistics and accumulators are fp32, and what is stored in
// 16 bits is rounded once, to nearest, ties to even (overflow gives infinity).
//
// "Chain over rows": out[c] = ((out[c] + x[0,c]) + x[1,c]) + ..., one rounding per row in ascending
// order, continuing from what `out` holds. So cutting the rows into micro-batches changes no bit.
//
// Every operation has the same bits for any number of threads, for AVX2 and AVX-512, and for any
// way of cutting the rows over calls.

namespace polyreme {

// ---- memory -----------------------------------------------------------------------------------
void fill(Stream& stream, const Tensor& out, float value);  // out: F
// to = from, rounded where `to` is narrower. Any of fp32, bf16, fp16 on either side, equal shape, memory
// apart.
void cast(Stream& stream, const Tensor& from, const Tensor& to);
// to (bf16) = from (fp32), rounded up or down at random so that the mean is exact: element i with what `key`
// draws at first_element + i. Equal shape, memory apart.
void round_stochastic(Stream& stream, const Tensor& from, const Tensor& to, const RandomKey& key,
                      int64_t first_element);
// Any dtype; equal dtype and shape.
void copy(Stream& stream, const Tensor& from, const Tensor& to);
// Elements [from, from + size) to [to, to + size).
struct CopyRun {
  int64_t from, to, size;
};
// Any number of runs between tensors of one dim and dtype, apart in `to`. Not on GPUs yet.
void copy_runs(Stream& stream, const Tensor& from, const Tensor& to, std::vector<CopyRun> runs);
// `from` / `to` point to tensor.size_bytes() bytes of host memory that must stay alive and
// untouched until the stream was synchronized. Any dtype.
void copy_from_host(Stream& stream, const void* from, const Tensor& to);
void copy_to_host(Stream& stream, const Tensor& from, void* to);

// ---- GEMM -------------------------------------------------------------------------------------
// c[m,n] = (accumulate ? c : 0) + a[m,k] x b[k,n], then + bias[n] where defined. a and b may be
// transposed views (one stride is 1). One fp32 chain of fused multiply-adds over ascending k per
// element of c: splitting m, n or (with accumulate) k changes no bit. a, b, c and bias may each be
// fp32, bf16 or fp16; a narrow c is rounded once, at the end, and cannot be accumulated into. The level amx
// sums bf16 times bf16 by granules of 32 values of k: there, cuts of k keep the bits between units of k_unit
// values (tokens of a sample), each of which is padded to whole granules; 0: k is one unit.
void gemm(Stream& stream, const Tensor& a, const Tensor& b, const Tensor& c, bool accumulate,
          const Tensor& bias = {}, int64_t k_unit = 0);

// ---- element-wise -----------------------------------------------------------------------------
// All F.
void add(Stream& stream, const Tensor& x, const Tensor& y, const Tensor& out);  // out may be x or y
// GELU, tanh form (Hendrycks & Gimpel 2016).
void gelu_forward(Stream& stream, const Tensor& x, const Tensor& y);
void gelu_backward(Stream& stream, const Tensor& x, const Tensor& dy, const Tensor& dx);  // dx may be dy
// y = x * mask / (1 - p), mask[i] drawn from `key` at element first_element + i; its own backward (it
// multiplies: inf * 0 is NaN). 0 <= p < 1; p == 0 copies. y may be x.
void dropout(Stream& stream, const Tensor& x, const Tensor& y, float p, const RandomKey& key,
             int64_t first_element);
// Normal numbers of mean 0: element i from `key` at first_element + i (Box-Muller 1958).
void fill_normal(Stream& stream, const Tensor& out, float std, const RandomKey& key, int64_t first_element);

// ---- sums over rows ---------------------------------------------------------------------------
// out[cols]: chain over rows of x[rows, cols] (F).
void accumulate_rows(Stream& stream, const Tensor& x, const Tensor& out);

// ---- LayerNorm (Ba et al. 2016) -----------------------------------------------------------------
// x, y, dx, dy: F [rows, cols]; gamma, beta: P [cols]; mean, rstd: [rows]. y may be x; dx may be dy or x.
void layer_norm_forward(Stream& stream, const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps,
                        const Tensor& y, const Tensor& mean, const Tensor& rstd);
void layer_norm_backward_input(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                               const Tensor& mean, const Tensor& rstd, const Tensor& dx);
// Adds to dgamma, dbeta: chains over rows.
void layer_norm_backward_weight(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& mean,
                                const Tensor& rstd, const Tensor& dgamma, const Tensor& dbeta);

// ---- RMSNorm (Zhang & Sennrich 2019) --------------------------------------------------------------
// y = x / sqrt(average of x^2 along the row + eps) * gamma. x, y: F [rows, cols]; gamma: P [cols]; rstd:
// [rows]. y may be x; dx may be dy or x.
void rms_norm_forward(Stream& stream, const Tensor& x, const Tensor& gamma, float eps, const Tensor& y,
                      const Tensor& rstd);
void rms_norm_backward_input(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                             const Tensor& rstd, const Tensor& dx);
// Adds to dgamma: chains over rows.
void rms_norm_backward_weight(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& rstd,
                              const Tensor& dgamma);

// ---- SwiGLU (Shazeer 2020) --------------------------------------------------------------------------
// y = silu(gate) * up; x: F [rows, 2 cols], gate | up; y: F [rows, cols]. dx may be x.
void swiglu_forward(Stream& stream, const Tensor& x, const Tensor& y);
void swiglu_backward(Stream& stream, const Tensor& x, const Tensor& dy, const Tensor& dx);

// ---- rotary position embedding (Su et al. 2021) -------------------------------------------------------
// y = x, F [batch, seq, groups, any, head_dim], with the first `heads` heads of each group turned: the pair
// (i, i + head_dim / 2) by position * theta^(-2 i / head_dim) radians. y may be x. `inverse` turns back,
// which is its backward.
void rotary(Stream& stream, const Tensor& x, const Tensor& y, int64_t heads, double theta,
            bool inverse = false);

// ---- causal multi-head attention ----------------------------------------------------------------
// qkv: F [batch, seq, 3, heads, head_dim]; or, where each k and v serves heads / kv_heads query heads
// (Ainslie et al. 2023), [batch, seq, heads + 2 kv_heads, head_dim]: for each k and v head its query heads,
// then k, then v. out: F [batch, seq, heads, head_dim]; log_sum_exp: [batch, heads, seq]. Blocked online
// softmax (Milakov & Gimelshein 2018; Dao et al. 2022): no seq x seq matrix is stored. Scale
// 1/sqrt(head_dim). A sample's bits depend on that sample alone.
void attention_forward(Stream& stream, const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp);
void attention_backward(Stream& stream, const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp,
                        const Tensor& dout, const Tensor& dqkv);

// ---- embedding ----------------------------------------------------------------------------------
// out[batch, seq, cols] = token_table[tokens] + position_table[0..seq), all F. tokens: int32 [batch, seq],
// each in [0, token_table rows): checked when the operation runs, before anything is written.
// Without a position_table (undefined), the rows of token_table alone.
void embedding_forward(Stream& stream, const Tensor& tokens, const Tensor& token_table,
                       const Tensor& position_table, const Tensor& out);
// Adds dout (F) to both gradients, token after token in ascending order.
void embedding_backward(Stream& stream, const Tensor& tokens, const Tensor& dout, const Tensor& token_grad,
                        const Tensor& position_grad);

// ---- cross-entropy ------------------------------------------------------------------------------
inline constexpr int32_t kIgnoreIndex = -100;
// loss[rows] = log_sum_exp(logits) - logits[target], 0 where target is kIgnoreIndex.
// logits: F [rows, vocab]; targets: int32 [rows], checked when the operation runs, before anything is
// written.
void cross_entropy_forward(Stream& stream, const Tensor& logits, const Tensor& targets, const Tensor& loss,
                           const Tensor& log_sum_exp);
// Turns logits into d(loss)/d(logits) * scale in place; rows with kIgnoreIndex become 0.
void cross_entropy_backward(Stream& stream, const Tensor& logits, const Tensor& targets,
                            const Tensor& log_sum_exp, float scale);

// ---- lanes of tensor parallelism ------------------------------------------------------------------
// What a lane that has a part of a vocabulary, or the sum of lanes, needs. No GPU kernels yet.
//
// out[r] = x[r] + table[r modulo the table's rows], rounded once. x: fp32 [rows, cols]; table: fp32 or that
// of out [any, cols]; out: F.
void add_rows(Stream& stream, const Tensor& x, const Tensor& table, const Tensor& out);
// out += x. x: F; out: fp32, of equal shape.
void add_to(Stream& stream, const Tensor& x, const Tensor& out);
// out (fp32 [batch, seq, cols]) = the rows of `table` (F), which has the tokens from first_token on; zeros
// for other tokens.
void embedding_part_forward(Stream& stream, const Tensor& tokens, const Tensor& table, int64_t first_token,
                            const Tensor& out);
// Adds dout (F [batch, seq, cols]) to the rows of `grad` that have the tokens, in ascending order of tokens.
void embedding_part_backward(Stream& stream, const Tensor& tokens, const Tensor& dout, int64_t first_token,
                             const Tensor& grad);
// Cross-entropy over parts of the logits, F [rows, cols]: the part's first `valid` columns are the classes
// from first_class on, the others are padding. `top`: fp32 [rows]; the maxima, NaN passed over, are taken
// into it.
struct LogitsPart {
  Tensor logits;
  int64_t first_class = 0;
  int64_t valid = 0;
};
void cross_entropy_part_max(Stream& stream, const LogitsPart& part, const Tensor& top);
// sums, fp32 [2, rows]: the sum of exp(logit - top); and the target's logit, 0 where it is in another part.
void cross_entropy_part_sums(Stream& stream, const LogitsPart& part, const Tensor& targets, const Tensor& top,
                             const Tensor& sums);
// From the sums over all parts: as cross_entropy_forward.
void cross_entropy_finish(Stream& stream, const Tensor& sums, const Tensor& targets, const Tensor& top,
                          const Tensor& loss, const Tensor& log_sum_exp);
// As cross_entropy_backward. Padding becomes 0.
void cross_entropy_part_backward(Stream& stream, const LogitsPart& part, const Tensor& targets,
                                 const Tensor& log_sum_exp, float scale);

// ---- equal bits? ----------------------------------------------------------------------------------
// out (one int64): a hash of the bytes of `x`, any dtype. Of two tensors of one size that differ in some bits
// it is the same by chance alone, one in 2^64; not meant against an adversary.
void fingerprint(Stream& stream, const Tensor& x, const Tensor& out);

// ---- order-free scalars ---------------------------------------------------------------------------
// `limbs`: int64 [ExactSum::kLimbs], an exact accumulator; fill it with zero bytes first.
void zero_limbs(Stream& stream, const Tensor& limbs);
// Adds every element of x.
void exact_sum(Stream& stream, const Tensor& x, const Tensor& limbs);
// Adds x[i]^2: blocks of kNormBlock elements are summed in fp64 in a fixed order, blocks exactly.
inline constexpr int64_t kNormBlock = 1024;
void exact_sum_squares(Stream& stream, const Tensor& x, const Tensor& limbs);

}  // namespace polyreme
