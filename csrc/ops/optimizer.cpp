#include <cmath>

#include "ops/check.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/kernels/optimizer.h"
#include "ops/cpu/ranges.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

void check_number(const char* op, const char* name, double value) {
  require(value >= 0.0 && std::isfinite(value), op, ": ", name, ": expected a finite number, 0 or more, got ",
          value);
}

void check_fraction(const char* op, const char* name, double value) {
  require(value >= 0.0 && value < 1.0, op, ": ", name, ": expected 0 <= ", name, " < 1, got ", value);
}

void check_state(ArgName name, const Tensor& state, const Tensor& param) {
  check_dense(name, state, param.shape());
  check_apart(name, state, param);
}

void check_scale(const char* op, const Tensor& scale) {
  check_dense({op, "scale"}, scale);
  require(scale.numel() == 1, op, ": scale: expected one element, got ", scale.numel());
}

float weight_decay_factor(double lr, double weight_decay) {
  return static_cast<float>(1.0 - lr * weight_decay);
}

// base^exponent with the same bits on every libm: repeated squaring.
double integer_power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

}  // namespace

void adamw(Stream& stream, const Tensor& param, const Tensor& grad, const Tensor& m, const Tensor& v,
           const Tensor& scale, const AdamWOptions& options) {
  constexpr const char* kOp = "adamw";
  check_dense({kOp, "param"}, param);
  check_state({kOp, "grad"}, grad, param);
  check_state({kOp, "m"}, m, param);
  check_state({kOp, "v"}, v, param);
  check_apart({kOp, "m"}, m, grad);
  check_apart({kOp, "v"}, v, grad);
  check_apart({kOp, "v"}, v, m);
  check_scale(kOp, scale);
  check_number(kOp, "lr", options.lr);
  check_fraction(kOp, "beta1", options.beta1);
  check_fraction(kOp, "beta2", options.beta2);
  check_number(kOp, "eps", options.eps);
  check_number(kOp, "weight_decay", options.weight_decay);
  require(options.step >= 1, kOp, ": step: expected 1 or more, got ", options.step);

  const double beta1 = options.beta1, beta2 = options.beta2;
  cpu::AdamWArgs args = {
      .param = param.address<float>(),
      .grad = grad.address<float>(),
      .m = m.address<float>(),
      .v = v.address<float>(),
      .scale = 1.0f,  // read when the operation runs
      .new_m = static_cast<float>(1.0 - beta1),
      .keep_v = static_cast<float>(beta2),
      .new_v = static_cast<float>(1.0 - beta2),
      .sqrt_bias2 = static_cast<float>(std::sqrt(1.0 - integer_power(beta2, options.step))),
      .eps = static_cast<float>(options.eps),
      .step_size = static_cast<float>(options.lr / (1.0 - integer_power(beta1, options.step))),
      .decay = weight_decay_factor(options.lr, options.weight_decay)};
  const float* const scale_value = scale.address<float>();
  as_cpu(stream).enqueue(
      {kOp, OpKind::kOptimizer},
      {reads(grad), reads(scale), reads(param), writes(param), reads(m), writes(m), reads(v), writes(v)},
      [=, n = param.numel()](const CpuContext& context) {
        if (std::isnan(*scale_value)) return;
        cpu::AdamWArgs now = args;
        now.scale = *scale_value;
        const auto kernel = pick(context.isa, cpu::avx2::adamw, cpu::avx512::adamw);
        for_ranges(context.pool, n, kGrain, [&](int64_t begin, int64_t end) { kernel(now, begin, end); });
      });
}

void sgd(Stream& stream, const Tensor& param, const Tensor& grad, const Tensor& buffer, const Tensor& scale,
         const SgdOptions& options) {
  constexpr const char* kOp = "sgd";
  check_dense({kOp, "param"}, param);
  check_state({kOp, "grad"}, grad, param);
  check_scale(kOp, scale);
  check_number(kOp, "lr", options.lr);
  check_fraction(kOp, "momentum", options.momentum);
  check_number(kOp, "weight_decay", options.weight_decay);
  std::vector<Access> accesses = {reads(grad), reads(scale), reads(param), writes(param)};
  const bool has_buffer = options.momentum != 0.0;
  if (has_buffer) {
    check_state({kOp, "buffer"}, buffer, param);
    check_apart({kOp, "buffer"}, buffer, grad);
    if (!options.first_step) accesses.push_back(reads(buffer));
    accesses.push_back(writes(buffer));
  }

  const cpu::SgdArgs args = {.param = param.address<float>(),
                             .grad = grad.address<float>(),
                             .buffer = has_buffer ? buffer.address<float>() : nullptr,
                             .scale = 1.0f,  // read when the operation runs
                             .momentum = static_cast<float>(options.momentum),
                             .lr = static_cast<float>(options.lr),
                             .decay = weight_decay_factor(options.lr, options.weight_decay),
                             .first_step = options.first_step};
  const float* const scale_value = scale.address<float>();
  as_cpu(stream).enqueue(
      {kOp, OpKind::kOptimizer}, std::move(accesses), [=, n = param.numel()](const CpuContext& context) {
        if (std::isnan(*scale_value)) return;
        cpu::SgdArgs now = args;
        now.scale = *scale_value;
        const auto kernel = pick(context.isa, cpu::avx2::sgd, cpu::avx512::sgd);
        for_ranges(context.pool, n, kGrain, [&](int64_t begin, int64_t end) { kernel(now, begin, end); });
      });
}

}  // namespace polyreme
