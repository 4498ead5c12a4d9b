#include "nn/layers.h"

#include "nn/parallel_layers.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

int64_t bytes_of(DType dtype, int64_t elements) { return static_cast<int64_t>(dtype_size(dtype)) * elements; }

Tensor new_activation(const Context& context, DType dtype, const Shape& shape, const char* label) {
  return empty(context.stream.device(), dtype, shape, label);
}

ParamSpec spec_of(const std::string& name, Shape shape, DType dtype, ParamInit init) {
  ParamSpec spec;
  spec.name = name;
  spec.shape = shape;
  spec.dtype = dtype;
  spec.weight_decay = shape.size() >= 2;
  spec.init = init;
  return spec;
}

// Of a parameter that every rank of tp holds whole: under sequence parallelism a rank sees only its
// share of the tokens.
void sum_over_tp(ParamSpec& spec) { spec.grad_reductions.push_back({"tp", GradReduction::kLaneSum}); }

}  // namespace

// ---- Embedding ----

Embedding::Embedding(ParamRegistry& registry, int64_t vocab, int64_t max_seq_len, int64_t features,
                     double init_std, DType dtype)
    : features_(features),
      parameters_((vocab + max_seq_len) * features),
      dtype_(dtype),
      has_positions_(max_seq_len > 0) {
  const ParamInit init{ParamInit::Kind::kNormal, init_std};
  ParamSpec tokens = spec_of("wte.weight", {vocab, features}, dtype, init);
  tokens.cuts = {{.dim = 0, .axis = "tp"}};
  tokens_ = registry.declare(std::move(tokens));
  if (!has_positions_) return;
  ParamSpec positions = spec_of("wpe.weight", {max_seq_len, features}, dtype, init);
  sum_over_tp(positions);
  positions_ = registry.declare(std::move(positions));
}

Tensor Embedding::forward(const Context& context, const Tensor&, Saved*) const {
  const MicroBatch& batch = context.batch;
  const Tensor out =
      new_activation(context, dtype_, {batch.num_samples(), batch.seq_len(), features_}, "embedding");
  embedding_forward(context.stream, batch.tokens, context.weight(tokens_),
                    has_positions_ ? context.weight(positions_) : Tensor(), out);
  return out.view({batch.num_samples() * batch.seq_len(), features_});
}

Tensor Embedding::backward_input(const Context&, const Tensor& dy, Saved& saved) const {
  saved.tensors = {dy};
  return {};
}

void Embedding::backward_weight(const Context& context, Saved& saved) const {
  const bool positions_learn = has_positions_ && context.params.is_trainable(positions_);
  if (!context.params.is_trainable(tokens_) && !positions_learn) return;
  const MicroBatch& batch = context.batch;
  embedding_backward(context.stream, batch.tokens,
                     saved.tensors[0].view({batch.num_samples(), batch.seq_len(), features_}),
                     context.grad(tokens_), has_positions_ ? context.grad(positions_) : Tensor());
}

Cost Embedding::cost(int64_t num_samples, int64_t seq_len) const {
  const int64_t elements = num_samples * seq_len * features_;
  return {.bytes_moved = 3 * bytes_of(dtype_, elements), .parameter_bytes = bytes_of(dtype_, parameters_)};
}

// ---- Linear ----

Linear::Linear(ParamRegistry& registry, const std::string& name, int64_t in, int64_t out,
               const LinearOptions& options)
    : in_(options.cut == LinearCut::kRow ? in / options.lanes : in),
      out_(options.cut == LinearCut::kColumn ? out / options.lanes : out),
      dtype_(options.dtype),
      out_dtype_(options.lanes > 1 && options.cut == LinearCut::kRow ? DType::kF32 : options.out_dtype),
      grad_dtype_(options.lanes > 1 && options.cut == LinearCut::kColumn ? DType::kF32 : options.dtype),
      bias_(options.bias),
      bias_of_sum_(options.bias && options.lanes > 1 && options.cut == LinearCut::kRow),
      owns_weight_(options.tied_to.empty()) {
  std::vector<Cut> weight_cuts, bias_cuts;
  if (options.cut == LinearCut::kColumn) {
    weight_cuts = {{.dim = 0, .axis = "tp", .blocks = options.cut_blocks}};
    bias_cuts = weight_cuts;
  } else if (options.cut == LinearCut::kRow) {
    weight_cuts = {{.dim = 1, .axis = "tp", .blocks = options.cut_blocks}};
  }
  if (owns_weight_) {
    ParamSpec weight =
        spec_of(name + ".weight", {out, in}, dtype_, {ParamInit::Kind::kNormal, options.init_std});
    weight.cuts = weight_cuts;
    weight_ = registry.declare(std::move(weight));
  } else {
    weight_ = registry.declare_use(options.tied_to);
    const ParamSpec& tied = registry.specs()[static_cast<size_t>(weight_.param)];
    const Shape& shape = tied.shape;
    require(tied.dtype == dtype_, "layer '", name, "' computes in ", dtype_name(dtype_), ", but '",
            options.tied_to, "' is ", dtype_name(tied.dtype));
    require(shape == Shape{out, in}, "layer '", name, "' needs a weight of ", Shape{out, in}.to_string(),
            ", but '", options.tied_to, "' has ", shape.to_string());
  }
  if (bias_) {
    bias_ = !bias_of_sum_;
    ParamSpec bias = spec_of(name + ".bias", {out}, dtype_, {});
    bias.cuts = bias_cuts;
    if (options.cut == LinearCut::kRow) sum_over_tp(bias);
    bias_use_ = registry.declare(std::move(bias));
  }
}

