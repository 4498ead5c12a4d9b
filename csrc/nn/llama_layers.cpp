#include "nn/llama_layers.h"

#include "nn/parallel_layers.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

int64_t bytes_of(DType dtype, int64_t elements) { return static_cast<int64_t>(dtype_size(dtype)) * elements; }

Tensor new_activation(const Context& context, DType dtype, const Shape& shape, const char* label) {
  return empty(context.stream.device(), dtype, shape, label);
}

}  // namespace

// ---- RmsNorm ----

RmsNorm::RmsNorm(ParamRegistry& registry, const std::string& name, int64_t features, float eps, DType dtype,
                 DType param_dtype)
    : features_(features), eps_(eps), dtype_(dtype), param_dtype_(param_dtype) {
  ParamSpec gamma;
  gamma.name = name + ".weight";
  gamma.shape = {features};
  gamma.dtype = param_dtype;
  gamma.weight_decay = false;
  gamma.init = {ParamInit::Kind::kOnes};
  // Under sequence parallelism a rank of tp sees only its share of the tokens.
  gamma.grad_reductions.push_back({"tp", GradReduction::kLaneSum});
  gamma_ = registry.declare(std::move(gamma));
}

Tensor RmsNorm::forward(const Context& context, const Tensor& x, Saved* saved) const {
  const Tensor y = new_activation(context, dtype_, x.shape(), "rms_norm");
  const Tensor rstd = new_activation(context, DType::kF32, {x.size(0)}, "rms_norm rstd");
  rms_norm_forward(context.stream, x, context.weight(gamma_), eps_, y, rstd);
  if (saved) saved->tensors = {x, rstd};
  return y;
}

Tensor RmsNorm::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  const Tensor dx = new_activation(context, dtype_, dy.shape(), "rms_norm grad");
  rms_norm_backward_input(context.stream, dy, saved.tensors[0], context.weight(gamma_), saved.tensors[1], dx);
  saved.tensors.push_back(dy);
  return dx;
}

void RmsNorm::backward_weight(const Context& context, Saved& saved) const {
  if (!context.params.is_trainable(gamma_)) return;
  for_token_lanes(context, [&](const Context& lane, int64_t begin, int64_t end) {
    const auto rows = [&](size_t i) { return saved.tensors[i].slice(0, begin, end); };
    rms_norm_backward_weight(lane.stream, rows(2), rows(0), rows(1), lane.grad(gamma_));
  });
}

Cost RmsNorm::cost(int64_t num_samples, int64_t seq_len) const {
  const int64_t rows = num_samples * seq_len;
  return {.bytes_moved = 2 * bytes_of(dtype_, rows * features_),
          .parameter_bytes = bytes_of(param_dtype_, features_),
          .saved_bytes = bytes_of(dtype_, rows * features_) + bytes_of(DType::kF32, rows)};
}

// ---- SwiGlu ----

Tensor SwiGlu::forward(const Context& context, const Tensor& x, Saved* saved) const {
  if (saved) saved->tensors = {x};
  const Tensor y = new_activation(context, dtype_, {x.size(0), features_}, "swiglu");
  swiglu_forward(context.stream, x, y);
  return y;
}

Tensor SwiGlu::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  const Tensor& x = saved.tensors[0];
  const Tensor dx = new_activation(context, dtype_, x.shape(), "swiglu grad");
  swiglu_backward(context.stream, x, dy, dx);
  return dx;
}

Cost SwiGlu::cost(int64_t num_samples, int64_t seq_len) const {
  const int64_t bytes = bytes_of(dtype_, num_samples * seq_len * features_);
  return {.bytes_moved = 3 * bytes, .saved_bytes = 2 * bytes};
}

// ---- GroupedAttention ----

Tensor GroupedAttention::by_group(const Context& context, const Tensor& rows) const {
  return rows.view({context.batch.num_samples(), context.batch.seq_len(), options_.kv_heads,
                    options_.heads / options_.kv_heads + 2, options_.head_dim});
}

Tensor GroupedAttention::forward(const Context& context, const Tensor& x, Saved* saved) const {
  const auto [heads, kv_heads, head_dim, theta, dtype] = options_;
  const int64_t samples = context.batch.num_samples(), seq = context.batch.seq_len();
  const Tensor turned = new_activation(context, dtype, x.shape(), "rotary");
  rotary(context.stream, by_group(context, x), by_group(context, turned), heads / kv_heads + 1, theta);
  const Tensor qkv = turned.view({samples, seq, qkv_heads(), head_dim});
  const Tensor out = new_activation(context, dtype, {samples, seq, heads, head_dim}, "attention");
  const Tensor log_sum_exp =
      new_activation(context, DType::kF32, {samples, heads, seq}, "attention log_sum_exp");
  attention_forward(context.stream, qkv, out, log_sum_exp);
  if (saved) saved->tensors = {qkv, out, log_sum_exp};
  return out.view({samples * seq, heads * head_dim});
}

Tensor GroupedAttention::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  const Tensor& qkv = saved.tensors[0];
  const Tensor& out = saved.tensors[1];
  const Tensor dqkv = new_activation(context, options_.dtype, qkv.shape(), "attention grad");
  attention_backward(context.stream, qkv, out, saved.tensors[2], dy.view(out.shape()), dqkv);
  const Tensor dx = dqkv.view({dy.size(0), qkv_heads() * options_.head_dim});
  const Tensor turned = by_group(context, dx);
  rotary(context.stream, turned, turned, options_.heads / options_.kv_heads + 1, options_.rope_theta,
         /*inverse=*/true);
  return dx;
}

Cost GroupedAttention::cost(int64_t num_samples, int64_t seq_len) const {
  const int64_t rows = num_samples * seq_len, features = options_.heads * options_.head_dim;
  const int64_t qkv_features = qkv_heads() * options_.head_dim;
  // Two products over the (query, key) pairs that a query sees; five in backward, one of them a recompute.
  const double pairs = 0.5 * static_cast<double>(rows) * static_cast<double>(seq_len + 1);
  const double product = 2 * pairs * static_cast<double>(features);
  return {.forward_flops = 2 * product,
          .backward_input_flops = 5 * product,
          .bytes_moved = bytes_of(options_.dtype, rows * (3 * qkv_features + features)),
          .saved_bytes =
              bytes_of(options_.dtype, rows * qkv_features) + bytes_of(DType::kF32, rows * options_.heads)};
}

}  // namespace polyreme
