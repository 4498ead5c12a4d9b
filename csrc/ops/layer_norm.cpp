#include <cmath>

#include "ops/check.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/kernels/layer_norm.h"
#include "ops/cpu/ranges.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

// A row of parameters may be fp32 where the activations are narrower.
void check_param(ArgName name, const Tensor& param, const Tensor& activations) {
  const bool is_narrow = param.defined() && param.dtype() == activations.dtype();
  check_dense(name, param, {activations.size(1)}, is_narrow ? param.dtype() : DType::kF32);
}

}  // namespace

void layer_norm_forward(Stream& stream, const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps,
                        const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  constexpr const char* kOp = "layer_norm_forward";
  check_float_rows({kOp, "x"}, x);
  const int64_t rows = x.size(0), cols = x.size(1);
  check_param({kOp, "gamma"}, gamma, x);
  check_param({kOp, "beta"}, beta, x);
  require(eps >= 0.0f && std::isfinite(eps), kOp, ": eps: expected a finite number, 0 or more, got ", eps);
  check_dense({kOp, "y"}, y, x.shape(), x.dtype());
  check_dense({kOp, "mean"}, mean, {rows});
  check_dense({kOp, "rstd"}, rstd, {rows});
  check_in_place_or_apart({kOp, "y"}, y, x);
  if (CudaStream* const gpu = gpu_stream(stream); gpu != nullptr && gamma.dtype() == beta.dtype())
    return launch(*gpu, kOp, {x, gamma, beta, y, mean, rstd}, &PolyremeCudaTable::norm_forward,
                  {.x = x.raw_address(),
                   .gamma = gamma.raw_address(),
                   .beta = beta.raw_address(),
                   .y = y.raw_address(),
                   .mean = mean.address<float>(),
                   .rstd = rstd.address<float>(),
                   .rows = rows,
                   .cols = cols,
                   .eps = eps,
                   .dtype = dtype_code(x),
                   .param_dtype = dtype_code(gamma)});
  const cpu::LayerNormForward args = {.cols = cols,
                                      .type = element_of(x),
                                      .x = x.raw_address(),
                                      .gamma = nullptr,  // widened when the operation runs
                                      .beta = nullptr,
                                      .eps = eps,
                                      .y = y.raw_address(),
                                      .mean = mean.address<float>(),
                                      .rstd = rstd.address<float>()};
  const ElementPointer gamma_row(gamma), beta_row(beta);
  as_cpu(stream).enqueue(
      {kOp, OpKind::kNorm}, {reads(x), reads(gamma), reads(beta), writes(y), writes(mean), writes(rstd)},
      [=](const CpuContext& context) {
        const auto kernel = pick(context.isa, cpu::avx2::layer_norm_forward, cpu::avx512::layer_norm_forward);
        const WideRow wide_gamma(context.isa, gamma_row, cols), wide_beta(context.isa, beta_row, cols);
        cpu::LayerNormForward now = args;
        now.gamma = wide_gamma.data();
        now.beta = wide_beta.data();
        for_row_ranges(context.pool, rows, cols,
                       [&](int64_t begin, int64_t end) { kernel(now, begin, end); });
      });
}

