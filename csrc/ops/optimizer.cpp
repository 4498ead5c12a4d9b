#include <atomic>
#include <cmath>

#include "ops/check.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/exact.h"
#include "ops/cpu/kernels/optimizer.h"
#include "ops/cpu/ranges.h"
#include "ops/cuda/launch.h"
#include "ops/update.h"

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

// A launch over ranges of a rule's arguments, which nothing happens to while scale is NaN.
template <typename Args, typename Kernel>
void enqueue_rule(Stream& stream, const char* op, std::vector<Access> accesses, const Args& args, int64_t n,
                  const Tensor& scale, Kernel* avx2, Kernel* avx512) {
  const float* const scale_value = scale.address<float>();
  accesses.push_back(reads(scale));
  as_cpu(stream).enqueue({op, OpKind::kOptimizer}, std::move(accesses), [=](const CpuContext& context) {
    if (std::isnan(*scale_value)) return;
    Args now = args;
    now.scale = *scale_value;
    Kernel* const kernel = pick(context.isa, avx2, avx512);
    for_ranges(context.pool, n, kGrain, [&](int64_t begin, int64_t end) { kernel(now, begin, end); });
  });
}

void check_moments(const char* op, const Tensor& param, const Tensor& grad, const Tensor& m, const Tensor& v,
                   const AdamWOptions& options) {
  check_dense({op, "param"}, param);
  if (grad.defined()) {
    check_state({op, "grad"}, grad, param);
    check_apart({op, "m"}, m, grad);
    check_apart({op, "v"}, v, grad);
  }
  check_state({op, "m"}, m, param);
  check_state({op, "v"}, v, param);
  check_apart({op, "v"}, v, m);
  check_number(op, "lr", options.lr);
  check_fraction(op, "beta1", options.beta1);
  check_fraction(op, "beta2", options.beta2);
  check_number(op, "eps", options.eps);
  check_number(op, "weight_decay", options.weight_decay);
  require(options.step >= 1, op, ": step: expected 1 or more, got ", options.step);
}

PolyremeUpdate update_args(const Tensor& param, const Tensor& grad, const Tensor& scale) {
  return {.param = param.address<float>(),
          .grad = grad.address<float>(),
          .scale = scale.address<float>(),
          .weight = nullptr,
          .weight_dtype = 0,
          .reserved = 0,
          .count = param.numel()};
}

// What AdamW and LAMB share; lr and decay are left to them.
cpu::AdamWArgs moment_args(const Tensor& param, const Tensor& grad, const Tensor& m, const Tensor& v,
                           const AdamWOptions& options) {
  return {.param = param.address<float>(),
          .grad = grad.defined() ? grad.address<float>() : nullptr,
          .m = m.address<float>(),
          .v = v.address<float>(),
          .scale = 1.0f,  // read when the operation runs
          .new_m = static_cast<float>(1.0 - options.beta1),
          .keep_v = static_cast<float>(options.beta2),
          .new_v = static_cast<float>(1.0 - options.beta2),
          .sqrt_bias2 = static_cast<float>(std::sqrt(1.0 - integer_power(options.beta2, options.step))),
          .eps = static_cast<float>(options.eps),
          .step_size = static_cast<float>(1.0 / (1.0 - integer_power(options.beta1, options.step))),
          .decay = 0.0f};
}

PolyremeLamb lamb_args(const cpu::AdamWArgs& args, const Tensor& scale, const Tensor& sums,
                       const AdamWOptions& options, int64_t count) {
  return {.param = args.param,
          .grad = args.grad,
          .m = args.m,
          .v = args.v,
          .scale = scale.address<float>(),
          .sums = sums.address<int64_t>(),
          .new_m = args.new_m,
          .keep_v = args.keep_v,
          .new_v = args.new_v,
          .sqrt_bias2 = args.sqrt_bias2,
          .eps = args.eps,
          .step_size = args.step_size,
          .decay = static_cast<float>(options.weight_decay),
          .lr = options.lr,
          .count = count};
}

}  // namespace

