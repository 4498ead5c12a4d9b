// Optimizer rules on n contiguous floats, in place, fp32 throughout; divisions and square roots are
// correctly rounded. Bytes moved per element: AdamW 16 in 12 out; SGD 12 in 8 out, without momentum
// 8 in 4 out.
#pragma once

#include <stdint.h>

#define POLYREME_OPTIMIZER_KERNELS(isa)                          \
  namespace isa {                                                \
  void adamw(const AdamWArgs& args, int64_t begin, int64_t end); \
  void sgd(const SgdArgs& args, int64_t begin, int64_t end);     \
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

POLYREME_OPTIMIZER_KERNELS(avx2)
POLYREME_OPTIMIZER_KERNELS(avx512)
}  // namespace polyreme::cpu

#undef POLYREME_OPTIMIZER_KERNELS
