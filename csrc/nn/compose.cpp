#include "nn/compose.h"

#include "base/error.h"
#include "ops/ops.h"

namespace polyreme {

Cost& Cost::operator+=(const Cost& other) {
  forward_flops += other.forward_flops;
  backward_input_flops += other.backward_input_flops;
  backward_weight_flops += other.backward_weight_flops;
  bytes_moved += other.bytes_moved;
  parameter_bytes += other.parameter_bytes;
  saved_bytes += other.saved_bytes;
  comm_bytes += other.comm_bytes;
  return *this;
}

void Layer::backward_weight(const Context&, Saved&) const {}

Tensor Sequential::forward(const Context& context, const Tensor& x, Saved* saved) const {
  if (saved) saved->children.resize(layers_.size());
  Tensor y = x;
  for (size_t i = 0; i < layers_.size(); ++i)
    y = layers_[i]->forward(context, y, saved ? &saved->children[i] : nullptr);
  return y;
}

Tensor Sequential::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  Tensor dx = dy;
  for (size_t i = layers_.size(); i-- > 0;) dx = layers_[i]->backward_input(context, dx, saved.children[i]);
  return dx;
}

void Sequential::backward_weight(const Context& context, Saved& saved) const {
  for (size_t i = layers_.size(); i-- > 0;) layers_[i]->backward_weight(context, saved.children[i]);
}

Cost Sequential::cost(int64_t num_samples, int64_t seq_len) const {
  Cost total;
  for (const LayerPtr& layer : layers_) total += layer->cost(num_samples, seq_len);
  return total;
}

namespace {

Tensor sum(const Context& context, const Tensor& x, const Tensor& y, const char* label) {
  Tensor out = empty(context.stream.device(), x.dtype(), x.shape(), label);
  add(context.stream, x, y, out);
  return out;
}

}  // namespace

Tensor Residual::forward(const Context& context, const Tensor& x, Saved* saved) const {
  if (saved) saved->children.resize(1);
  return sum(context, x, inner_->forward(context, x, saved ? &saved->children[0] : nullptr), "residual");
}

Tensor Residual::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  return sum(context, dy, inner_->backward_input(context, dy, saved.children[0]), "residual grad");
}

void Residual::backward_weight(const Context& context, Saved& saved) const {
  inner_->backward_weight(context, saved.children[0]);
}

Cost Residual::cost(int64_t num_samples, int64_t seq_len) const {
  Cost cost = inner_->cost(num_samples, seq_len);
  cost.bytes_moved += 3 * static_cast<int64_t>(dtype_size(dtype_)) * num_samples * seq_len * features_;
  return cost;
}

Recomputation recompute_from_name(const std::string& name) {
  if (name == "none") return Recomputation::kNone;
  if (name == "blocks") return Recomputation::kBlocks;
  require(name == "attention", "recompute='", name, "'; expected none, blocks or attention");
  return Recomputation::kAttention;
}

Tensor Recompute::forward(const Context& context, const Tensor& x, Saved* saved) const {
  if (saved) saved->tensors = {x};
  return inner_->forward(context, x, nullptr);
}

Tensor Recompute::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  saved.children.resize(1);
  inner_->forward(context, saved.tensors[0], &saved.children[0]);
  return inner_->backward_input(context, dy, saved.children[0]);
}

void Recompute::backward_weight(const Context& context, Saved& saved) const {
  inner_->backward_weight(context, saved.children[0]);
}

Cost Recompute::cost(int64_t num_samples, int64_t seq_len) const {
  Cost cost = inner_->cost(num_samples, seq_len);
  cost.backward_input_flops += cost.forward_flops;
  cost.saved_bytes = static_cast<int64_t>(dtype_size(dtype_)) * num_samples * seq_len * input_features_;
  return cost;
}

}  // namespace polyreme
