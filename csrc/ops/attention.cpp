#include <cmath>

#include "ops/check.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/kernels/attention.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

struct Sizes {
  int64_t batch, seq, heads, head_dim;
  int64_t row() const { return heads * head_dim; }  // floats of one token in q, k, v or out
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  // Two operations per multiply-add and (query, key) pair that attention sees.
  double flops(int num_products) const {
    const double pairs = 0.5 * static_cast<double>(seq) * static_cast<double>(seq + 1);
    return 2.0 * num_products * pairs * static_cast<double>(head_dim) * static_cast<double>(batch * heads);
  }
};

Sizes check_shapes(const char* op, const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp) {
  check_float_rows({op, "qkv"}, qkv, 5);
  require(qkv.size(2) == 3, op, ": qkv: expected [batch, seq, 3, heads, head_dim], got ", qkv.to_string());
  const Sizes sizes{qkv.size(0), qkv.size(1), qkv.size(3), qkv.size(4)};
  check_dense({op, "out"}, out, {sizes.batch, sizes.seq, sizes.heads, sizes.head_dim}, qkv.dtype());
  check_dense({op, "log_sum_exp"}, log_sum_exp, {sizes.batch, sizes.heads, sizes.seq});
  return sizes;
}

// Calls body(sample, head, scratch) for every head of every sample, each with `scratch_floats` of its own.
template <typename Body>
void for_heads(ThreadPool& pool, const Sizes& sizes, int64_t scratch_floats, Body&& body) {
  const size_t scratch_bytes = static_cast<size_t>(scratch_floats) * sizeof(float);
  parallel_for(pool, sizes.batch * sizes.heads, [&](int64_t task, int thread) {
    body(task / sizes.heads, task % sizes.heads, static_cast<float*>(pool.scratch(thread, scratch_bytes)));
  });
}

PolyremeAttention attention_args(const Sizes& sizes, const Tensor& qkv, const Tensor& out,
                                 const Tensor& log_sum_exp) {
  return {.qkv = qkv.raw_address(),
          .out = out.raw_address(),
          .log_sum_exp = log_sum_exp.address<float>(),
          .dout = nullptr,
          .dqkv = nullptr,
          .batch = sizes.batch,
          .seq = sizes.seq,
          .heads = sizes.heads,
          .head_dim = sizes.head_dim,
          .scale = sizes.scale(),
          .dtype = dtype_code(qkv)};
}

}  // namespace

void attention_forward(Stream& stream, const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp) {
  const char* op = "attention_forward";
  const Sizes sizes = check_shapes(op, qkv, out, log_sum_exp);
  check_apart({op, "out"}, out, qkv);
  check_apart({op, "log_sum_exp"}, log_sum_exp, qkv);
  check_apart({op, "log_sum_exp"}, log_sum_exp, out);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, op, {qkv, out, log_sum_exp}, &PolyremeCudaTable::attention_forward,
                  attention_args(sizes, qkv, out, log_sum_exp));
  // S and O: two products.
  as_cpu(stream).enqueue(
      {op, OpKind::kAttention, sizes.flops(2)}, {reads(qkv), writes(out), writes(log_sum_exp)},
      [=, type = element_of(qkv)](const CpuContext& context) {
        const auto kernel =
            pick(context.isa, cpu::avx2::attention_forward_head, cpu::avx512::attention_forward_head);
        const auto scratch_size =
            pick(context.isa, cpu::avx2::attention_forward_scratch, cpu::avx512::attention_forward_scratch);
        const int64_t row = sizes.row();
        const int64_t scratch_floats = scratch_size(sizes.seq, sizes.head_dim);
        for_heads(context.pool, sizes, scratch_floats, [&](int64_t sample, int64_t head, float* scratch) {
          const int64_t first = sample * sizes.seq, column = head * sizes.head_dim;
          const ElementPointer q{ElementPointer(qkv) + (first * 3 * row + column), type};
          const cpu::AttentionForwardHead args{
              .type = type,
              .q = q.data,
              .k = q + row,
              .v = q + 2 * row,
              .out = ElementPointer(out) + (first * row + column),
              .log_sum_exp = log_sum_exp.address<float>() + (sample * sizes.heads + head) * sizes.seq,
              .qkv_stride = 3 * row,
              .out_stride = row,
              .seq = sizes.seq,
              .head_dim = sizes.head_dim,
              .scale = sizes.scale(),
          };
          kernel(&args, scratch);
        });
      });
}

void attention_backward(Stream& stream, const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp,
                        const Tensor& dout, const Tensor& dqkv) {
  const char* op = "attention_backward";
  const Sizes sizes = check_shapes(op, qkv, out, log_sum_exp);
  check_dense({op, "dout"}, dout, out.shape(), qkv.dtype());
  check_dense({op, "dqkv"}, dqkv, qkv.shape(), qkv.dtype());
  for (const Tensor* in : {&qkv, &out, &log_sum_exp, &dout}) check_apart({op, "dqkv"}, dqkv, *in);
  if (CudaStream* const gpu = gpu_stream(stream)) {
    PolyremeAttention args = attention_args(sizes, qkv, out, log_sum_exp);
    args.dout = dout.raw_address();
    args.dqkv = dqkv.raw_address();
    return launch(*gpu, op, {qkv, out, log_sum_exp, dout, dqkv}, &PolyremeCudaTable::attention_backward,
                  args);
  }
  // S, dP, dV, dQ and dK: five products.
  as_cpu(stream).enqueue(
      {op, OpKind::kAttention, sizes.flops(5)},
      {reads(qkv), reads(out), reads(log_sum_exp), reads(dout), writes(dqkv)},
      [=, type = element_of(qkv)](const CpuContext& context) {
        const auto kernel =
            pick(context.isa, cpu::avx2::attention_backward_head, cpu::avx512::attention_backward_head);
        const auto scratch_size =
            pick(context.isa, cpu::avx2::attention_backward_scratch, cpu::avx512::attention_backward_scratch);
        const int64_t row = sizes.row();
        const int64_t scratch_floats = scratch_size(sizes.seq, sizes.head_dim);
        for_heads(context.pool, sizes, scratch_floats, [&](int64_t sample, int64_t head, float* scratch) {
          const int64_t first = sample * sizes.seq, column = head * sizes.head_dim;
          const ElementPointer q{ElementPointer(qkv) + (first * 3 * row + column), type};
          const ElementPointer dq{ElementPointer(dqkv) + (first * 3 * row + column), type};
          const cpu::AttentionBackwardHead args{
              .type = type,
              .q = q.data,
              .k = q + row,
              .v = q + 2 * row,
              .out = ElementPointer(out) + (first * row + column),
              .log_sum_exp = log_sum_exp.address<float>() + (sample * sizes.heads + head) * sizes.seq,
              .dout = ElementPointer(dout) + (first * row + column),
              .dq = dq.data,
              .dk = dq + row,
              .dv = dq + 2 * row,
              .qkv_stride = 3 * row,
              .out_stride = row,
              .seq = sizes.seq,
              .head_dim = sizes.head_dim,
              .scale = sizes.scale(),
          };
          kernel(&args, scratch);
        });
      });
}

}  // namespace polyreme
