// What lanes of tensor parallelism need besides the operations of whole tensors.
#include <cstring>

#include "ops/check.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/kernels/cross_entropy.h"
#include "ops/cpu/ranges.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

namespace polyreme {

void add_to(Stream& stream, const Tensor& x, const Tensor& out) {
  check_float({"add_to", "x"}, x);
  check_dense({"add_to", "out"}, out, x.shape());
  check_apart({"add_to", "out"}, out, x);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "add_to", {x, out}, &PolyremeCudaTable::accumulate,
                  {.x = x.raw_address(),
                   .out = out.address<float>(),
                   .not_finite = nullptr,
                   .count = x.numel(),
                   .dtype = dtype_code(x)});
  const ElementPointer from(x);
  float* const to = out.address<float>();
  as_cpu(stream).enqueue({"add_to", OpKind::kElementwise}, {reads(x), reads(out), writes(out)},
                         [=, n = x.numel()](const CpuContext& context) {
                           const auto kernel = pick(context.isa, cpu::avx2::add_to, cpu::avx512::add_to);
                           for_ranges(context.pool, n, kGrain, [=](int64_t begin, int64_t end) {
                             kernel(from.type, from + begin, to + begin, end - begin);
                           });
                         });
}

void add_rows(Stream& stream, const Tensor& x, const Tensor& table, const Tensor& out) {
  check_rows({"add_rows", "x"}, x);
  check_float({"add_rows", "out"}, out);
  check_dense({"add_rows", "out"}, out, x.shape(), out.dtype());
  const int64_t rows = x.size(0), cols = x.size(1);
  check_float({"add_rows", "table"}, table);
  require(table.dims() == 2 && table.size(0) >= 1 && table.size(1) == cols,
          "add_rows: table: expected rows of ", cols, " columns, got ", table);
  check_in_place_or_apart({"add_rows", "out"}, out, x);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "add_rows", {x, table, out}, &PolyremeCudaTable::add_rows,
                  {.x = x.address<float>(),
                   .table = table.raw_address(),
                   .out = out.raw_address(),
                   .rows = rows,
                   .cols = cols,
                   .period = table.size(0),
                   .table_dtype = dtype_code(table),
                   .out_dtype = dtype_code(out)});
  const float* const from = x.address<float>();
  const ElementPointer added(table), to(out);
  as_cpu(stream).enqueue(
      {"add_rows", OpKind::kElementwise}, {reads(x), reads(table), writes(out)},
      [=, period = table.size(0)](const CpuContext& context) {
        const WideRow wide(context.isa, added, period * cols);
        const auto sum = pick(context.isa, cpu::avx2::add, cpu::avx512::add);
        const auto round = pick(context.isa, cpu::avx2::cast, cpu::avx512::cast);
        for_row_ranges(context.pool, rows, cols, [&](int64_t begin, int64_t end) {
          std::vector<float> row(to.type == cpu::Element::kF32 ? 0 : static_cast<size_t>(cols));
          for (int64_t i = begin; i < end; ++i) {
            void* const target = row.empty() ? to + i * cols : row.data();
            sum(cpu::Element::kF32, from + i * cols, wide.data() + i % period * cols, target, cols);
            if (!row.empty()) round(cpu::Element::kF32, row.data(), to.type, to + i * cols, cols);
          }
        });
      });
}

void embedding_part_forward(Stream& stream, const Tensor& tokens, const Tensor& table, int64_t first_token,
                            const Tensor& out) {
  constexpr const char* kOp = "embedding_part_forward";
  check_rows({kOp, "tokens"}, tokens, 2, DType::kI32);
  check_float_rows({kOp, "table"}, table);
  const int64_t count = tokens.numel(), cols = table.size(1);
  check_dense({kOp, "out"}, out, {tokens.size(0), tokens.size(1), cols});
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {tokens, table, out}, &PolyremeCudaTable::embedding_part_forward,
                  {.tokens = tokens.address<int32_t>(),
                   .table = table.raw_address(),
                   .out = out.address<float>(),
                   .count = count,
                   .cols = cols,
                   .vocab = table.size(0),
                   .first_token = first_token,
                   .dtype = dtype_code(table)});
  const int32_t* const token = tokens.address<int32_t>();
  const ElementPointer from(table);
  float* const to = out.address<float>();
  as_cpu(stream).enqueue({kOp, OpKind::kEmbedding}, {reads(tokens), reads(table), writes(out)},
                         [=, rows = table.size(0)](const CpuContext& context) {
                           const auto widen = pick(context.isa, cpu::avx2::cast, cpu::avx512::cast);
                           for_row_ranges(context.pool, count, cols, [&](int64_t begin, int64_t end) {
                             for (int64_t i = begin; i < end; ++i) {
                               const int64_t row = token[i] - first_token;
                               if (row >= 0 && row < rows)
                                 widen(from.type, from + row * cols, cpu::Element::kF32, to + i * cols, cols);
                               else
                                 std::memset(to + i * cols, 0, static_cast<size_t>(cols) * sizeof(float));
                             }
                           });
                         });
}

