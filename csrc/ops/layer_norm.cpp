#include <cmath>

#include "ops/check.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/kernels/layer_norm.h"
#include "ops/cpu/ranges.h"
#include "ops/ops.h"

namespace polyreme {

void layer_norm_forward(Stream& stream, const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps,
                        const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  constexpr const char* kOp = "layer_norm_forward";
  check_rows({kOp, "x"}, x);
  const int64_t rows = x.size(0), cols = x.size(1);
  check_dense({kOp, "gamma"}, gamma, {cols});
  check_dense({kOp, "beta"}, beta, {cols});
  require(eps >= 0.0f && std::isfinite(eps), kOp, ": eps: expected a finite number, 0 or more, got ", eps);
  check_dense({kOp, "y"}, y, x.shape());
  check_dense({kOp, "mean"}, mean, {rows});
  check_dense({kOp, "rstd"}, rstd, {rows});
  check_in_place_or_apart({kOp, "y"}, y, x);
  const cpu::LayerNormForward args = {.cols = cols,
                                      .x = x.address<float>(),
                                      .gamma = gamma.address<float>(),
                                      .beta = beta.address<float>(),
                                      .eps = eps,
                                      .y = y.address<float>(),
                                      .mean = mean.address<float>(),
                                      .rstd = rstd.address<float>()};
  as_cpu(stream).enqueue(
      {kOp, OpKind::kNorm}, {reads(x), reads(gamma), reads(beta), writes(y), writes(mean), writes(rstd)},
      [=](const CpuContext& context) {
        const auto kernel = pick(context.isa, cpu::avx2::layer_norm_forward, cpu::avx512::layer_norm_forward);
        for_row_ranges(context.pool, rows, cols,
                       [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
      });
}

void layer_norm_backward_input(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                               const Tensor& mean, const Tensor& rstd, const Tensor& dx) {
  constexpr const char* kOp = "layer_norm_backward_input";
  check_rows({kOp, "dy"}, dy);
  const int64_t rows = dy.size(0), cols = dy.size(1);
  check_dense({kOp, "x"}, x, dy.shape());
  check_dense({kOp, "gamma"}, gamma, {cols});
  check_dense({kOp, "mean"}, mean, {rows});
  check_dense({kOp, "rstd"}, rstd, {rows});
  check_dense({kOp, "dx"}, dx, dy.shape());
  check_in_place_or_apart({kOp, "dx"}, dx, dy);
  check_in_place_or_apart({kOp, "dx"}, dx, x);
  const cpu::LayerNormBackwardInput args = {.cols = cols,
                                            .dy = dy.address<float>(),
                                            .x = x.address<float>(),
                                            .gamma = gamma.address<float>(),
                                            .mean = mean.address<float>(),
                                            .rstd = rstd.address<float>(),
                                            .dx = dx.address<float>()};
  as_cpu(stream).enqueue(
      {kOp, OpKind::kNorm}, {reads(dy), reads(x), reads(gamma), reads(mean), reads(rstd), writes(dx)},
      [=](const CpuContext& context) {
        const auto kernel =
            pick(context.isa, cpu::avx2::layer_norm_backward_input, cpu::avx512::layer_norm_backward_input);
        for_row_ranges(context.pool, rows, cols,
                       [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
      });
}

void layer_norm_backward_weight(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& mean,
                                const Tensor& rstd, const Tensor& dgamma, const Tensor& dbeta) {
  constexpr const char* kOp = "layer_norm_backward_weight";
  check_rows({kOp, "dy"}, dy);
  const int64_t rows = dy.size(0), cols = dy.size(1);
  check_dense({kOp, "x"}, x, dy.shape());
  check_dense({kOp, "mean"}, mean, {rows});
  check_dense({kOp, "rstd"}, rstd, {rows});
  check_dense({kOp, "dgamma"}, dgamma, {cols});
  check_dense({kOp, "dbeta"}, dbeta, {cols});
  check_apart({kOp, "dbeta"}, dbeta, dgamma);
  const cpu::LayerNormBackwardWeight args = {.rows = rows,
                                             .cols = cols,
                                             .dy = dy.address<float>(),
                                             .x = x.address<float>(),
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
