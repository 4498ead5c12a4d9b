#pragma once

#include <string>

#include "nn/layer.h"

// The layers that the Llama family has besides those of layers.h, with the same conventions.

namespace polyreme {

// y = x / sqrt(average of x^2 + eps) * gamma (Zhang & Sennrich 2019).
class RmsNorm final : public Layer {
 public:
  RmsNorm(ParamRegistry& registry, const std::string& name, int64_t features, float eps,
          DType dtype = DType::kF32, DType param_dtype = DType::kF32);
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  void backward_weight(const Context& context, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  int64_t features_;
  float eps_;
  DType dtype_, param_dtype_;
  ParamUse gamma_;
};

// [rows, 2 features] (gate | up) to [rows, features]: silu(gate) * up (Shazeer 2020). No parameters.
class SwiGlu final : public Layer {
 public:
  explicit SwiGlu(int64_t features, DType dtype = DType::kF32) : features_(features), dtype_(dtype) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  int64_t features_;
  DType dtype_;
};

struct GroupedAttentionOptions {
  int64_t heads = 1, kv_heads = 1;  // kv_heads divides heads
  int64_t head_dim = 2;             // even
  double rope_theta = 10000;
  DType dtype = DType::kF32;
};

// Causal attention whose keys and values serve heads / kv_heads query heads each (Ainslie et al. 2023), with
// rotary positions (Su et al. 2021): [rows, (heads + 2 kv_heads) * head_dim] to [rows, heads * head_dim]. A
// row is, for each key and value head, its query heads, the key, the value: so a cut of the kv_heads cuts all
// three alike. No parameters.
class GroupedAttention final : public Layer {
 public:
  explicit GroupedAttention(const GroupedAttentionOptions& options) : options_(options) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  int64_t qkv_heads() const { return options_.heads + 2 * options_.kv_heads; }
  // [samples, seq, kv_heads, group + 2, head_dim]
  Tensor by_group(const Context& context, const Tensor& rows) const;

  GroupedAttentionOptions options_;
};

}  // namespace polyreme