void embedding_part_backward(Stream& stream, const Tensor& tokens, const Tensor& dout, int64_t first_token,
                             const Tensor& grad) {
  constexpr const char* kOp = "embedding_part_backward";
  check_rows({kOp, "tokens"}, tokens, 2, DType::kI32);
  check_rows({kOp, "grad"}, grad);
  const int64_t count = tokens.numel(), cols = grad.size(1);
  check_float({kOp, "dout"}, dout);
  check_dense({kOp, "dout"}, dout, {tokens.size(0), tokens.size(1), cols}, dout.dtype());
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {tokens, dout, grad}, &PolyremeCudaTable::embedding_part_backward,
                  {.tokens = tokens.address<int32_t>(),
                   .table = dout.raw_address(),
                   .out = grad.address<float>(),
                   .count = count,
                   .cols = cols,
                   .vocab = grad.size(0),
                   .first_token = first_token,
                   .dtype = dtype_code(dout)});
  const int32_t* const token = tokens.address<int32_t>();
  const ElementPointer from(dout);
  float* const to = grad.address<float>();
  as_cpu(stream).enqueue({kOp, OpKind::kEmbedding}, {reads(tokens), reads(dout), reads(grad), writes(grad)},
                         [=, rows = grad.size(0)](const CpuContext& context) {
                           const auto kernel = pick(context.isa, cpu::avx2::add_to, cpu::avx512::add_to);
                           // Threads share the columns, so that every row sees the tokens in order.
                           for_column_ranges(context.pool, cols, [&](int64_t begin, int64_t end) {
                             for (int64_t i = 0; i < count; ++i) {
                               const int64_t row = token[i] - first_token;
                               if (row >= 0 && row < rows)
                                 kernel(from.type, from + (i * cols + begin), to + row * cols + begin,
                                        end - begin);
                             }
                           });
                         });
}

namespace {

cpu::CrossEntropyPart part_args(const char* op, const LogitsPart& part) {
  check_float_rows({op, "logits"}, part.logits);
  const int64_t cols = part.logits.size(1);
  require(part.first_class >= 0 && part.valid >= 0 && part.valid <= cols, op, ": ", part.valid,
          " classes from ", part.first_class, " on, in ", cols, " columns");
  cpu::CrossEntropyPart args{};
  args.rows = part.logits.size(0);
  args.cols = cols;
  args.valid = part.valid;
  args.first_class = part.first_class;
  args.type = element_of(part.logits);
  args.logits = part.logits.raw_address();
  return args;
}

// The same for the kernels of a GPU; each takes what it needs.
PolyremeVocabPart gpu_args(const cpu::CrossEntropyPart& part, int32_t dtype) {
  return {.logits = part.logits,
          .targets = part.targets,
          .max = part.top,
          .sum_exp = part.sums,
          .target_logit = part.sums == nullptr ? nullptr : part.sums + part.rows,
          .loss = part.loss,
          .log_sum_exp = part.log_sum_exp,
          .rows = part.rows,
          .cols = part.cols,
          .valid = part.valid,
          .first_column = part.first_class,
          .scale = part.scale,
          .dtype = dtype};
}

using PartKernel = void(const cpu::CrossEntropyPart& args, int64_t first_row, int64_t end_row);

void enqueue_rows(Stream& stream, const char* op, std::vector<Access> accesses,
                  const cpu::CrossEntropyPart& args, int64_t row_cost, PartKernel* avx2, PartKernel* avx512) {
  as_cpu(stream).enqueue({op, OpKind::kLoss}, std::move(accesses), [=](const CpuContext& context) {
    PartKernel* const kernel = pick(context.isa, avx2, avx512);
    for_row_ranges(context.pool, args.rows, row_cost,
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  });
}

}  // namespace

void cross_entropy_part_max(Stream& stream, const LogitsPart& part, const Tensor& top) {
  constexpr const char* kOp = "cross_entropy_part_max";
  cpu::CrossEntropyPart args = part_args(kOp, part);
  check_dense({kOp, "top"}, top, {args.rows});
  args.top = top.address<float>();
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {part.logits, top}, &PolyremeCudaTable::vocab_part_max,
                  gpu_args(args, dtype_code(part.logits)));
  enqueue_rows(stream, kOp, {reads(part.logits), reads(top), writes(top)}, args, args.cols,
               cpu::avx2::cross_entropy_part_max, cpu::avx512::cross_entropy_part_max);
}

