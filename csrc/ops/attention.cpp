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
  int64_t batch, seq, heads, kv_heads, head_dim;
  bool by_group = false;  // a token of qkv is q ... q k v of each k and v head; else all q, all k, all v
  int64_t group() const { return heads / kv_heads; }  // query heads of one k and v
  // Elements of one token.
  int64_t out_row() const { return heads * head_dim; }
  int64_t qkv_row() const { return (heads + 2 * kv_heads) * head_dim; }
  // Where heads lie in a token of qkv.
  int64_t q_column(int64_t head) const {
    return (by_group ? head / group() * (group() + 2) + head % group() : head) * head_dim;
  }
  int64_t k_column(int64_t kv_head) const {
    return (by_group ? kv_head * (group() + 2) + group() : heads + kv_head) * head_dim;
  }
  int64_t v_column(int64_t kv_head) const { return k_column(kv_head) + (by_group ? 1 : kv_heads) * head_dim; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  // Two operations per multiply-add and (query, key) pair that attention sees.
  double flops(int num_products) const {
    const double pairs = 0.5 * static_cast<double>(seq) * static_cast<double>(seq + 1);
    return 2.0 * num_products * pairs * static_cast<double>(head_dim) * static_cast<double>(batch * heads);
  }
};

Sizes equal_heads(const char* op, const Tensor& qkv) {
  check_float_rows({op, "qkv"}, qkv, 5);
  require(qkv.size(2) == 3, op, ": qkv: expected [batch, seq, 3, heads, head_dim], got ", qkv.to_string());
  return {qkv.size(0), qkv.size(1), qkv.size(3), qkv.size(3), qkv.size(4)};
}

Sizes grouped_heads(const char* op, const Tensor& qkv, const Tensor& out) {
  check_float_rows({op, "qkv"}, qkv, 4);
  const int64_t heads = out.defined() && out.dims() == 4 ? out.size(2) : 0, rest = qkv.size(2) - heads;
  require(heads > 0 && rest > 0 && rest % 2 == 0 && heads % (rest / 2) == 0, op,
          ": qkv: expected [batch, seq, heads + 2 * kv_heads, head_dim], kv_heads dividing heads, with out "
          "[batch, seq, heads, head_dim]; got ",
          qkv.to_string(), " and ", out.defined() ? out.to_string() : "an undefined tensor");
  return {qkv.size(0), qkv.size(1), heads, rest / 2, qkv.size(3), true};
}

Sizes check_shapes(const char* op, const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp) {
  const bool grouped = qkv.defined() && qkv.dims() == 4;
  const Sizes sizes = grouped ? grouped_heads(op, qkv, out) : equal_heads(op, qkv);
  check_dense({op, "out"}, out, {sizes.batch, sizes.seq, sizes.heads, sizes.head_dim}, qkv.dtype());
  check_dense({op, "log_sum_exp"}, log_sum_exp, {sizes.batch, sizes.heads, sizes.seq});
  return sizes;
}

// Calls body(sample, head, scratch) for each of `heads` heads of every sample, each with `scratch_floats` of
// its own.
template <typename Body>
void for_heads(ThreadPool& pool, int64_t batch, int64_t heads, int64_t scratch_floats, Body&& body) {
  const size_t scratch_bytes = static_cast<size_t>(scratch_floats) * sizeof(float);
  parallel_for(pool, batch * heads, [&](int64_t task, int thread) {
    body(task / heads, task % heads, static_cast<float*>(pool.scratch(thread, scratch_bytes)));
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
          .kv_heads = sizes.kv_heads,
          .by_group = sizes.by_group,
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
        const int64_t seq = sizes.seq, heads = sizes.heads, head_dim = sizes.head_dim;
        const int64_t scratch_floats = scratch_size(seq, head_dim);
        for_heads(context.pool, sizes.batch, heads, scratch_floats,
                  [&](int64_t sample, int64_t head, float* scratch) {
                    const int64_t first = sample * seq, kv_head = head / sizes.group();
                    const ElementPointer token{ElementPointer(qkv) + first * sizes.qkv_row(), type};
                    const cpu::AttentionForwardHead args{
                        .type = type,
                        .q = token + sizes.q_column(head),
                        .k = token + sizes.k_column(kv_head),
                        .v = token + sizes.v_column(kv_head),
                        .out = ElementPointer(out) + (first * sizes.out_row() + head * head_dim),
                        .log_sum_exp = log_sum_exp.address<float>() + (sample * heads + head) * seq,
                        .qkv_stride = sizes.qkv_row(),
                        .out_stride = sizes.out_row(),
                        .seq = seq,
                        .head_dim = head_dim,
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
        const int64_t seq = sizes.seq, heads = sizes.heads, head_dim = sizes.head_dim;
        const int64_t scratch_floats = scratch_size(seq, head_dim);
        for_heads(context.pool, sizes.batch, sizes.kv_heads, scratch_floats,
                  [&](int64_t sample, int64_t kv_head, float* scratch) {
                    const int64_t first = sample * seq, head = kv_head * sizes.group();
                    const int64_t first_qkv = first * sizes.qkv_row();
                    const int64_t first_out = first * sizes.out_row() + head * head_dim;
                    const ElementPointer token{ElementPointer(qkv) + first_qkv, type};
                    const ElementPointer dtoken{ElementPointer(dqkv) + first_qkv, type};
                    const int64_t q = sizes.q_column(head), k = sizes.k_column(kv_head),
                                  v = sizes.v_column(kv_head);
                    const cpu::AttentionBackwardHead args{
                        .type = type,
                        .q = token + q,
                        .k = token + k,
                        .v = token + v,
                        .out = ElementPointer(out) + first_out,
                        .log_sum_exp = log_sum_exp.address<float>() + (sample * heads + head) * seq,
                        .dout = ElementPointer(dout) + first_out,
                        .dq = dtoken + q,
                        .dk = dtoken + k,
                        .dv = dtoken + v,
                        .qkv_stride = sizes.qkv_row(),
                        .out_stride = sizes.out_row(),
                        .seq = seq,
                        .head_dim = head_dim,
                        .group = sizes.group(),
                        .scale = sizes.scale(),
                    };
                    kernel(&args, scratch);
                  });
      });
}

}  // namespace polyreme
