#pragma once

#include <variant>

#include "nn/gpt.h"

namespace polyreme {

// The Llama family (Touvron et al. 2023): rotary positions, RMSNorm before each branch, grouped-query
// attention, SwiGLU, no biases.
struct LlamaConfig {
  int64_t layers = 12;
  int64_t hidden = 768;
  int64_t heads = 12;
  int64_t kv_heads = 0;    // 0: heads
  int64_t mlp_hidden = 0;  // 0: 8/3 * hidden, rounded up to a multiple of 64
  int64_t vocab = 32000;
  int64_t seq_len = 1024;  // the longest sequence
  double rope_theta = 10000;
  float norm_eps = 1e-5f;
  double init_std = 0.02;  // the last linear of each branch: init_std / sqrt(2 * layers)
  bool tied = false;       // head and token embedding are one parameter
  Recomputation recompute = Recomputation::kNone;
  Replacer replacer;
  // As in GptConfig.
  DType dtype = DType::kF32;
  DType norm_dtype = DType::kF32;
  DType logits_dtype = DType::kF32;
};

// Throws InvalidArgument, naming field, value and rule.
Model build_llama(const LlamaConfig& config, const TensorLanes& lanes = {});

// Of any family.
using ModelConfig = std::variant<GptConfig, LlamaConfig>;
Model build_model(const ModelConfig& config, const TensorLanes& lanes = {});

}  // namespace polyreme