void cross_entropy_part_sums(Stream& stream, const LogitsPart& part, const Tensor& targets, const Tensor& top,
                             const Tensor& sums) {
  constexpr const char* kOp = "cross_entropy_part_sums";
  cpu::CrossEntropyPart args = part_args(kOp, part);
  check_dense({kOp, "targets"}, targets, {args.rows}, DType::kI32);
  check_dense({kOp, "top"}, top, {args.rows});
  check_dense({kOp, "sums"}, sums, {2, args.rows});
  args.targets = targets.address<int32_t>();
  args.top = top.address<float>();
  args.sums = sums.address<float>();
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {part.logits, targets, top, sums}, &PolyremeCudaTable::vocab_part_sums,
                  gpu_args(args, dtype_code(part.logits)));
  enqueue_rows(stream, kOp, {reads(part.logits), reads(targets), reads(top), writes(sums)}, args, args.cols,
               cpu::avx2::cross_entropy_part_sums, cpu::avx512::cross_entropy_part_sums);
}

void cross_entropy_finish(Stream& stream, const Tensor& sums, const Tensor& targets, const Tensor& top,
                          const Tensor& loss, const Tensor& log_sum_exp) {
  constexpr const char* kOp = "cross_entropy_finish";
  cpu::CrossEntropyPart args{};
  args.rows = top.numel();
  check_dense({kOp, "sums"}, sums, {2, args.rows});
  check_dense({kOp, "targets"}, targets, {args.rows}, DType::kI32);
  check_dense({kOp, "top"}, top, {args.rows});
  check_dense({kOp, "loss"}, loss, {args.rows});
  check_dense({kOp, "log_sum_exp"}, log_sum_exp, {args.rows});
  args.targets = targets.address<int32_t>();
  args.top = top.address<float>();
  args.sums = sums.address<float>();
  args.loss = loss.address<float>();
  args.log_sum_exp = log_sum_exp.address<float>();
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {sums, targets, top, loss, log_sum_exp}, &PolyremeCudaTable::vocab_part_finish,
                  gpu_args(args, dtype_code(sums)));
  enqueue_rows(stream, kOp, {reads(sums), reads(targets), reads(top), writes(loss), writes(log_sum_exp)},
               args, 16, cpu::avx2::cross_entropy_finish, cpu::avx512::cross_entropy_finish);
}

void cross_entropy_part_backward(Stream& stream, const LogitsPart& part, const Tensor& targets,
                                 const Tensor& log_sum_exp, float scale) {
  constexpr const char* kOp = "cross_entropy_part_backward";
  cpu::CrossEntropyPart args = part_args(kOp, part);
  check_dense({kOp, "targets"}, targets, {args.rows}, DType::kI32);
  check_dense({kOp, "log_sum_exp"}, log_sum_exp, {args.rows});
  args.targets = targets.address<int32_t>();
  args.log_sum_exp = log_sum_exp.address<float>();
  args.scale = scale;
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {part.logits, targets, log_sum_exp}, &PolyremeCudaTable::vocab_part_backward,
                  gpu_args(args, dtype_code(part.logits)));
  enqueue_rows(stream, kOp, {reads(part.logits), writes(part.logits), reads(targets), reads(log_sum_exp)},
               args, args.cols, cpu::avx2::cross_entropy_part_backward,
               cpu::avx512::cross_entropy_part_backward);
}

}  // namespace polyreme
