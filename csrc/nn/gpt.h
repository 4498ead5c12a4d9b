#pragma once

#include "nn/compose.h"
#include "nn/replace.h"

namespace polyreme {

// The GPT-2 family (Radford et al. 2019): learned positions, pre-LayerNorm blocks, GELU (tanh).
struct GptConfig {
  int64_t layers = 12;
  int64_t hidden = 768;
  int64_t heads = 12;
  int64_t vocab = 50304;
  int64_t seq_len = 1024;  // the longest sequence: size of the position table
  int64_t mlp_hidden = 0;  // 0: 4 * hidden
  float dropout = 0.0f;    // after the embedding and at the end of both branches of a block
  bool tied = true;        // head and token embedding are one parameter
  float layer_norm_eps = 1e-5f;
  double init_std = 0.02;  // the last linear of each branch: init_std / sqrt(2 * layers)
  Recomputation recompute = Recomputation::kNone;
  Replacer replacer;
  // How parameters and activations are stored (fp32, bf16 or fp16); arithmetic is fp32 in any case.
  DType dtype = DType::kF32;
  DType norm_dtype = DType::kF32;    // gamma and beta: `dtype` or fp32
  DType logits_dtype = DType::kF32;  // what the loss reads and its gradient: `dtype` or fp32
};

// A chain of layers from tokens to per-token losses. layers: embedding, blocks, final norm, head, loss.
struct Model {
  std::string description;  // all of its settings; equal texts, equal models
  TensorLanes lanes;        // it was built for
  ParamRegistry registry;
  std::vector<LayerPtr> layers;
  int64_t vocab = 0;
  int64_t max_seq_len = 0;  // with several lanes, a multiple of them
  // Layers before which a pipeline may cut the model, ascending: the blocks, and what follows them. What
  // flows there is [rows, boundary_features] of boundary_dtype, either way.
  std::vector<size_t> cuts;
  int64_t boundary_features = 0;
  DType boundary_dtype = DType::kF32;

  // Of a rank of tp, its share of the arithmetic.
  Cost cost(int64_t num_samples, int64_t seq_len) const;
};

// Throws InvalidArgument, naming field, value and rule. A model for several lanes needs Context::tp.
Model build_gpt(const GptConfig& config, const TensorLanes& lanes = {});

// A size that the lanes of tensor parallelism cut. Throws InvalidArgument, with what would divide it, if they
// do not.
void check_tensor_cut(const char* family, const char* name, int64_t value, const TensorLanes& lanes);

}  // namespace polyreme
