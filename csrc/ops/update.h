#pragma once

#include "ops/ops.h"

// Norms of gradients, and the update rules of optimizers: on flat fp32 tensors, in place. As in ops.h:
// arguments are checked before anything is enqueued, and the bits are the same for any number of threads, for
// AVX2 and AVX-512, and for any way of cutting a tensor over calls (at multiples of kNormBlock where sums are
// formed).
//
// Every rule takes `scale`, one fp32 element: gradients are multiplied by it, and where it is NaN nothing
// changes.

namespace polyreme {

// ---- norms ------------------------------------------------------------------------------------------
// A norm of order p >= 1 is gathered in `sums`, int64 of norm_shape(p), zero at first. What ranks have
// gathered of different elements is joined by an all-reduce: kSum, or kMax for p = infinity. The order of the
// terms never matters: p = 1 adds every |x| exactly; p = 2 as exact_sum_squares; other p add blocks of
// kNormBlock elements in fp64 in a fixed order, and blocks exactly; p = infinity keeps the largest |x|, NaN
// being larger than any number.
Shape norm_shape(double p);
void add_to_norm(Stream& stream, const Tensor& x, double p, const Tensor& sums);
// The norm that `sums` (on the host, of norm_shape(p)) stands for.
double norm_value(std::span<const int64_t> sums, double p);
// scale (one fp32 element) = multiplier * (n > max_norm ? max_norm / n : 1) with n = multiplier * norm: the
// factor for gradients that are to be multiplied by `multiplier` and clipped. max_norm <= 0 means no limit. A
// norm that is not finite gives NaN, which makes the rules below leave everything as it is.
void clip_scale(Stream& stream, const Tensor& sums, float max_norm, const Tensor& scale,
                double multiplier = 1.0, double p = 2.0);

// ---- gradients --------------------------------------------------------------------------------------
// out += x (fp32, bf16 or fp16), and not_finite (one int32) becomes 1 if x has NaN or infinity.
void accumulate(Stream& stream, const Tensor& x, const Tensor& out, const Tensor& not_finite);
// x *= factor; x: fp32, bf16 or fp16, rounded once.
void scale(Stream& stream, const Tensor& x, float factor);
// Zeros (int32).
void clear_flags(Stream& stream, const Tensor& flags);

// ---- AdamW (Loshchilov & Hutter 2019) ---------------------------------------------------------------
struct AdamWOptions {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;  // 1 for the first update: bias correction
};
// With g = grad * scale[0]: m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g*g;
// p -= lr*(mhat/(sqrt(vhat)+eps) + decay*p). All tensors have the same length.
void adamw(Stream& stream, const Tensor& param, const Tensor& grad, const Tensor& m, const Tensor& v,
           const Tensor& scale, const AdamWOptions& options);

// ---- SGD --------------------------------------------------------------------------------------------
struct SgdOptions {
  double lr, momentum, weight_decay;
  bool first_step;  // momentum buffer starts as g
};
// b = momentum*b + g; p -= lr*(b + decay*p), decoupled decay. `buffer` may be undefined when momentum is 0.
void sgd(Stream& stream, const Tensor& param, const Tensor& grad, const Tensor& buffer, const Tensor& scale,
         const SgdOptions& options);

// ---- Lion (Chen et al. 2023) ------------------------------------------------------------------------
struct LionOptions {
  double lr, beta1, beta2, weight_decay;
};
// u = sign(b1*m + (1-b1)*g), 0 for 0; m = b2*m + (1-b2)*g; p -= lr*(u + decay*p).
void lion(Stream& stream, const Tensor& param, const Tensor& grad, const Tensor& m, const Tensor& scale,
          const LionOptions& options);

// ---- LAMB (You et al. 2020) -------------------------------------------------------------------------
// r = mhat/(sqrt(vhat)+eps) + decay*p, p -= lr * (|p| / |r|) * r, with the norms of one whole parameter. So
// it takes two steps, and the ranks that share a parameter add their sums in between. First: m, v as AdamW;
// the squares of p and r are added to sums[0], sums[1] (int64 [2, kLimbs]).
void lamb_moments(Stream& stream, const Tensor& param, const Tensor& grad, const Tensor& m, const Tensor& v,
                  const Tensor& scale, const AdamWOptions& options, const Tensor& sums);
// Then the update. The ratio is 1 where one of the norms is 0.
void lamb_apply(Stream& stream, const Tensor& param, const Tensor& m, const Tensor& v, const Tensor& sums,
                const Tensor& scale, const AdamWOptions& options);

// ---- Muon (Jordan et al. 2024) ----------------------------------------------------------------------
// m += (1 - momentum) * (g - m); out = g + momentum * (m - g) (Nesterov); out is 0 where scale is NaN.
void muon_momentum(Stream& stream, const Tensor& grad, const Tensor& m, const Tensor& scale, double momentum,
                   const Tensor& out);
// x [rows, cols] becomes nearly the closest matrix with orthonormal rows or columns: x / |x|, then five steps
// of the quintic Newton-Schulz iteration with our gemm.
void orthogonalize(Stream& stream, const Tensor& x);
// p = p * (1 - lr*decay) - lr*factor*direction.
struct MuonOptions {
  double lr, weight_decay, factor;
};
void muon_apply(Stream& stream, const Tensor& param, const Tensor& direction, const Tensor& scale,
                const MuonOptions& options);

}  // namespace polyreme
