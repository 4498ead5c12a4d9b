#pragma once

#include <string>

#include "nn/layer.h"

// The primitive layers. Activations are [rows, features], rows = num_samples * seq_len, stored as fp32, bf16
// or fp16: a layer's output has the dtype of its input, Embedding's and Linear's the one that they are told.
// Statistics, softmax and gradients of parameters are fp32 in all of them. `dtype` below is that of the
// input.

namespace polyreme {

// A token embedding, plus a learned position embedding unless max_seq_len is 0; reads context.batch.tokens,
// not x.
class Embedding final : public Layer {
 public:
  Embedding(ParamRegistry& registry, int64_t vocab, int64_t max_seq_len, int64_t features, double init_std,
            DType dtype = DType::kF32);
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  void backward_weight(const Context& context, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  int64_t features_, parameters_;
  DType dtype_;  // of both tables and the output
  bool has_positions_;
  ParamUse tokens_, positions_;
};

// How tensor parallelism may cut a linear layer; recorded in the ParamSpecs.
enum class LinearCut { kNone, kColumn, kRow };

struct LinearOptions {
  bool bias = true;
  double init_std = 0.02;
  LinearCut cut = LinearCut::kNone;
  int64_t cut_blocks = 1;         // see Cut::blocks
  DType dtype = DType::kF32;      // of input, weight and bias
  DType out_dtype = DType::kF32;  // of the output
  std::string tied_to;            // use this parameter [out, in] as the weight instead of a new one
  // Above 1: the layer computes with one lane's part of the sizes. What is then a sum over lanes is fp32: a
  // column's gradient of the input, a row's output, which is without the bias.
  int64_t lanes = 1;
};

// y = x W^T + b with W [out, in].
class Linear final : public Layer {
 public:
  Linear(ParamRegistry& registry, const std::string& name, int64_t in, int64_t out,
         const LinearOptions& options);
  // Of a row-parallel layer with several lanes, for the sum's owner to add; null without one.
  const ParamUse* row_bias() const { return bias_of_sum_ ? &bias_use_ : nullptr; }
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  void backward_weight(const Context& context, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  int64_t in_, out_;
  DType dtype_, out_dtype_, grad_dtype_;
  bool bias_, bias_of_sum_, owns_weight_;
  ParamUse weight_, bias_use_;
};

class LayerNorm final : public Layer {
 public:
  LayerNorm(ParamRegistry& registry, const std::string& name, int64_t features, float eps,
            DType dtype = DType::kF32, DType param_dtype = DType::kF32);
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  void backward_weight(const Context& context, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  int64_t features_;
  float eps_;
  DType dtype_, param_dtype_;
  ParamUse gamma_, beta_;
};

// Causal attention over heads: [rows, 3 * features] (q | k | v) to [rows, features]. No parameters.
class CausalAttention final : public Layer {
 public:
  CausalAttention(int64_t features, int64_t heads, DType dtype = DType::kF32)
      : features_(features), heads_(heads), dtype_(dtype) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  int64_t features_, heads_;
  DType dtype_;
};

class Gelu final : public Layer {
 public:
  explicit Gelu(int64_t features, DType dtype = DType::kF32) : features_(features), dtype_(dtype) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  int64_t features_;
  DType dtype_;
};

// Identity outside training. `stream` tells the dropout layers of a model apart.
class Dropout final : public Layer {
 public:
  Dropout(int64_t features, float p, uint32_t stream, DType dtype = DType::kF32)
      : features_(features), p_(p), stream_(stream), dtype_(dtype) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  Tensor apply(const Context& context, const Tensor& x) const;

  int64_t features_;
  float p_;
  uint32_t stream_;
  DType dtype_;
};

// Logits [rows, vocab] to the loss of every token [rows]; 0 where the target is kIgnoreIndex.
// Its backward_input takes no dy: the loss is the end. It overwrites the logits with their gradient.
class CrossEntropy final : public Layer {
 public:
  explicit CrossEntropy(int64_t vocab, DType dtype = DType::kF32) : vocab_(vocab), dtype_(dtype) {}
  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override;
  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override;
  Cost cost(int64_t num_samples, int64_t seq_len) const override;

 private:
  int64_t vocab_;
  DType dtype_;
};

}  // namespace polyreme
