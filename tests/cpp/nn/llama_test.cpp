// The layers of the Llama family and the whole model against float64, its list of parameters, and what a
// wrong configuration says.
#include "nn/llama.h"

#include "common/error_text.h"
#include "nn/layer_check.h"
#include "nn/llama_layers.h"

namespace polyreme::testing {
namespace {

// Relative, norm by norm; see layers_test.cpp and gpt_test.cpp.
constexpr double kBound = 4e-7, kModelBound = 3e-6;

void draw(LayerCase& c, float param_scale) {
  for (const ParamSpec& spec : c.registry.specs()) {
    c.params.push_back(random_floats(static_cast<size_t>(spec.shape.numel()),
                                     static_cast<uint32_t>(100 + c.params.size()), param_scale));
    if (spec.init.kind == ParamInit::Kind::kOnes)
      for (float& value : c.params.back()) value += 1.0f;
    c.params.back() = rounded(spec.dtype, c.params.back());
  }
}

void draw_inputs(LayerCase& c, int64_t in_features, int64_t out_features) {
  draw(c, 0.7f);
  c.in_features = in_features;
  c.x = random_floats(static_cast<size_t>(c.batch.rows() * in_features), 21);
  c.dy = random_floats(static_cast<size_t>(c.batch.rows() * out_features), 31);
}

void check(const LayerCase& c, double bound) {
  expect_matches_reference(c, bound);
  expect_no_cut_shows(c);
  expect_cost_is_true(c);
}

TEST(LlamaLayers, RmsNorm) {
  LayerCase c;
  c.layer = std::make_unique<RmsNorm>(c.registry, "norm", 24, 1e-2f);
  draw_inputs(c, 24, 24);
  c.reference = [](const LayerCase&, const Values& x, const std::vector<Values>& p) {
    return reference::rms_norm(x, p[0], static_cast<double>(1e-2f));
  };
  check(c, kBound);
}

TEST(LlamaLayers, SwiGlu) {
  LayerCase c;
  c.layer = std::make_unique<SwiGlu>(19);
  draw_inputs(c, 38, 19);
  c.reference = [](const LayerCase&, const Values& x, const std::vector<Values>&) {
    return reference::swiglu(x, 19);
  };
  check(c, kBound);
}

LayerCase attention_case(int64_t kv_heads, int64_t group, int64_t head_dim, double theta = 100) {
  LayerCase c;
  c.batch.seq = 7;
  const int64_t heads = kv_heads * group;
  c.layer = std::make_unique<GroupedAttention>(GroupedAttentionOptions{heads, kv_heads, head_dim, theta});
  draw_inputs(c, (heads + 2 * kv_heads) * head_dim, heads * head_dim);
  c.reference = [=](const LayerCase&, const Values& x, const std::vector<Values>&) {
    return reference::grouped_attention(x, 7, static_cast<size_t>(kv_heads), static_cast<size_t>(group),
                                        static_cast<size_t>(head_dim), theta);
  };
  return c;
}

TEST(LlamaLayers, GroupedAttention) {
  check(attention_case(1, 1, 6), kBound);
  check(attention_case(2, 1, 4), kBound);
  check(attention_case(1, 3, 4), kBound);
  check(attention_case(2, 2, 4), kBound);
}

// A turn is as exact at the last position of a long sequence as at the first ones.
TEST(LlamaLayers, RotaryAtLatePositions) {
  constexpr int64_t kSeq = 70000, kDim = 6;
  Rig rig;
  const std::vector<float> x = random_floats(kSeq * kDim, 3);
  const Tensor on_device = rig.upload({1, kSeq, 1, 1, kDim}, x), out = rig.empty_f32({1, kSeq, 1, 1, kDim});
  rotary(rig.stream(), on_device, out, 1, 500000.0);
  const std::vector<float> y = rig.download(out);
  for (const int64_t position : {int64_t{0}, int64_t{1}, int64_t{4095}, kSeq - 1})
    for (int64_t i = 0; i < kDim / 2; ++i) {
      const double angle =
          static_cast<double>(position) * std::pow(500000.0, -2.0 * static_cast<double>(i) / kDim);
      const auto a = static_cast<double>(x[static_cast<size_t>(position * kDim + i)]);
      const auto b = static_cast<double>(x[static_cast<size_t>(position * kDim + kDim / 2 + i)]);
      EXPECT_NEAR(y[static_cast<size_t>(position * kDim + i)], a * std::cos(angle) - b * std::sin(angle),
                  1e-6);
    }
  rotary(rig.stream(), out, out, 1, 500000.0, /*inverse=*/true);
  const std::vector<float> back = rig.download(out);
  for (size_t i = 0; i < x.size(); i += 997) EXPECT_NEAR(back[i], x[i], 1e-6);
}

// Only the first heads of a group are turned; the rest is copied.
TEST(LlamaLayers, RotaryLeavesTheOtherHeads) {
  const std::vector<float> x = random_floats(2 * 3 * 2 * 3 * 34, 5);
  const auto y = same_bits_everywhere([&](Rig& rig) {
    const Shape shape{2, 3, 2, 3, 34};
    const Tensor out = rig.empty_f32(shape);
    rotary(rig.stream(), rig.upload(shape, x), out, 2, 100.0);
    return rig.download(out);
  });
  for (size_t i = 0; i < x.size(); ++i) {
    const bool turned = i / 34 % 3 < 2 && i / (34 * 6) % 3 > 0;  // position 0 stays as well
    EXPECT_EQ(bits_of(y[i]) != bits_of(x[i]), turned) << i;
  }
}

// ---- The model ----

LlamaConfig tiny_config() {
  return {.layers = 2,
          .hidden = 8,
          .heads = 4,
          .kv_heads = 2,
          .mlp_hidden = 11,
          .vocab = 11,
          .seq_len = 6,
          .rope_theta = 50,
          .norm_eps = 1e-3f};
}

Values llama_reference(const LlamaConfig& config, const LayerCase& c, const std::vector<Values>& params) {
  const auto hidden = static_cast<size_t>(config.hidden), kv_heads = static_cast<size_t>(config.kv_heads);
  const auto heads = static_cast<size_t>(config.heads), mlp = static_cast<size_t>(config.mlp_hidden);
  const auto seq = static_cast<size_t>(c.batch.seq);
  const size_t head_dim = hidden / heads;
  const auto param = [&](const std::string& name) {
    return params[static_cast<size_t>(c.registry.index(name + ".weight"))];
  };
  const auto norm = [&](const Values& x, const std::string& name) {
    return reference::rms_norm(x, param(name), static_cast<double>(config.norm_eps));
  };
  const auto linear = [&](const Values& x, const std::string& name, size_t in, size_t out) {
    return reference::linear(x, param(name), {}, in, out);
  };
  Values x = reference::embedding(c.batch.tokens, param("wte"), {}, seq, hidden);
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string block = concat("h.", i, ".");
    Values y = linear(norm(x, block + "ln_1"), block + "attn.qkv", hidden, (heads + 2 * kv_heads) * head_dim);
    y = reference::grouped_attention(y, seq, kv_heads, heads / kv_heads, head_dim, config.rope_theta);
    x = reference::add(x, linear(y, block + "attn.proj", hidden, hidden));
    y = reference::swiglu(linear(norm(x, block + "ln_2"), block + "mlp.gate_up", hidden, 2 * mlp), mlp);
    x = reference::add(x, linear(y, block + "mlp.down", mlp, hidden));
  }
  const Values logits =
      linear(norm(x, "ln_f"), config.tied ? "wte" : "lm_head", hidden, static_cast<size_t>(config.vocab));
  return reference::cross_entropy(logits, c.batch.targets);
}

LayerCase llama_case(const LlamaConfig& config) {
  Model model = build_llama(config);
  LayerCase c;
  c.registry = std::move(model.registry);
  c.layer = std::make_unique<Sequential>(std::move(model.layers));
  c.batch = {.samples = 4, .seq = 5, .first_sample = 2};
  const std::vector<float> draws = random_floats(static_cast<size_t>(c.batch.rows()), 11, 10.0f);
  for (size_t i = 0; i < draws.size(); ++i) {
    const auto vocab = static_cast<int32_t>(config.vocab);
    c.batch.tokens.push_back(std::abs(static_cast<int32_t>(draws[i])) % vocab);
    c.batch.targets.push_back(i % 6 == 4 ? kIgnoreIndex
                                         : std::abs(static_cast<int32_t>(draws[i] * 3)) % vocab);
  }
  draw(c, 0.3f);
  c.reference = [config](const LayerCase& self, const Values&, const std::vector<Values>& params) {
    return llama_reference(config, self, params);
  };
  return c;
}

TEST(Llama, MatchesFloat64) {
  for (const bool tied : {false, true}) {
    LlamaConfig config = tiny_config();
    config.tied = tied;
    check(llama_case(config), kModelBound);
  }
}

TEST(Llama, RecomputeChangesNoBit) {
  Rig rig;
  LlamaConfig config = tiny_config();
  const auto plain = run_layer(rig, llama_case(config), {4}).joined();
  config.recompute = Recomputation::kBlocks;
  expect_same_bits(run_layer(rig, llama_case(config), {1, 4}).joined(), plain);
}

// See NarrowMatchesFloat64 in gpt_test.cpp for the bound.
TEST(Llama, NarrowMatchesFloat64) {
  for (const auto& [dtype, other] :
       {std::pair{DType::kBF16, DType::kBF16}, {DType::kF16, DType::kF16}, {DType::kBF16, DType::kF32}}) {
    LlamaConfig config = tiny_config();
    config.dtype = dtype;
    config.norm_dtype = config.logits_dtype = other;
    const LayerCase c = llama_case(config);
    expect_matches_reference(c, 16 * (dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11));
    expect_no_cut_shows(c);
    expect_cost_is_true(c);
  }
}

TEST(Llama, ParametersAndTheirCuts) {
  const Model model = build_llama(tiny_config());
  std::vector<std::string> names;
  for (const ParamSpec& spec : model.registry.specs()) names.push_back(spec.name + spec.shape.to_string());
  EXPECT_EQ(names, (std::vector<std::string>{
                       "wte.weight[11, 8]", "h.0.ln_1.weight[8]", "h.0.attn.qkv.weight[16, 8]",
                       "h.0.attn.proj.weight[8, 8]", "h.0.ln_2.weight[8]", "h.0.mlp.gate_up.weight[22, 8]",
                       "h.0.mlp.down.weight[8, 11]", "h.1.ln_1.weight[8]", "h.1.attn.qkv.weight[16, 8]",
                       "h.1.attn.proj.weight[8, 8]", "h.1.ln_2.weight[8]", "h.1.mlp.gate_up.weight[22, 8]",
                       "h.1.mlp.down.weight[8, 11]", "ln_f.weight[8]", "lm_head.weight[11, 8]"}));
  const auto cut = [&](const std::string& name) {
    return model.registry.specs()[static_cast<size_t>(model.registry.index(name))].cuts.at(0);
  };
  EXPECT_EQ(cut("h.0.mlp.gate_up.weight").blocks, 2);
  EXPECT_EQ(cut("h.0.attn.qkv.weight").blocks, 1);  // rows of a k and v head lie together
  EXPECT_EQ(cut("h.0.mlp.down.weight").dim, 1);
  EXPECT_EQ(build_llama({.hidden = 768}).registry.specs()[5].shape, (Shape{2 * 2048, 768}));
}

TEST(Llama, RefusesWhatDoesNotFit) {
  const auto refusal = [](auto change) {
    LlamaConfig config = tiny_config();
    change(config);
    return error_text<InvalidArgument>([&] { build_llama(config); });
  };
  expect_parts(refusal([](LlamaConfig& c) { c.kv_heads = 3; }), {"heads=4", "kv_heads=3"});
  expect_parts(refusal([](LlamaConfig& c) { c.heads = 3; }), {"hidden=8", "heads=3"});
  expect_parts(refusal([](LlamaConfig& c) { c.heads = 8; }), {"odd head size"});
  expect_parts(refusal([](LlamaConfig& c) { c.rope_theta = 0.5; }), {"rope_theta=0.5"});
  expect_parts(refusal([](LlamaConfig& c) { c.vocab = 0; }), {"vocab=0"});
}

}  // namespace
}  // namespace polyreme::testing
