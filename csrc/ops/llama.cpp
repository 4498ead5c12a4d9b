#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "ops/check.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/kernels/llama.h"
#include "ops/cpu/kernels/rms_norm.h"
#include "ops/cpu/ranges.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

// A row of parameters may be fp32 where the activations are narrower.
void check_gamma(const char* op, const Tensor& gamma, const Tensor& activations) {
  const bool is_narrow = gamma.defined() && gamma.dtype() == activations.dtype();
  check_dense({op, "gamma"}, gamma, {activations.size(1)}, is_narrow ? gamma.dtype() : DType::kF32);
}

// Turns the first `heads` heads of each group where they are; tables of angles are made on the way.
void launch_rotary(CudaStream& gpu, const char* op, const Tensor& x, int64_t heads, double theta,
                   bool inverse) {
  const int64_t seq = x.size(1), head_dim = x.size(4);
  const Tensor tables = empty(gpu.device(), DType::kF32, {2, seq, head_dim / 2}, "rotary tables");
  float* const cosine = tables.address<float>();
  float* const sine = cosine + seq * head_dim / 2;
  launch(gpu, op, {tables}, &PolyremeCudaTable::rotary_table,
         {.cosine = cosine, .sine = sine, .seq = seq, .head_dim = head_dim, .theta = theta});
  launch(gpu, op, {x, tables}, &PolyremeCudaTable::rotary,
         {.x = x.raw_address(),
          .cosine = cosine,
          .sine = sine,
          .tokens = x.size(0) * seq,
          .seq = seq,
          .groups = x.size(2),
          .heads = heads,
          .head_dim = head_dim,
          .row_stride = x.size(3) * head_dim,
          .backward = inverse,
          .dtype = dtype_code(x)});
}

}  // namespace

void rms_norm_forward(Stream& stream, const Tensor& x, const Tensor& gamma, float eps, const Tensor& y,
                      const Tensor& rstd) {
  constexpr const char* kOp = "rms_norm_forward";
  check_float_rows({kOp, "x"}, x);
  const int64_t rows = x.size(0), cols = x.size(1);
  check_gamma(kOp, gamma, x);
  require(eps >= 0.0f && std::isfinite(eps), kOp, ": eps: expected a finite number, 0 or more, got ", eps);
  check_dense({kOp, "y"}, y, x.shape(), x.dtype());
  check_dense({kOp, "rstd"}, rstd, {rows});
  check_in_place_or_apart({kOp, "y"}, y, x);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {x, gamma, y, rstd}, &PolyremeCudaTable::norm_forward,
                  {.x = x.raw_address(),
                   .gamma = gamma.raw_address(),
                   .beta = nullptr,
                   .y = y.raw_address(),
                   .mean = nullptr,
                   .rstd = rstd.address<float>(),
                   .rows = rows,
                   .cols = cols,
                   .eps = eps,
                   .dtype = dtype_code(x),
                   .param_dtype = dtype_code(gamma)});
  const cpu::RmsNormForward args = {.cols = cols,
                                    .type = element_of(x),
                                    .x = x.raw_address(),
                                    .gamma = nullptr,  // widened when the operation runs
                                    .eps = eps,
                                    .y = y.raw_address(),
                                    .rstd = rstd.address<float>()};
  const ElementPointer gamma_row(gamma);
  as_cpu(stream).enqueue({kOp, OpKind::kNorm}, {reads(x), reads(gamma), writes(y), writes(rstd)},
                         [=](const CpuContext& context) {
                           const auto kernel =
                               pick(context.isa, cpu::avx2::rms_norm_forward, cpu::avx512::rms_norm_forward);
                           const WideRow wide_gamma(context.isa, gamma_row, cols);
                           cpu::RmsNormForward now = args;
                           now.gamma = wide_gamma.data();
                           for_row_ranges(context.pool, rows, cols,
                                          [&](int64_t begin, int64_t end) { kernel(now, begin, end); });
                         });
}