Tensor Linear::forward(const Context& context, const Tensor& x, Saved* saved) const {
  if (saved) saved->tensors = {x};
  const Tensor y = new_activation(context, out_dtype_, {x.size(0), out_}, "linear");
  gemm(context.stream, x, context.weight(weight_).transpose(0, 1), y, /*accumulate=*/false,
       bias_ ? context.weight(bias_use_) : Tensor());
  return y;
}

Tensor Linear::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  saved.tensors.push_back(dy);
  const Tensor dx = new_activation(context, grad_dtype_, {dy.size(0), in_}, "linear grad");
  gemm(context.stream, dy, context.weight(weight_), dx, /*accumulate=*/false);
  return dx;
}

void Linear::backward_weight(const Context& context, Saved& saved) const {
  const Tensor& x = saved.tensors[0];
  const Tensor& dy = saved.tensors[1];
  if (context.params.is_trainable(weight_)) {
    bool adds = true;
    const Tensor grad = context.grad_to_write(weight_, &adds);
    gemm(context.stream, dy.transpose(0, 1), x, grad, /*accumulate=*/adds, {},
         /*k_unit=*/context.batch.seq_len());
  }
  if (bias_ && context.params.is_trainable(bias_use_))
    accumulate_rows(context.stream, dy, context.grad(bias_use_));
}

Cost Linear::cost(int64_t num_samples, int64_t seq_len) const {
  const int64_t rows = num_samples * seq_len;
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(in_) * static_cast<double>(out_);
  return {.forward_flops = flops,
          .backward_input_flops = flops,
          .backward_weight_flops = flops,
          .bytes_moved = bytes_of(dtype_, rows * in_ + in_ * out_) + bytes_of(out_dtype_, rows * out_),
          .parameter_bytes = bytes_of(dtype_, (owns_weight_ ? in_ * out_ : 0) + (bias_ ? out_ : 0)),
          .saved_bytes = bytes_of(dtype_, rows * in_)};
}

// ---- LayerNorm ----

LayerNorm::LayerNorm(ParamRegistry& registry, const std::string& name, int64_t features, float eps,
                     DType dtype, DType param_dtype)
    : features_(features), eps_(eps), dtype_(dtype), param_dtype_(param_dtype) {
  ParamSpec gamma = spec_of(name + ".weight", {features}, param_dtype, {ParamInit::Kind::kOnes});
  ParamSpec beta = spec_of(name + ".bias", {features}, param_dtype, {});
  sum_over_tp(gamma);
  sum_over_tp(beta);
  gamma_ = registry.declare(std::move(gamma));
  beta_ = registry.declare(std::move(beta));
}

Tensor LayerNorm::forward(const Context& context, const Tensor& x, Saved* saved) const {
  const Tensor y = new_activation(context, dtype_, x.shape(), "layer_norm");
  const Tensor mean = new_activation(context, DType::kF32, {x.size(0)}, "layer_norm mean");
  const Tensor rstd = new_activation(context, DType::kF32, {x.size(0)}, "layer_norm rstd");
  layer_norm_forward(context.stream, x, context.weight(gamma_), context.weight(beta_), eps_, y, mean, rstd);
  if (saved) saved->tensors = {x, mean, rstd};
  return y;
}

Tensor LayerNorm::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  const Tensor dx = new_activation(context, dtype_, dy.shape(), "layer_norm grad");
  layer_norm_backward_input(context.stream, dy, saved.tensors[0], context.weight(gamma_), saved.tensors[1],
                            saved.tensors[2], dx);
  saved.tensors.push_back(dy);
  return dx;
}

void LayerNorm::backward_weight(const Context& context, Saved& saved) const {
  if (!context.params.is_trainable(gamma_) && !context.params.is_trainable(beta_)) return;
  for_token_lanes(context, [&](const Context& lane, int64_t begin, int64_t end) {
    const auto rows = [&](size_t i) { return saved.tensors[i].slice(0, begin, end); };
    layer_norm_backward_weight(lane.stream, rows(3), rows(0), rows(1), rows(2), lane.grad(gamma_),
                               lane.grad(beta_));
  });
}

Cost LayerNorm::cost(int64_t num_samples, int64_t seq_len) const {
  const int64_t rows = num_samples * seq_len;
  return {.bytes_moved = 2 * bytes_of(dtype_, rows * features_),
          .parameter_bytes = 2 * bytes_of(param_dtype_, features_),
          .saved_bytes = bytes_of(dtype_, rows * features_) + bytes_of(DType::kF32, 2 * rows)};
}

// ---- CausalAttention ----

