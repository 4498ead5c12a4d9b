#include "nn/gpt.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "nn/parallel_layers.h"

namespace polyreme {
namespace {

void validate(const GptConfig& config) {
  // Token ids are int32; the other limits keep every size in bytes inside int64.
  constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMaxWidth = 1 << 20, kMaxLayers = 1 << 16;
  const auto in_range = [](const char* name, int64_t value, int64_t limit) {
    require(value >= 1 && value <= limit, "GPT: ", name, "=", value, "; expected 1 to ", limit);
  };
  const auto finite = [](const char* name, double value) {
    require(value >= 0 && std::isfinite(value), "GPT: ", name, "=", value,
            "; expected a finite number, 0 or more");
  };
  in_range("layers", config.layers, kMaxLayers);
  in_range("hidden", config.hidden, kMaxWidth);
  in_range("heads", config.heads, kMaxWidth);
  in_range("vocab", config.vocab, kMaxTokens);
  in_range("seq_len", config.seq_len, kMaxTokens);
  require(config.mlp_hidden >= 0 && config.mlp_hidden <= kMaxWidth, "GPT: mlp_hidden=", config.mlp_hidden,
          "; expected 0 (4 * hidden), or 1 to ", kMaxWidth);
  require(config.hidden % config.heads == 0, "GPT: hidden=", config.hidden,
          " is not divisible by heads=", config.heads, "; choose heads that divide hidden");
  require(config.dropout >= 0 && config.dropout < 1, "GPT: dropout=", config.dropout,
          "; expected 0 <= dropout < 1");
  finite("layer_norm_eps", config.layer_norm_eps);
  finite("init_std", config.init_std);
  const auto stored = [](const char* name, DType dtype, bool fits, const char* expected) {
    require(fits, "GPT: ", name, "=", dtype_name(dtype), "; expected ", expected);
  };
  const DType dtype = config.dtype;
  stored("dtype", dtype, dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16,
         "float32, bfloat16 or float16");
  const auto dtype_or_f32 = [dtype](DType role) { return role == dtype || role == DType::kF32; };
  stored("norm_dtype", config.norm_dtype, dtype_or_f32(config.norm_dtype), "dtype or float32");
  stored("logits_dtype", config.logits_dtype, dtype_or_f32(config.logits_dtype), "dtype or float32");
}

// A branch of a block between its norm and its dropout. Several lanes: for one of them, with what joins them.
// last: null if it is not native.
LayerPtr join_lanes(LayerPtr inner, const Linear* last, const GptConfig& config, const TensorLanes& lanes) {
  if (lanes.lanes == 1) return inner;
  LaneBranchOptions options{.lanes = lanes, .features = config.hidden, .dtype = config.dtype};
  if (last && last->row_bias()) options.bias = *last->row_bias();
  return std::make_unique<LaneBranch>(std::move(inner), options);
}

LayerPtr build_block(ParamRegistry& registry, const GptConfig& config, const TensorLanes& lanes,
                     int64_t index) {
  const std::string name = concat("h.", index), prefix = name + ".";
  const int64_t hidden = config.hidden;
  if (LayerPtr layer = replaced(config.replacer, registry, {name, hidden, hidden, config.dtype, lanes}))
    return layer;
  const int64_t mlp_hidden = config.mlp_hidden > 0 ? config.mlp_hidden : 4 * hidden;
  const double branch_std = config.init_std / std::sqrt(2.0 * static_cast<double>(config.layers));
  const auto own = [&](const std::string& part, int64_t in, int64_t out, PlaceCut cut) {
    return replaced(config.replacer, registry, {prefix + part, in, out, config.dtype, lanes, cut});
  };
  const auto linear = [&](const char* part, int64_t in, int64_t out,
                          const LinearOptions& options) -> LayerPtr {
    const PlaceCut cut = options.cut == LinearCut::kRow ? PlaceCut::kIn : PlaceCut::kOut;
    if (LayerPtr layer = own(part, in, out, cut)) return layer;
    return std::make_unique<Linear>(registry, prefix + part, in, out, options);
  };
  const auto norm = [&](const char* part) -> LayerPtr {
    if (LayerPtr layer = own(part, hidden, hidden, PlaceCut::kWhole)) return layer;
    return std::make_unique<LayerNorm>(registry, prefix + part, hidden, config.layer_norm_eps, config.dtype,
                                       config.norm_dtype);
  };
  // Dropout stream 0 belongs to the embedding.
  const auto dropout = [&](int64_t branch) {
    return std::make_unique<Dropout>(hidden, config.dropout, static_cast<uint32_t>(1 + 2 * index + branch),
                                     config.dtype);
  };
  const LinearOptions column{.init_std = config.init_std,
                             .cut = LinearCut::kColumn,
                             .dtype = config.dtype,
                             .out_dtype = config.dtype,
                             .lanes = lanes.lanes};
  LinearOptions fused_qkv = column;
  fused_qkv.cut_blocks = 3;
  LinearOptions row = column;
  row.init_std = branch_std;
  row.cut = LinearCut::kRow;

  // Built in order, since parameters are numbered as they are declared.
  auto norm1 = norm("ln_1");
  auto qkv = linear("attn.qkv", hidden, 3 * hidden, fused_qkv);
  LayerPtr attend = own("attn.heads", 3 * hidden, hidden, PlaceCut::kBoth);
  auto attention_out = linear("attn.proj", hidden, hidden, row);
  auto norm2 = norm("ln_2");
  auto up = linear("mlp.fc", hidden, mlp_hidden, column);
  LayerPtr gelu = own("mlp.gelu", mlp_hidden, mlp_hidden, PlaceCut::kBoth);
  auto down = linear("mlp.proj", mlp_hidden, hidden, row);

  const auto* last_of_attention = dynamic_cast<const Linear*>(attention_out.get());
  const auto* last_of_mlp = dynamic_cast<const Linear*>(down.get());
  const int64_t parts = lanes.lanes;
  if (!attend) attend = std::make_unique<CausalAttention>(hidden / parts, config.heads / parts, config.dtype);
  if (!gelu) gelu = std::make_unique<Gelu>(mlp_hidden / parts, config.dtype);
  LayerPtr heads = sequential(std::move(qkv), std::move(attend));
  if (config.recompute == Recomputation::kAttention)
    heads = std::make_unique<Recompute>(std::move(heads), hidden, config.dtype);
  LayerPtr all_heads =
      join_lanes(sequential(std::move(heads), std::move(attention_out)), last_of_attention, config, lanes);
  LayerPtr neurons =
      join_lanes(sequential(std::move(up), std::move(gelu), std::move(down)), last_of_mlp, config, lanes);
  LayerPtr attention = sequential(std::move(norm1), std::move(all_heads), dropout(0));
  LayerPtr mlp = sequential(std::move(norm2), std::move(neurons), dropout(1));
  LayerPtr block = sequential(std::make_unique<Residual>(std::move(attention), hidden, config.dtype),
                              std::make_unique<Residual>(std::move(mlp), hidden, config.dtype));
  if (config.recompute == Recomputation::kBlocks)
    block = std::make_unique<Recompute>(std::move(block), hidden, config.dtype);
  return block;
}

void check_lanes_of(const GptConfig& config, const TensorLanes& lanes) {
  check_tensor_cut("GPT", "heads", config.heads, lanes);
  check_tensor_cut("GPT", "mlp_hidden", config.mlp_hidden > 0 ? config.mlp_hidden : 4 * config.hidden, lanes);
  check_tensor_cut("GPT", "seq_len", config.seq_len, lanes);
}

}  // namespace

void check_tensor_cut(const char* family, const char* name, int64_t value, const TensorLanes& lanes) {
  if (value % lanes.lanes == 0) return;
  std::string fitting;
  for (int64_t n = 1; n <= std::min<int64_t>(value, 64); ++n)
    if (value % n == 0) fitting += concat(fitting.empty() ? "" : ", ", n);
  throw InvalidArgument(concat(family, ": ", name, "=", value, " is not divisible by lanes.tp=", lanes.lanes,
                               " (tp=", lanes.size, "), which cuts it; choose tp and lanes.tp among ",
                               fitting, ", or another ", name));
}

Cost Model::cost(int64_t num_samples, int64_t seq_len) const {
  Cost total;
  for (const LayerPtr& layer : layers) total += layer->cost(num_samples, seq_len / lanes.size);
  return total;
}

Model build_gpt(const GptConfig& config, const TensorLanes& lanes) {
  validate(config);
  check_lanes_of(config, lanes);
  Model model;
  model.description =
      concat("GPT layers=", config.layers, " hidden=", config.hidden, " heads=", config.heads,
             " vocab=", config.vocab, " seq_len=", config.seq_len, " mlp_hidden=", config.mlp_hidden,
             " dropout=", config.dropout, " tied=", config.tied, " layer_norm_eps=", config.layer_norm_eps,
             " init_std=", config.init_std, " dtype=", dtype_name(config.dtype),
             " norm_dtype=", dtype_name(config.norm_dtype), " logits_dtype=", dtype_name(config.logits_dtype),
             config.replacer ? " replaced: " + config.replacer->description() : "");
  model.lanes = lanes;
  model.vocab = config.vocab;
  model.max_seq_len = config.seq_len;
  for (int64_t i = 0; i <= config.layers; ++i) model.cuts.push_back(static_cast<size_t>(1 + i));
  model.boundary_features = config.hidden;
  model.boundary_dtype = config.dtype;
  const auto add_layer = [&model](const auto& build) {
    model.registry.begin_layer(model.layers.size());
    model.layers.push_back(build());
  };
  ParamRegistry& registry = model.registry;
  add_layer([&] {
    return sequential(build_embedding(registry, config.vocab, config.seq_len, config.hidden, config.init_std,
                                      config.dtype, lanes),
                      std::make_unique<Dropout>(config.hidden, config.dropout, 0, config.dtype));
  });
  for (int64_t i = 0; i < config.layers; ++i)
    add_layer([&] { return build_block(registry, config, lanes, i); });
  add_layer([&]() -> LayerPtr {
    if (LayerPtr own =
            replaced(config.replacer, registry, {"ln_f", config.hidden, config.hidden, config.dtype, lanes}))
      return own;
    return std::make_unique<LayerNorm>(registry, "ln_f", config.hidden, config.layer_norm_eps, config.dtype,
                                       config.norm_dtype);
  });
  const LaneHeadOptions head{.lanes = lanes,
                             .init_std = config.init_std,
                             .dtype = config.dtype,
                             .out_dtype = config.logits_dtype,
                             .tied_to = config.tied ? "wte.weight" : ""};
  add_layer([&] { return build_head(registry, "lm_head", config.hidden, config.vocab, head); });
  add_layer([&] { return build_loss(config.vocab, config.logits_dtype, lanes); });
  return model;
}

}  // namespace polyreme