void accumulate(Stream& stream, const Tensor& x, const Tensor& out, const Tensor& not_finite) {
  constexpr const char* kOp = "accumulate";
  check_float({kOp, "x"}, x);
  check_dense({kOp, "out"}, out, x.shape());
  check_apart({kOp, "out"}, out, x);
  check_dense({kOp, "not_finite"}, not_finite, {1}, DType::kI32);
  const ElementPointer terms(x);
  float* const data = out.address<float>();
  int32_t* const flag = not_finite.address<int32_t>();
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(
        *gpu, kOp, {x, out, not_finite}, &PolyremeCudaTable::accumulate,
        {.x = x.raw_address(), .out = data, .not_finite = flag, .count = x.numel(), .dtype = dtype_code(x)});
  as_cpu(stream).enqueue(
      {kOp, OpKind::kElementwise}, {reads(x), reads(out), writes(out), reads(not_finite), writes(not_finite)},
      [=, n = x.numel()](const CpuContext& context) {
        const auto kernel = pick(context.isa, cpu::avx2::accumulate, cpu::avx512::accumulate);
        for_ranges(context.pool, n, kGrain, [&](int64_t begin, int64_t end) {
          if (kernel(terms.type, terms + begin, data + begin, end - begin))
            std::atomic_ref(*flag).store(1, std::memory_order_relaxed);
        });
      });
}

void scale(Stream& stream, const Tensor& x, float factor) {
  check_float({"scale", "x"}, x);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "scale", {x}, &PolyremeCudaTable::scale,
                  {.x = x.raw_address(), .count = x.numel(), .factor = factor, .dtype = dtype_code(x)});
  const ElementPointer data(x);
  as_cpu(stream).enqueue(
      {"scale", OpKind::kElementwise}, {reads(x), writes(x)}, [=, n = x.numel()](const CpuContext& context) {
        const auto kernel = pick(context.isa, cpu::avx2::scale, cpu::avx512::scale);
        for_ranges(context.pool, n, kGrain,
                   [&](int64_t begin, int64_t end) { kernel(data.type, data + begin, factor, end - begin); });
      });
}

void clear_flags(Stream& stream, const Tensor& flags) {
  check_dense({"clear_flags", "flags"}, flags, DType::kI32);
  int32_t* const data = flags.address<int32_t>();
  if (CudaStream* const gpu = gpu_stream(stream))  // as floats: all bits are 0
    return launch(
        *gpu, "clear_flags", {flags}, &PolyremeCudaTable::fill,
        {.out = data, .count = flags.numel(), .value = 0.0f, .dtype = static_cast<int32_t>(DType::kF32)});
  as_cpu(stream).enqueue({"clear_flags"}, {writes(flags)},
                         [=, n = flags.numel()](const CpuContext&) { std::fill(data, data + n, 0); });
}

void adamw(Stream& stream, const Tensor& param, const Tensor& grad, const Tensor& m, const Tensor& v,
           const Tensor& scale, const AdamWOptions& options) {
  constexpr const char* kOp = "adamw";
  check_dense({kOp, "grad"}, grad, param.shape());
  check_moments(kOp, param, grad, m, v, options);
  check_scale(kOp, scale);
  cpu::AdamWArgs args = moment_args(param, grad, m, v, options);
  args.step_size = static_cast<float>(options.lr / (1.0 - integer_power(options.beta1, options.step)));
  args.decay = weight_decay_factor(options.lr, options.weight_decay);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {param, grad, m, v, scale}, &PolyremeCudaTable::adamw,
                  {.update = update_args(param, grad, scale),
                   .m = args.m,
                   .v = args.v,
                   .new_m = args.new_m,
                   .keep_v = args.keep_v,
                   .new_v = args.new_v,
                   .sqrt_bias2 = args.sqrt_bias2,
                   .eps = args.eps,
                   .step_size = args.step_size,
                   .decay = args.decay});
  enqueue_rule(stream, kOp,
               {reads(grad), reads(param), writes(param), reads(m), writes(m), reads(v), writes(v)}, args,
               param.numel(), scale, cpu::avx2::adamw, cpu::avx512::adamw);
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
  std::vector<Access> accesses = {reads(grad), reads(param), writes(param)};
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
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {param, grad, has_buffer ? buffer : Tensor{}, scale}, &PolyremeCudaTable::sgd,
                  {.update = update_args(param, grad, scale),
                   .buffer = args.buffer,
                   .momentum = args.momentum,
                   .lr = args.lr,
                   .decay = args.decay,
                   .first_step = args.first_step});
  enqueue_rule(stream, kOp, std::move(accesses), args, param.numel(), scale, cpu::avx2::sgd,
               cpu::avx512::sgd);
}