void layer_norm_backward_input(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                               const Tensor& mean, const Tensor& rstd, const Tensor& dx) {
  constexpr const char* kOp = "layer_norm_backward_input";
  check_float_rows({kOp, "dy"}, dy);
  const int64_t rows = dy.size(0), cols = dy.size(1);
  check_dense({kOp, "x"}, x, dy.shape(), dy.dtype());
  check_param({kOp, "gamma"}, gamma, dy);
  check_dense({kOp, "mean"}, mean, {rows});
  check_dense({kOp, "rstd"}, rstd, {rows});
  check_dense({kOp, "dx"}, dx, dy.shape(), dy.dtype());
  check_in_place_or_apart({kOp, "dx"}, dx, dy);
  check_in_place_or_apart({kOp, "dx"}, dx, x);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {dy, x, gamma, mean, rstd, dx}, &PolyremeCudaTable::norm_backward_input,
                  {.dy = dy.raw_address(),
                   .x = x.raw_address(),
                   .gamma = gamma.raw_address(),
                   .mean = mean.address<float>(),
                   .rstd = rstd.address<float>(),
                   .dx = dx.raw_address(),
                   .rows = rows,
                   .cols = cols,
                   .dtype = dtype_code(dy),
                   .param_dtype = dtype_code(gamma)});
  const cpu::LayerNormBackwardInput args = {.cols = cols,
                                            .type = element_of(dy),
                                            .dy = dy.raw_address(),
                                            .x = x.raw_address(),
                                            .gamma = nullptr,  // widened when the operation runs
                                            .mean = mean.address<float>(),
                                            .rstd = rstd.address<float>(),
                                            .dx = dx.raw_address()};
  const ElementPointer gamma_row(gamma);
  as_cpu(stream).enqueue(
      {kOp, OpKind::kNorm}, {reads(dy), reads(x), reads(gamma), reads(mean), reads(rstd), writes(dx)},
      [=](const CpuContext& context) {
        const auto kernel =
            pick(context.isa, cpu::avx2::layer_norm_backward_input, cpu::avx512::layer_norm_backward_input);
        const WideRow wide_gamma(context.isa, gamma_row, cols);
        cpu::LayerNormBackwardInput now = args;
        now.gamma = wide_gamma.data();
        for_row_ranges(context.pool, rows, cols,
                       [&](int64_t begin, int64_t end) { kernel(now, begin, end); });
      });
}

void layer_norm_backward_weight(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& mean,
                                const Tensor& rstd, const Tensor& dgamma, const Tensor& dbeta) {
  constexpr const char* kOp = "layer_norm_backward_weight";
  check_float_rows({kOp, "dy"}, dy);
  const int64_t rows = dy.size(0), cols = dy.size(1);
  check_dense({kOp, "x"}, x, dy.shape(), dy.dtype());
  check_dense({kOp, "mean"}, mean, {rows});
  check_dense({kOp, "rstd"}, rstd, {rows});
  check_dense({kOp, "dgamma"}, dgamma, {cols});
  check_dense({kOp, "dbeta"}, dbeta, {cols});
  check_apart({kOp, "dbeta"}, dbeta, dgamma);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {dy, x, mean, rstd, dgamma, dbeta}, &PolyremeCudaTable::norm_backward_weight,
                  {.dy = dy.raw_address(),
                   .x = x.raw_address(),
                   .mean = mean.address<float>(),
                   .rstd = rstd.address<float>(),
                   .dgamma = dgamma.address<float>(),
                   .dbeta = dbeta.address<float>(),
                   .rows = rows,
                   .cols = cols,
                   .dtype = dtype_code(dy)});
  const cpu::LayerNormBackwardWeight args = {.rows = rows,
                                             .cols = cols,
                                             .type = element_of(dy),
                                             .dy = dy.raw_address(),
                                             .x = x.raw_address(),
                                             .mean = mean.address<float>(),
                                             .rstd = rstd.address<float>(),
                                             .dgamma = dgamma.address<float>(),
                                             .dbeta = dbeta.address<float>()};
  as_cpu(stream).enqueue({kOp, OpKind::kNorm},
                         {reads(dy), reads(x), reads(mean), reads(rstd), reads(dgamma), writes(dgamma),
                          reads(dbeta), writes(dbeta)},
                         [args](const CpuContext& context) {
                           const auto kernel = pick(context.isa, cpu::avx2::layer_norm_backward_weight,
                                                    cpu::avx512::layer_norm_backward_weight);
                           for_column_ranges(context.pool, args.cols,
                                             [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
                         });
}

}  // namespace polyreme