void rms_norm_backward_input(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                             const Tensor& rstd, const Tensor& dx) {
  constexpr const char* kOp = "rms_norm_backward_input";
  check_float_rows({kOp, "dy"}, dy);
  const int64_t rows = dy.size(0), cols = dy.size(1);
  check_dense({kOp, "x"}, x, dy.shape(), dy.dtype());
  check_gamma(kOp, gamma, dy);
  check_dense({kOp, "rstd"}, rstd, {rows});
  check_dense({kOp, "dx"}, dx, dy.shape(), dy.dtype());
  check_in_place_or_apart({kOp, "dx"}, dx, dy);
  check_in_place_or_apart({kOp, "dx"}, dx, x);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {dy, x, gamma, rstd, dx}, &PolyremeCudaTable::norm_backward_input,
                  {.dy = dy.raw_address(),
                   .x = x.raw_address(),
                   .gamma = gamma.raw_address(),
                   .mean = nullptr,
                   .rstd = rstd.address<float>(),
                   .dx = dx.raw_address(),
                   .rows = rows,
                   .cols = cols,
                   .dtype = dtype_code(dy),
                   .param_dtype = dtype_code(gamma)});
  const cpu::RmsNormBackwardInput args = {.cols = cols,
                                          .type = element_of(dy),
                                          .dy = dy.raw_address(),
                                          .x = x.raw_address(),
                                          .gamma = nullptr,  // widened when the operation runs
                                          .rstd = rstd.address<float>(),
                                          .dx = dx.raw_address()};
  const ElementPointer gamma_row(gamma);
  as_cpu(stream).enqueue({kOp, OpKind::kNorm}, {reads(dy), reads(x), reads(gamma), reads(rstd), writes(dx)},
                         [=](const CpuContext& context) {
                           const auto kernel = pick(context.isa, cpu::avx2::rms_norm_backward_input,
                                                    cpu::avx512::rms_norm_backward_input);
                           const WideRow wide_gamma(context.isa, gamma_row, cols);
                           cpu::RmsNormBackwardInput now = args;
                           now.gamma = wide_gamma.data();
                           for_row_ranges(context.pool, rows, cols,
                                          [&](int64_t begin, int64_t end) { kernel(now, begin, end); });
                         });
}