Tensor CausalAttention::forward(const Context& context, const Tensor& x, Saved* saved) const {
  const int64_t samples = context.batch.num_samples(), seq = context.batch.seq_len();
  const Tensor qkv = x.view({samples, seq, 3, heads_, features_ / heads_});
  const Tensor out = new_activation(context, dtype_, {samples, seq, heads_, features_ / heads_}, "attention");
  const Tensor log_sum_exp =
      new_activation(context, DType::kF32, {samples, heads_, seq}, "attention log_sum_exp");
  attention_forward(context.stream, qkv, out, log_sum_exp);
  if (saved) saved->tensors = {qkv, out, log_sum_exp};
  return out.view({samples * seq, features_});
}

Tensor CausalAttention::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  const Tensor& qkv = saved.tensors[0];
  const Tensor& out = saved.tensors[1];
  const Tensor dqkv = new_activation(context, dtype_, qkv.shape(), "attention grad");
  attention_backward(context.stream, qkv, out, saved.tensors[2], dy.view(out.shape()), dqkv);
  return dqkv.view({dy.size(0), 3 * features_});
}

Cost CausalAttention::cost(int64_t num_samples, int64_t seq_len) const {
  const int64_t rows = num_samples * seq_len;
  // Two products over the (query, key) pairs that a query sees; five in backward, one of them a recompute.
  const double pairs = 0.5 * static_cast<double>(rows) * static_cast<double>(seq_len + 1);
  const double product = 2 * pairs * static_cast<double>(features_);
  return {.forward_flops = 2 * product,
          .backward_input_flops = 5 * product,
          .bytes_moved = 4 * bytes_of(dtype_, rows * features_),
          .saved_bytes = 3 * bytes_of(dtype_, rows * features_) + bytes_of(DType::kF32, rows * heads_)};
}

// ---- Gelu ----

Tensor Gelu::forward(const Context& context, const Tensor& x, Saved* saved) const {
  if (saved) saved->tensors = {x};
  const Tensor y = new_activation(context, dtype_, x.shape(), "gelu");
  gelu_forward(context.stream, x, y);
  return y;
}

Tensor Gelu::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  const Tensor dx = new_activation(context, dtype_, dy.shape(), "gelu grad");
  gelu_backward(context.stream, saved.tensors[0], dy, dx);
  return dx;
}

Cost Gelu::cost(int64_t num_samples, int64_t seq_len) const {
  const int64_t bytes = bytes_of(dtype_, num_samples * seq_len * features_);
  return {.bytes_moved = 2 * bytes, .saved_bytes = bytes};
}

// ---- Dropout ----

Tensor Dropout::apply(const Context& context, const Tensor& x) const {
  if (p_ == 0 || !context.training) return x;
  const Tensor y = new_activation(context, dtype_, x.shape(), "dropout");
  const RandomKey key{context.seed, RandomPurpose::kDropout, stream_, context.step};
  const int64_t seq = context.batch.seq_len(), own = context.own_tokens(),
                samples = context.batch.num_samples();
  const int64_t first = context.batch.first_sample * seq;
  if (own == seq) {
    dropout(context.stream, x, y, p_, key, first * features_);
    return y;
  }
  for (int64_t i = 0; i < samples; ++i) {
    const auto rows = [&](const Tensor& t) { return t.slice(0, i * own, (i + 1) * own); };
    dropout(context.stream, rows(x), rows(y), p_, key,
            (first + i * seq + context.tp->first_token(seq)) * features_);
  }
  return y;
}

Tensor Dropout::forward(const Context& context, const Tensor& x, Saved*) const { return apply(context, x); }

Tensor Dropout::backward_input(const Context& context, const Tensor& dy, Saved&) const {
  return apply(context, dy);
}

Cost Dropout::cost(int64_t num_samples, int64_t seq_len) const {
  return {.bytes_moved = p_ == 0 ? 0 : 2 * bytes_of(dtype_, num_samples * seq_len * features_)};
}

// ---- CrossEntropy ----

Tensor CrossEntropy::forward(const Context& context, const Tensor& x, Saved* saved) const {
  const Tensor loss = new_activation(context, DType::kF32, {x.size(0)}, "loss");
  const Tensor log_sum_exp = new_activation(context, DType::kF32, {x.size(0)}, "loss log_sum_exp");
  const Tensor targets = context.batch.targets.view({x.size(0)});
  cross_entropy_forward(context.stream, x, targets, loss, log_sum_exp);
  if (saved) saved->tensors = {x, targets, log_sum_exp};
  return loss;
}

Tensor CrossEntropy::backward_input(const Context& context, const Tensor&, Saved& saved) const {
  cross_entropy_backward(context.stream, saved.tensors[0], saved.tensors[1], saved.tensors[2],
                         context.loss_scale);
  return saved.tensors[0];
}

Cost CrossEntropy::cost(int64_t num_samples, int64_t seq_len) const {
  const int64_t rows = num_samples * seq_len;
  const int64_t bytes = bytes_of(dtype_, rows * vocab_);
  return {.bytes_moved = bytes, .saved_bytes = bytes + bytes_of(DType::kF32, rows)};
}

}  // namespace polyreme
