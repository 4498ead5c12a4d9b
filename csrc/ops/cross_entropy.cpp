#include "ops/cpu/kernels/cross_entropy.h"
#include "ops/check.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/ranges.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

[[noreturn]] void refuse_target(const char* op, int64_t row, int32_t target, int64_t vocab) {
  throw InvalidArgument(concat(op, ": target of row ", row, " is ", target, "; expected 0 to ", vocab - 1,
                               ", or ", kIgnoreIndex, " to ignore the row"));
}

// Throws before anything was written.
void check_targets(const char* op, const int32_t* targets, int64_t rows, int64_t vocab) {
  for (int64_t row = 0; row < rows; ++row)
    if (targets[row] != kIgnoreIndex && (targets[row] < 0 || targets[row] >= vocab))
      refuse_target(op, row, targets[row], vocab);
}

// The kernel writes nothing where a target is bad; the stream tells it.
void launch_checked(CudaStream& gpu, const char* op, const Tensor& logits, const Tensor& targets,
                    const Tensor& loss, const Tensor& log_sum_exp, float scale,
                    Kernel<PolyremeCrossEntropy> kernel) {
  const Tensor bad = make_bad_id(gpu);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  launch(gpu, op, {logits, targets, loss, log_sum_exp, bad}, kernel,
         {.logits = logits.raw_address(),
          .targets = targets.address<int32_t>(),
          .loss = loss.defined() ? loss.address<float>() : nullptr,
          .log_sum_exp = log_sum_exp.address<float>(),
          .bad = bad.address<int32_t>(),
          .rows = rows,
          .vocab = vocab,
          .scale = scale,
          .dtype = dtype_code(logits)});
  refuse_bad_id(gpu, bad, [=](int64_t row, int32_t target) { refuse_target(op, row, target, vocab); });
}

}  // namespace

void cross_entropy_forward(Stream& stream, const Tensor& logits, const Tensor& targets, const Tensor& loss,
                           const Tensor& log_sum_exp) {
  constexpr const char* kOp = "cross_entropy_forward";
  check_float_rows({kOp, "logits"}, logits);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  check_dense({kOp, "targets"}, targets, {rows}, DType::kI32);
  check_dense({kOp, "loss"}, loss, {rows});
  check_dense({kOp, "log_sum_exp"}, log_sum_exp, {rows});
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch_checked(*gpu, kOp, logits, targets, loss, log_sum_exp, 0.0f,
                          &PolyremeCudaTable::cross_entropy_forward);
  const cpu::CrossEntropyForward args = {.vocab = vocab,
                                         .type = element_of(logits),
                                         .logits = logits.raw_address(),
                                         .targets = targets.address<int32_t>(),
                                         .loss = loss.address<float>(),
                                         .log_sum_exp = log_sum_exp.address<float>()};
  as_cpu(stream).enqueue(
      {kOp, OpKind::kLoss}, {reads(logits), reads(targets), writes(loss), writes(log_sum_exp)},
      [=](const CpuContext& context) {
        check_targets(kOp, args.targets, rows, vocab);
        const auto kernel =
            pick(context.isa, cpu::avx2::cross_entropy_forward, cpu::avx512::cross_entropy_forward);
        for_row_ranges(context.pool, rows, vocab,
                       [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
      });
}

void cross_entropy_backward(Stream& stream, const Tensor& logits, const Tensor& targets,
                            const Tensor& log_sum_exp, float scale) {
  constexpr const char* kOp = "cross_entropy_backward";
  check_float_rows({kOp, "logits"}, logits);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  check_dense({kOp, "targets"}, targets, {rows}, DType::kI32);
  check_dense({kOp, "log_sum_exp"}, log_sum_exp, {rows});
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch_checked(*gpu, kOp, logits, targets, {}, log_sum_exp, scale,
                          &PolyremeCudaTable::cross_entropy_backward);
  const cpu::CrossEntropyBackward args = {.vocab = vocab,
                                          .type = element_of(logits),
                                          .logits = logits.raw_address(),
                                          .targets = targets.address<int32_t>(),
                                          .log_sum_exp = log_sum_exp.address<float>(),
                                          .scale = scale};
  as_cpu(stream).enqueue(
      {kOp, OpKind::kLoss}, {reads(logits), writes(logits), reads(targets), reads(log_sum_exp)},
      [=](const CpuContext& context) {
        check_targets(kOp, args.targets, rows, vocab);
        const auto kernel =
            pick(context.isa, cpu::avx2::cross_entropy_backward, cpu::avx512::cross_entropy_backward);
        for_row_ranges(context.pool, rows, vocab,
                       [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
      });
}

}  // namespace polyreme