void rms_norm_backward_weight(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& rstd,
                              const Tensor& dgamma) {
  constexpr const char* kOp = "rms_norm_backward_weight";
  check_float_rows({kOp, "dy"}, dy);
  const int64_t rows = dy.size(0), cols = dy.size(1);
  check_dense({kOp, "x"}, x, dy.shape(), dy.dtype());
  check_dense({kOp, "rstd"}, rstd, {rows});
  check_dense({kOp, "dgamma"}, dgamma, {cols});
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {dy, x, rstd, dgamma}, &PolyremeCudaTable::norm_backward_weight,
                  {.dy = dy.raw_address(),
                   .x = x.raw_address(),
                   .mean = nullptr,
                   .rstd = rstd.address<float>(),
                   .dgamma = dgamma.address<float>(),
                   .dbeta = nullptr,
                   .rows = rows,
                   .cols = cols,
                   .dtype = dtype_code(dy)});
  const cpu::RmsNormBackwardWeight args = {.rows = rows,
                                           .cols = cols,
                                           .type = element_of(dy),
                                           .dy = dy.raw_address(),
                                           .x = x.raw_address(),
                                           .rstd = rstd.address<float>(),
                                           .dgamma = dgamma.address<float>()};
  as_cpu(stream).enqueue(
      {kOp, OpKind::kNorm}, {reads(dy), reads(x), reads(rstd), reads(dgamma), writes(dgamma)},
      [args](const CpuContext& context) {
        const auto kernel =
            pick(context.isa, cpu::avx2::rms_norm_backward_weight, cpu::avx512::rms_norm_backward_weight);
        for_column_ranges(context.pool, args.cols,
                          [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
      });
}

void rotary(Stream& stream, const Tensor& x, const Tensor& y, int64_t heads, double theta, bool inverse) {
  constexpr const char* kOp = "rotary";
  check_float_rows({kOp, "x"}, x, 5);
  check_dense({kOp, "y"}, y, x.shape(), x.dtype());
  check_in_place_or_apart({kOp, "y"}, y, x);
  require(heads >= 0 && heads <= x.size(3), kOp, ": heads: expected 0 to ", x.size(3), ", got ", heads);
  require(x.size(4) % 2 == 0, kOp, ": x: expected an even head_dim, got ", x.size(4));
  require(theta >= 1 && std::isfinite(theta), kOp, ": theta: expected a finite number, 1 or more, got ",
          theta);
  if (CudaStream* const gpu = gpu_stream(stream)) {
    if (y.raw_address() != x.raw_address()) copy(stream, x, y);
    if (heads > 0 && x.numel() > 0) launch_rotary(*gpu, kOp, y, heads, theta, inverse);
    return;
  }
  const cpu::Rotary args = {.samples = x.size(0),
                            .seq = x.size(1),
                            .groups = x.size(2),
                            .group_heads = x.size(3),
                            .heads = heads,
                            .head_dim = x.size(4),
                            .theta = theta,
                            .inverse = inverse,
                            .type = element_of(x),
                            .x = x.raw_address(),
                            .y = y.raw_address()};
  as_cpu(stream).enqueue(
      {kOp, OpKind::kElementwise}, {reads(x), writes(y)}, [args](const CpuContext& context) {
        const auto kernel = pick(context.isa, cpu::avx2::rotary, cpu::avx512::rotary);
        constexpr int64_t kPositions = 16;  // of a task
        const auto scratch_bytes = static_cast<size_t>(args.head_dim) * sizeof(float);
        parallel_for(context.pool, ceil_div(args.seq, kPositions), [&](int64_t task, int thread) {
          kernel(args, task * kPositions, std::min(args.seq, (task + 1) * kPositions),
                 static_cast<float*>(context.pool.scratch(thread, scratch_bytes)));
        });
      });
}

void swiglu_forward(Stream& stream, const Tensor& x, const Tensor& y) {
  constexpr const char* kOp = "swiglu_forward";
  check_float_rows({kOp, "y"}, y);
  const int64_t rows = y.size(0), cols = y.size(1);
  check_dense({kOp, "x"}, x, {rows, 2 * cols}, y.dtype());
  check_apart({kOp, "y"}, y, x);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {x, y}, &PolyremeCudaTable::swiglu_forward,
                  {.x = x.raw_address(),
                   .dy = nullptr,
                   .out = y.raw_address(),
                   .rows = rows,
                   .cols = cols,
                   .dtype = dtype_code(y)});
  const cpu::SwiGlu args = {.cols = cols, .type = element_of(y), .x = x.raw_address(), .y = y.raw_address()};
  as_cpu(stream).enqueue({kOp, OpKind::kElementwise}, {reads(x), writes(y)}, [=](const CpuContext& context) {
    const auto kernel = pick(context.isa, cpu::avx2::swiglu_forward, cpu::avx512::swiglu_forward);
    for_row_ranges(context.pool, rows, 2 * cols,
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  });
}

void swiglu_backward(Stream& stream, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  constexpr const char* kOp = "swiglu_backward";
  check_float_rows({kOp, "dy"}, dy);
  const int64_t rows = dy.size(0), cols = dy.size(1);
  check_dense({kOp, "x"}, x, {rows, 2 * cols}, dy.dtype());
  check_dense({kOp, "dx"}, dx, x.shape(), dy.dtype());
  check_in_place_or_apart({kOp, "dx"}, dx, x);
  check_apart({kOp, "dx"}, dx, dy);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {x, dy, dx}, &PolyremeCudaTable::swiglu_backward,
                  {.x = x.raw_address(),
                   .dy = dy.raw_address(),
                   .out = dx.raw_address(),
                   .rows = rows,
                   .cols = cols,
                   .dtype = dtype_code(dy)});
  const cpu::SwiGlu args = {.cols = cols,
                            .type = element_of(dy),
                            .x = x.raw_address(),
                            .y = nullptr,
                            .dy = dy.raw_address(),
                            .dx = dx.raw_address()};
  as_cpu(stream).enqueue(
      {kOp, OpKind::kElementwise}, {reads(x), reads(dy), writes(dx)}, [=](const CpuContext& context) {
        const auto kernel = pick(context.isa, cpu::avx2::swiglu_backward, cpu::avx512::swiglu_backward);
        for_row_ranges(context.pool, rows, 2 * cols,
                       [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
      });
}

}  // namespace polyreme
