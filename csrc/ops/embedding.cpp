#include "ops/check.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/ranges.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

struct Sizes {
  int64_t batch, seq, cols, vocab;
};

// Shapes of the four tensors, which forward and backward share.
Sizes check_embedding(const char* op, const Tensor& tokens, const Tensor& token_rows,
                      const char* token_rows_name, const Tensor& position_rows,
                      const char* position_rows_name, const Tensor& activations,
                      const char* activations_name) {
  check_rows({op, "tokens"}, tokens, 2, DType::kI32);
  check_float_rows({op, token_rows_name}, token_rows);
  const Sizes sizes = {tokens.size(0), tokens.size(1), token_rows.size(1), token_rows.size(0)};
  if (position_rows.defined()) {
    check_rows({op, position_rows_name}, position_rows, 2, token_rows.dtype());
    require(position_rows.size(0) >= sizes.seq && position_rows.size(1) == sizes.cols, op, ": ",
            position_rows_name, ": expected at least ", sizes.seq, " rows of ", sizes.cols, " columns, got [",
            position_rows.size(0), ", ", position_rows.size(1), "]");
  }
  check_float({op, activations_name}, activations);
  check_dense({op, activations_name}, activations, {sizes.batch, sizes.seq, sizes.cols}, activations.dtype());
  return sizes;
}

[[noreturn]] void refuse_token(const char* op, int64_t index, int32_t token, const Sizes& sizes) {
  throw InvalidArgument(concat(op, ": token ", index, " is ", token, "; expected 0 to ", sizes.vocab - 1));
}

// Throws before anything was written: a token outside the table would be a write outside its memory.
void check_tokens(const char* op, const int32_t* tokens, const Sizes& sizes) {
  for (int64_t i = 0; i < sizes.batch * sizes.seq; ++i)
    if (tokens[i] < 0 || tokens[i] >= sizes.vocab) refuse_token(op, i, tokens[i], sizes);
}

// The kernel writes nothing where a token is bad; the stream tells it.
void launch_checked(CudaStream& gpu, const char* op, const Sizes& sizes, const Tensor& tokens,
                    const Tensor& token_rows, const Tensor& position_rows, const Tensor& rows,
                    Kernel<PolyremeEmbedding> kernel) {
  const Tensor bad = make_bad_id(gpu);
  launch(gpu, op, {tokens, token_rows, position_rows, rows, bad}, kernel,
         {.tokens = tokens.address<int32_t>(),
          .token_rows = token_rows.raw_address(),
          .position_rows = position_rows.defined() ? position_rows.raw_address() : nullptr,
          .rows = rows.raw_address(),
          .bad = bad.address<int32_t>(),
          .batch = sizes.batch,
          .seq = sizes.seq,
          .cols = sizes.cols,
          .vocab = sizes.vocab,
          .dtype = dtype_code(rows)});
  refuse_bad_id(gpu, bad, [=](int64_t index, int32_t token) { refuse_token(op, index, token, sizes); });
}

// The rows [0, seq) of a position table are all that an operation touches.
Tensor used_positions(const Tensor& position_rows, const Sizes& sizes) {
  return position_rows.defined() ? position_rows.slice(0, 0, sizes.seq) : Tensor();
}

}  // namespace

void embedding_forward(Stream& stream, const Tensor& tokens, const Tensor& token_table,
                       const Tensor& position_table, const Tensor& out) {
  constexpr const char* kOp = "embedding_forward";
  const Sizes sizes =
      check_embedding(kOp, tokens, token_table, "token_table", position_table, "position_table", out, "out");
  check_dense({kOp, "out"}, out, out.shape(), token_table.dtype());
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch_checked(*gpu, kOp, sizes, tokens, token_table, position_table, out,
                          &PolyremeCudaTable::embedding_forward);
  const int32_t* const token = tokens.address<int32_t>();
  const bool has_positions = position_table.defined();
  const ElementPointer token_rows(token_table), out_rows(out);
  const ElementPointer position_rows = has_positions ? ElementPointer(position_table) : ElementPointer();
  std::vector<Access> accesses = {reads(tokens), reads(token_table), writes(out)};
  if (has_positions) accesses.push_back(reads(used_positions(position_table, sizes)));
  as_cpu(stream).enqueue({kOp, OpKind::kEmbedding}, std::move(accesses), [=](const CpuContext& context) {
    check_tokens(kOp, token, sizes);
    const auto sum = pick(context.isa, cpu::avx2::add, cpu::avx512::add);
    const auto copy_row = pick(context.isa, cpu::avx2::cast, cpu::avx512::cast);
    const int64_t cols = sizes.cols;
    for_row_ranges(context.pool, sizes.batch * sizes.seq, cols, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const void* from = token_rows + token[i] * cols;
        void* to = out_rows + i * cols;
        if (has_positions) {
          sum(out_rows.type, from, position_rows + i % sizes.seq * cols, to, cols);
        } else {
          copy_row(out_rows.type, from, out_rows.type, to, cols);
        }
      }
    });
  });
}

void embedding_backward(Stream& stream, const Tensor& tokens, const Tensor& dout, const Tensor& token_grad,
                        const Tensor& position_grad) {
  constexpr const char* kOp = "embedding_backward";
  const Sizes sizes =
      check_embedding(kOp, tokens, token_grad, "token_grad", position_grad, "position_grad", dout, "dout");
  check_dense({kOp, "token_grad"}, token_grad, DType::kF32);
  if (position_grad.defined()) check_apart({kOp, "position_grad"}, position_grad, token_grad);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch_checked(*gpu, kOp, sizes, tokens, token_grad, position_grad, dout,
                          &PolyremeCudaTable::embedding_backward);
  const int32_t* const token = tokens.address<int32_t>();
  const ElementPointer dout_rows(dout);
  float* const token_rows = token_grad.address<float>();
  const Tensor positions = used_positions(position_grad, sizes);
  float* const position_rows = positions.defined() ? positions.address<float>() : nullptr;
  std::vector<Access> accesses = {reads(tokens), reads(dout), reads(token_grad), writes(token_grad)};
  if (position_rows) accesses.insert(accesses.end(), {reads(positions), writes(positions)});
  as_cpu(stream).enqueue({kOp, OpKind::kEmbedding}, std::move(accesses), [=](const CpuContext& context) {
    check_tokens(kOp, token, sizes);
    const auto kernel = pick(context.isa, cpu::avx2::add_to, cpu::avx512::add_to);
    // Threads share the columns, so that every row sees the tokens in order.
    const int64_t cols = sizes.cols;
    for_column_ranges(context.pool, cols, [&](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < sizes.batch * sizes.seq; ++i) {
        const void* from = dout_rows + (i * cols + begin);
        float* token_row = token_rows + token[i] * cols + begin;
        kernel(dout_rows.type, from, token_row, end - begin);
        if (position_rows)
          kernel(dout_rows.type, from, position_rows + i % sizes.seq * cols + begin, end - begin);
      }
    });
  });
}

}  // namespace polyreme