void lion(Stream& stream, const Tensor& param, const Tensor& grad, const Tensor& m, const Tensor& scale,
          const LionOptions& options) {
  constexpr const char* kOp = "lion";
  check_dense({kOp, "param"}, param);
  check_state({kOp, "grad"}, grad, param);
  check_state({kOp, "m"}, m, param);
  check_apart({kOp, "m"}, m, grad);
  check_scale(kOp, scale);
  check_number(kOp, "lr", options.lr);
  check_fraction(kOp, "beta1", options.beta1);
  check_fraction(kOp, "beta2", options.beta2);
  check_number(kOp, "weight_decay", options.weight_decay);
  const cpu::LionArgs args = {.param = param.address<float>(),
                              .grad = grad.address<float>(),
                              .m = m.address<float>(),
                              .scale = 1.0f,  // read when the operation runs
                              .new_u = static_cast<float>(1.0 - options.beta1),
                              .new_m = static_cast<float>(1.0 - options.beta2),
                              .lr = static_cast<float>(options.lr),
                              .decay = weight_decay_factor(options.lr, options.weight_decay)};
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {param, grad, m, scale}, &PolyremeCudaTable::lion,
                  {.update = update_args(param, grad, scale),
                   .m = args.m,
                   .new_u = args.new_u,
                   .new_m = args.new_m,
                   .lr = args.lr,
                   .decay = args.decay});
  enqueue_rule(stream, kOp, {reads(grad), reads(param), writes(param), reads(m), writes(m)}, args,
               param.numel(), scale, cpu::avx2::lion, cpu::avx512::lion);
}

void lamb_moments(Stream& stream, const Tensor& param, const Tensor& grad, const Tensor& m, const Tensor& v,
                  const Tensor& scale, const AdamWOptions& options, const Tensor& sums) {
  constexpr const char* kOp = "lamb_moments";
  check_dense({kOp, "grad"}, grad, param.shape());
  check_moments(kOp, param, grad, m, v, options);
  check_scale(kOp, scale);
  check_dense({kOp, "sums"}, sums, {2, ExactSum::kLimbs}, DType::kI64);
  const cpu::AdamWArgs args = moment_args(param, grad, m, v, options);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {param, grad, m, v, scale, sums}, &PolyremeCudaTable::lamb_moments,
                  lamb_args(args, scale, sums, options, param.numel()));
  const float* const scale_value = scale.address<float>();
  int64_t* const limbs = sums.address<int64_t>();
  as_cpu(stream).enqueue(
      {kOp, OpKind::kOptimizer},
      {reads(grad), reads(scale), reads(param), reads(m), writes(m), reads(v), writes(v), reads(sums),
       writes(sums)},
      [=, decay = static_cast<float>(options.weight_decay), n = param.numel()](const CpuContext& context) {
        if (std::isnan(*scale_value)) return;
        cpu::AdamWArgs now = args;
        now.scale = *scale_value;
        const auto kernel = pick(context.isa, cpu::avx2::lamb_moments, cpu::avx512::lamb_moments);
        add_exactly<2>(context.pool, ceil_div(n, kNormBlock), kGrain / kNormBlock, limbs,
                       [&](std::array<ExactSum, 2>& piece, int64_t first_block, int64_t end_block) {
                         for (int64_t block = first_block; block < end_block; ++block) {
                           const int64_t begin = block * kNormBlock;
                           double squares[2];
                           kernel(now, decay, begin, std::min(begin + kNormBlock, n), squares);
                           piece[0].add(squares[0]);
                           piece[1].add(squares[1]);
                         }
                       });
      });
}

void lamb_apply(Stream& stream, const Tensor& param, const Tensor& m, const Tensor& v, const Tensor& sums,
                const Tensor& scale, const AdamWOptions& options) {
  constexpr const char* kOp = "lamb_apply";
  check_moments(kOp, param, {}, m, v, options);
  check_scale(kOp, scale);
  check_dense({kOp, "sums"}, sums, {2, ExactSum::kLimbs}, DType::kI64);
  const cpu::AdamWArgs args = moment_args(param, {}, m, v, options);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {param, m, v, scale, sums}, &PolyremeCudaTable::lamb_apply,
                  lamb_args(args, scale, sums, options, param.numel()));
  const float* const scale_value = scale.address<float>();
  const int64_t* const limbs = sums.address<int64_t>();
  as_cpu(stream).enqueue(
      {kOp, OpKind::kOptimizer}, {reads(scale), reads(param), writes(param), reads(m), reads(v), reads(sums)},
      [=, decay = static_cast<float>(options.weight_decay), lr = options.lr,
       n = param.numel()](const CpuContext& context) {
        if (std::isnan(*scale_value)) return;
        const double weight_norm = std::sqrt(load_sum(limbs).value());
        const double direction_norm = std::sqrt(load_sum(limbs + ExactSum::kLimbs).value());
        const double ratio = weight_norm > 0 && direction_norm > 0 ? weight_norm / direction_norm : 1.0;
        const auto kernel = pick(context.isa, cpu::avx2::lamb_apply, cpu::avx512::lamb_apply);
        for_ranges(context.pool, n, kGrain, [&](int64_t begin, int64_t end) {
          kernel(args, decay, static_cast<float>(lr * ratio), begin, end);
        });
      });
}

}  // namespace polyreme
