#pragma once

#include <functional>
#include <optional>

#include "nn/layers.h"

// The layers in which the lanes of tensor parallelism meet, see TensorParallel. Between them activations are
// [samples * own tokens, features]: what every sample has of the rank's lanes' tokens.

namespace polyreme {

// Calls body(lane's context, first row, end) for every run of rows that belong to the tokens of one of this
// rank's lanes, ascending within a lane: what a sum over tokens is a chain over.
void for_token_lanes(const Context& context,
                     const std::function<void(const Context& lane, int64_t begin, int64_t end)>& body);

struct LaneBranchOptions {
  TensorLanes lanes;
  int64_t features = 1;          // of input and output
  DType dtype = DType::kF32;     // of input and output
  std::optional<ParamUse> bias;  // [features], added to the sum
};

// y = sum over lanes of inner(x) + bias, rounded once: column-parallel to row-parallel layers, such as
// attention or an MLP. `inner` computes one lane: from all tokens in `dtype` to a partial sum of all tokens
// in fp32, and backwards likewise. The gathered input is kept for the gradients of the weights: gathering it
// again would cost a third more traffic.
class LaneBranch final : public Layer {
 public:
  LaneBranch(LayerPtr inner, const LaneBranchOptions& options)
      : inner_(std::move(inner)), options_(options) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  void backward_weight(const Context& context, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t own_tokens) const override;

 private:
  LayerPtr inner_;
  LaneBranchOptions options_;
};

// y = inner(x) of all tokens, computed alike on every rank: a layer that nobody cut, and that may mix tokens.
// Its gradients are those of the first lane; the others have none.
class LaneReplica final : public Layer {
 public:
  LaneReplica(LayerPtr inner, int64_t features, DType dtype, const TensorLanes& lanes)
      : inner_(std::move(inner)), features_(features), dtype_(dtype), lanes_(lanes) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  void backward_weight(const Context& context, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t own_tokens) const override;

 private:
  LayerPtr inner_;
  int64_t features_;
  DType dtype_;
  TensorLanes lanes_;
};

// The token embedding with the vocabulary cut over lanes, plus learned positions unless max_seq_len is 0; see
// Embedding. The vocabulary is padded to a multiple of the lanes.
class LaneEmbedding final : public Layer {
 public:
  LaneEmbedding(ParamRegistry& registry, int64_t vocab, int64_t max_seq_len, int64_t features,
                double init_std, DType dtype, const TensorLanes& lanes);
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  void backward_weight(const Context& context, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t own_tokens) const override;

 private:
  int64_t part_, features_, max_seq_len_;
  DType dtype_;
  TensorLanes lanes_;
  ParamUse tokens_, positions_;
};

struct LaneHeadOptions {
  TensorLanes lanes;
  double init_std = 0.02;
  DType dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  std::string tied_to;  // see LinearOptions
};

// Logits with the vocabulary cut over lanes: [samples * own tokens, features] to [this rank's lanes, samples
// * seq_len, padded vocabulary / lanes]. No bias.
class LaneHead final : public Layer {
 public:
  LaneHead(ParamRegistry& registry, const std::string& name, int64_t features, int64_t vocab,
           const LaneHeadOptions& options);
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  void backward_weight(const Context& context, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t own_tokens) const override;

 private:
  int64_t features_, part_;
  LaneHeadOptions options_;
  bool owns_weight_;
  ParamUse weight_;
};

// CrossEntropy of what LaneHead gives; the logits stay where they are. The loss of every token is known on
// every rank of the axis.
class LaneCrossEntropy final : public Layer {
 public:
  LaneCrossEntropy(int64_t vocab, DType dtype, const TensorLanes& lanes)
      : vocab_(vocab), dtype_(dtype), lanes_(lanes) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t own_tokens) const override;

 private:
  int64_t vocab_;
  DType dtype_;
  TensorLanes lanes_;
};

// The ends of a model, for one lane or several.
LayerPtr build_embedding(ParamRegistry& registry, int64_t vocab, int64_t max_seq_len, int64_t features,
                         double init_std, DType dtype, const TensorLanes& lanes);
LayerPtr build_head(ParamRegistry& registry, const std::string& name, int64_t features, int64_t vocab,
                    const LaneHeadOptions& options);
LayerPtr build_loss(int64_t vocab, DType dtype, const TensorLanes& lanes);

}  // namespace polyreme
