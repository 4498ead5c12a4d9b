#include "nn/llama.h"

#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/math.h"
#include "nn/compose.h"
#include "nn/llama_layers.h"
#include "nn/parallel_layers.h"

namespace polyreme {
namespace {

void validate(const LlamaConfig& config) {
  // Token ids are int32; the other limits keep every size in bytes inside int64.
  constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMaxWidth = 1 << 20, kMaxLayers = 1 << 16;
  const auto in_range = [](const char* name, int64_t value, int64_t limit) {
    require(value >= 1 && value <= limit, "Llama: ", name, "=", value, "; expected 1 to ", limit);
  };
  const auto finite = [](const char* name, double value, double least) {
    require(value >= least && std::isfinite(value), "Llama: ", name, "=", value,
            "; expected a finite number, ", least, " or more");
  };
  in_range("layers", config.layers, kMaxLayers);
  in_range("hidden", config.hidden, kMaxWidth);
  in_range("heads", config.heads, kMaxWidth);
  in_range("kv_heads", config.kv_heads, kMaxWidth);
  in_range("mlp_hidden", config.mlp_hidden, kMaxWidth);
  in_range("vocab", config.vocab, kMaxTokens);
  in_range("seq_len", config.seq_len, kMaxTokens);
  require(config.hidden % config.heads == 0, "Llama: hidden=", config.hidden,
          " is not divisible by heads=", config.heads, "; choose heads that divide hidden");
  require(config.hidden / config.heads % 2 == 0, "Llama: hidden=", config.hidden, " / heads=", config.heads,
          " is an odd head size; rotary positions need an even one");
  require(config.heads % config.kv_heads == 0, "Llama: heads=", config.heads,
          " is not divisible by kv_heads=", config.kv_heads, "; choose kv_heads that divide heads");
  finite("rope_theta", config.rope_theta, 1);
  finite("norm_eps", config.norm_eps, 0);
  finite("init_std", config.init_std, 0);
  const auto stored = [](const char* name, DType dtype, bool fits, const char* expected) {
    require(fits, "Llama: ", name, "=", dtype_name(dtype), "; expected ", expected);
  };
  const DType dtype = config.dtype;
  stored("dtype", dtype, dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16,
         "float32, bfloat16 or float16");
  const auto dtype_or_f32 = [dtype](DType role) { return role == dtype || role == DType::kF32; };
  stored("norm_dtype", config.norm_dtype, dtype_or_f32(config.norm_dtype), "dtype or float32");
  stored("logits_dtype", config.logits_dtype, dtype_or_f32(config.logits_dtype), "dtype or float32");
}

void check_lanes_of(const LlamaConfig& config, const TensorLanes& lanes) {
  check_tensor_cut("Llama", "heads", config.heads, lanes);
  check_tensor_cut("Llama", "kv_heads", config.kv_heads, lanes);
  check_tensor_cut("Llama", "mlp_hidden", config.mlp_hidden, lanes);
  check_tensor_cut("Llama", "seq_len", config.seq_len, lanes);
}

// A branch of a block behind its norm. Several lanes: for one of them, with what joins them.
LayerPtr join_lanes(LayerPtr inner, const LlamaConfig& config, const TensorLanes& lanes) {
  if (lanes.lanes == 1) return inner;
  return std::make_unique<LaneBranch>(
      std::move(inner),
      LaneBranchOptions{.lanes = lanes, .features = config.hidden, .dtype = config.dtype, .bias = {}});
}

LayerPtr build_block(ParamRegistry& registry, const LlamaConfig& config, const TensorLanes& lanes,
                     int64_t index) {
  const std::string name = concat("h.", index), prefix = name + ".";
  if (LayerPtr layer =
          replaced(config.replacer, registry, {name, config.hidden, config.hidden, config.dtype, lanes}))
    return layer;
  const int64_t hidden = config.hidden, head_dim = hidden / config.heads;
  const double branch_std = config.init_std / std::sqrt(2.0 * static_cast<double>(config.layers));
  const auto own = [&](const std::string& part, int64_t in, int64_t out, PlaceCut cut) {
    return replaced(config.replacer, registry, {prefix + part, in, out, config.dtype, lanes, cut});
  };
  const auto linear = [&](const char* part, int64_t in, int64_t out, LinearOptions options) -> LayerPtr {
    const PlaceCut cut = options.cut == LinearCut::kRow ? PlaceCut::kIn : PlaceCut::kOut;
    if (LayerPtr layer = own(part, in, out, cut)) return layer;
    options.bias = false;
    return std::make_unique<Linear>(registry, prefix + part, in, out, options);
  };
  const auto norm = [&](const char* part) -> LayerPtr {
    if (LayerPtr layer = own(part, hidden, hidden, PlaceCut::kWhole)) return layer;
    return std::make_unique<RmsNorm>(registry, prefix + part, hidden, config.norm_eps, config.dtype,
                                     config.norm_dtype);
  };
  const LinearOptions column{.init_std = config.init_std,
                             .cut = LinearCut::kColumn,
                             .dtype = config.dtype,
                             .out_dtype = config.dtype,
                             .lanes = lanes.lanes};
  LinearOptions gate_up = column;
  gate_up.cut_blocks = 2;
  LinearOptions row = column;
  row.init_std = branch_std;
  row.cut = LinearCut::kRow;

  // Built in order, since parameters are numbered as they are declared.
  auto norm1 = norm("ln_1");
  const int64_t qkv_features = (config.heads + 2 * config.kv_heads) * head_dim;
  auto qkv = linear("attn.qkv", hidden, qkv_features, column);
  LayerPtr attend = own("attn.heads", qkv_features, hidden, PlaceCut::kBoth);
  auto attention_out = linear("attn.proj", hidden, hidden, row);
  auto norm2 = norm("ln_2");
  auto up = linear("mlp.gate_up", hidden, 2 * config.mlp_hidden, gate_up);
  LayerPtr gate = own("mlp.swiglu", 2 * config.mlp_hidden, config.mlp_hidden, PlaceCut::kBoth);
  auto down = linear("mlp.down", config.mlp_hidden, hidden, row);

  const int64_t parts = lanes.lanes;
  const GroupedAttentionOptions grouped{config.heads / parts, config.kv_heads / parts, head_dim,
                                        config.rope_theta, config.dtype};
  if (!attend) attend = std::make_unique<GroupedAttention>(grouped);
  if (!gate) gate = std::make_unique<SwiGlu>(config.mlp_hidden / parts, config.dtype);
  LayerPtr heads = sequential(std::move(qkv), std::move(attend));
  if (config.recompute == Recomputation::kAttention)
    heads = std::make_unique<Recompute>(std::move(heads), hidden, config.dtype);
  LayerPtr all_heads = join_lanes(sequential(std::move(heads), std::move(attention_out)), config, lanes);
  LayerPtr neurons = join_lanes(sequential(std::move(up), std::move(gate), std::move(down)), config, lanes);
  LayerPtr attention = sequential(std::move(norm1), std::move(all_heads));
  LayerPtr mlp = sequential(std::move(norm2), std::move(neurons));
  LayerPtr block = sequential(std::make_unique<Residual>(std::move(attention), hidden, config.dtype),
                              std::make_unique<Residual>(std::move(mlp), hidden, config.dtype));
  if (config.recompute == Recomputation::kBlocks)
    block = std::make_unique<Recompute>(std::move(block), hidden, config.dtype);
  return block;
}

}  // namespace

Model build_llama(const LlamaConfig& given, const TensorLanes& lanes) {
  LlamaConfig config = given;
  if (config.kv_heads == 0) config.kv_heads = config.heads;
  if (config.mlp_hidden == 0)
    config.mlp_hidden = round_up(ceil_div(8 * config.hidden, int64_t{3}), int64_t{64});
  validate(config);
  check_lanes_of(config, lanes);
  Model model;
  model.description =
      concat("Llama layers=", config.layers, " hidden=", config.hidden, " heads=", config.heads,
             " kv_heads=", config.kv_heads, " mlp_hidden=", config.mlp_hidden, " vocab=", config.vocab,
             " seq_len=", config.seq_len, " rope_theta=", config.rope_theta, " norm_eps=", config.norm_eps,
             " tied=", config.tied, " init_std=", config.init_std, " dtype=", dtype_name(config.dtype),
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
    return build_embedding(registry, config.vocab, 0, config.hidden, config.init_std, config.dtype, lanes);
  });
  for (int64_t i = 0; i < config.layers; ++i)
    add_layer([&] { return build_block(registry, config, lanes, i); });
  add_layer([&]() -> LayerPtr {
    if (LayerPtr own =
            replaced(config.replacer, registry, {"ln_f", config.hidden, config.hidden, config.dtype, lanes}))
      return own;
    return std::make_unique<RmsNorm>(registry, "ln_f", config.hidden, config.norm_eps, config.dtype,
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

Model build_model(const ModelConfig& config, const TensorLanes& lanes) {
  if (const auto* llama = std::get_if<LlamaConfig>(&config)) return build_llama(*llama, lanes);
  return build_gpt(std::get<GptConfig>(config), lanes);
}

}  // namespace polyreme
