// Optimizer rules on n contiguous floats, in place, fp32 throughout; divisions and square roots are
// correctly rounded. Bytes moved per element: AdamW 16 in 12 out; SGD and Lion 12 in 8 out, SGD without
// momentum 8 in 4 out; LAMB 16 in 8 out, then 12 in 4 out; Muon's momentum 8 in 8 out, its update 8 in 4 out.
#pragma once

#include <stdint.h>

#include "ops/cpu/kernels/element.h"

#define POLYREME_OPTIMIZER_KERNELS(isa)                                                            \
  namespace isa {                                                                                  \
  void adamw(const AdamWArgs& args, int64_t begin, int64_t end);                                   \
  void sgd(const SgdArgs& args, int64_t begin, int64_t end);                                       \
  void lion(const LionArgs& args, int64_t begin, int64_t end);                                     \
  /* sums[0], sums[1]: the squares of param and of r, added up. */                                 \
  void lamb_moments(const AdamWArgs& args, float decay, int64_t begin, int64_t end, double* sums); \
  void lamb_apply(const AdamWArgs& args, float decay, float lr, int64_t begin, int64_t end);       \
  void muon_momentum(const MomentumArgs& args, int64_t begin, int64_t end);                        \
  /* out = a * x + b * y; y may be null where b is 0. */                                           \
  void weighted_sum(float a, const float* x, float b, const float* y, float* out, int64_t n);      \
  /* x *= factor. */                                                                               \
  void scale(Element type, void* x, float factor, int64_t n);                                      \
  /* out += x; whether x has NaN or infinity. */                                                   \
  bool accumulate(Element type, const void* x, float* out, int64_t n);                             \
  }

namespace polyreme::cpu {

// g = grad * scale; m += new_m * (g - m); v = keep_v * v + new_v * g * g;
// param = param * decay - step_size * m / (sqrt(v) / sqrt_bias2 + eps).
struct AdamWArgs {
  float* param;
  const float* grad;
  float* m;
  float* v;
  float scale;
  float new_m;       // 1 - beta1
  float keep_v;      // beta2
  float new_v;       // 1 - beta2
  float sqrt_bias2;  // sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
  float decay;      // 1 - lr * weight_decay
};

// b = momentum * b + grad * scale; param = param * decay - lr * b.
struct SgdArgs {
  float* param;
  const float* grad;
  float* buffer;  // b; null: no momentum, b = grad * scale
  float scale;
  float momentum;
  float lr;
  float decay;      // 1 - lr * weight_decay
  bool first_step;  // b = grad * scale, whatever the buffer holds
};

// u = sign(m + new_u * (g - m)); param = param * decay - lr * u; m += new_m * (g - m).
struct LionArgs {
  float* param;
  const float* grad;
  float* m;
  float scale;
  float new_u;  // 1 - beta1
  float new_m;  // 1 - beta2
  float lr;
  float decay;  // 1 - lr * weight_decay
};

// LAMB takes AdamWArgs: with r = step_size * m / (sqrt(v) / sqrt_bias2 + eps) + decay * param, where
// step_size is 1 / (1 - beta1^step) and decay the weight decay itself, param -= lr * r.

// m += new_m * (g - m); out = g + momentum * (m - g).
struct MomentumArgs {
  const float* grad;
  float* m;
  float* out;
  float scale;
  float new_m;
  float momentum;
};

POLYREME_OPTIMIZER_KERNELS(avx2)
POLYREME_OPTIMIZER_KERNELS(avx512)
}  // namespace polyreme::cpu

#undef POLYREME_OPTIMIZER_KERNELS
