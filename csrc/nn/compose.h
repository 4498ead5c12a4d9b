#pragma once

#include <string>

#include "nn/layer.h"

// Layers made of layers.

namespace polyreme {

// One after the other.
class Sequential final : public Layer {
 public:
  explicit Sequential(std::vector<LayerPtr> layers) : layers_(std::move(layers)) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  void backward_weight(const Context& context, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  std::vector<LayerPtr> layers_;
};

// The layers one after the other.
template <typename... Layers>
LayerPtr sequential(Layers... layers) {
  std::vector<LayerPtr> list;
  (list.push_back(std::move(layers)), ...);
  return std::make_unique<Sequential>(std::move(list));
}

// y = x + inner(x).
class Residual final : public Layer {
 public:
  Residual(LayerPtr inner, int64_t features, DType dtype = DType::kF32)
      : inner_(std::move(inner)), features_(features), dtype_(dtype) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  void backward_weight(const Context& context, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  LayerPtr inner_;
  int64_t features_;
  DType dtype_;
};

// What of a model is computed again in backward instead of being kept.
// kBlocks: all but the input of each block. kAttention: what attention reads and computes, queries, keys and
// values among them (selective recomputation, Korthikanti et al. 2022): the widest activations for their
// arithmetic besides those of the MLP.
enum class Recomputation : uint8_t { kNone, kBlocks, kAttention };
// "none", "blocks", "attention"; throws InvalidArgument for others.
Recomputation recompute_from_name(const std::string& name);

// Keeps only the input and runs inner's forward again in backward: activation checkpointing (Chen
// et al. 2016). Same bits as inner, since nothing in a forward depends on hidden state.
class Recompute final : public Layer {
 public:
  Recompute(LayerPtr inner, int64_t input_features, DType dtype = DType::kF32)
      : inner_(std::move(inner)), input_features_(input_features), dtype_(dtype) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  void backward_weight(const Context& context, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  LayerPtr inner_;
  int64_t input_features_;
  DType dtype_;
};

}  // namespace polyreme
