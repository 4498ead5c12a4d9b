// The whole model against float64, its list of parameters, and what a wrong configuration says.
#include "nn/gpt.h"

#include "common/error_text.h"
#include "nn/layer_check.h"

namespace polyreme::testing {
namespace {

// Relative, norm by norm. The error of a block (see layers_test.cpp) is passed on by the blocks around
// it; measured: at most 1.2e-6 over all parameters. A forgotten term is off by more than 1e-3.
constexpr double kBound = 3e-6;

GptConfig tiny_config() {
  return {.layers = 2,
          .hidden = 8,
          .heads = 2,
          .vocab = 11,
          .seq_len = 6,
          .dropout = 0.2f,
          .layer_norm_eps = 1e-3f};
}

Values gpt_reference(const GptConfig& config, const LayerCase& c, const std::vector<Values>& params) {
  const auto hidden = static_cast<size_t>(config.hidden), heads = static_cast<size_t>(config.heads);
  const size_t mlp_hidden = config.mlp_hidden > 0 ? static_cast<size_t>(config.mlp_hidden) : 4 * hidden;
  const auto seq = static_cast<size_t>(c.batch.seq);
  const auto param = [&](const std::string& name) {
    return params[static_cast<size_t>(c.registry.index(name))];
  };
  const auto norm = [&](const Values& x, const std::string& name) {
    return reference::layer_norm(x, param(name + ".weight"), param(name + ".bias"),
                                 static_cast<double>(config.layer_norm_eps));
  };
  const auto linear = [&](const Values& x, const std::string& name, size_t in, size_t out) {
    return reference::linear(x, param(name + ".weight"), param(name + ".bias"), in, out);
  };
  const auto dropout = [&](const Values& x, uint32_t stream) {
    return reference::dropout(x, static_cast<double>(config.dropout), dropout_key(c, stream),
                              static_cast<uint64_t>(c.batch.first_sample) * seq * hidden);
  };
  Values x =
      dropout(reference::embedding(c.batch.tokens, param("wte.weight"), param("wpe.weight"), seq, hidden), 0);
  for (uint32_t i = 0; i < static_cast<uint32_t>(config.layers); ++i) {
    const std::string block = concat("h.", i, ".");
    Values y = linear(norm(x, block + "ln_1"), block + "attn.qkv", hidden, 3 * hidden);
    y = reference::attention(y, seq, heads, hidden / heads);
    x = reference::add(x, dropout(linear(y, block + "attn.proj", hidden, hidden), 1 + 2 * i));
    y = reference::gelu(linear(norm(x, block + "ln_2"), block + "mlp.fc", hidden, mlp_hidden));
    x = reference::add(x, dropout(linear(y, block + "mlp.proj", mlp_hidden, hidden), 2 + 2 * i));
  }
  const Values logits =
      reference::linear(norm(x, "ln_f"), param(config.tied ? "wte.weight" : "lm_head.weight"), {}, hidden,
                        static_cast<size_t>(config.vocab));
  return reference::cross_entropy(logits, c.batch.targets);
}

LayerCase gpt_case(const GptConfig& config, int64_t seq) {
  Model model = build_gpt(config);
  LayerCase c;
  c.registry = std::move(model.registry);
  c.layer = std::make_unique<Sequential>(std::move(model.layers));
  c.batch = {.samples = 4, .seq = seq, .first_sample = 2};
  const std::vector<float> draws = random_floats(static_cast<size_t>(c.batch.rows()), 11, 10.0f);
  for (size_t i = 0; i < draws.size(); ++i) {
    const auto vocab = static_cast<int32_t>(config.vocab);
    c.batch.tokens.push_back(std::abs(static_cast<int32_t>(draws[i])) % vocab);
    c.batch.targets.push_back(i % 6 == 4 ? kIgnoreIndex
                                         : std::abs(static_cast<int32_t>(draws[i] * 3)) % vocab);
  }
  for (const ParamSpec& spec : c.registry.specs()) {
    c.params.push_back(random_floats(static_cast<size_t>(spec.shape.numel()),
                                     static_cast<uint32_t>(100 + c.params.size()), 0.3f));
    if (spec.init.kind == ParamInit::Kind::kOnes)
      for (float& value : c.params.back()) value += 1.0f;
    c.params.back() = rounded(spec.dtype, c.params.back());
  }
  c.reference = [config](const LayerCase& self, const Values&, const std::vector<Values>& params) {
    return gpt_reference(config, self, params);
  };
  return c;
}

constexpr Recomputation kRecomputations[] = {Recomputation::kNone, Recomputation::kBlocks,
                                             Recomputation::kAttention};

class Gpt : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Heads, Gpt, ::testing::Values(true, false),
                         [](const auto& tied) { return tied.param ? "Tied" : "Untied"; });

TEST_P(Gpt, MatchesFloat64) {
  GptConfig config = tiny_config();
  config.tied = GetParam();
  expect_matches_reference(gpt_case(config, 5), kBound);  // shorter than the position table
}

TEST_P(Gpt, NoCutShowsAndNorDoesRecompute) {
  GptConfig config = tiny_config();
  config.tied = GetParam();
  const LayerCase plain = gpt_case(config, 6);
  expect_no_cut_shows(plain);
  for (const Recomputation which : {Recomputation::kBlocks, Recomputation::kAttention}) {
    config.recompute = which;
    const LayerCase recompute = gpt_case(config, 6);
    expect_no_cut_shows(recompute);
    Rig rig;
    expect_same_bits(run_layer(rig, recompute, {4}).joined(), run_layer(rig, plain, {4}).joined());
  }
}

// Every way to store: {dtype, norms, logits}.
const std::vector<std::vector<DType>> kNarrow = {{DType::kBF16, DType::kBF16, DType::kBF16},
                                                 {DType::kF16, DType::kF16, DType::kF16},
                                                 {DType::kBF16, DType::kF32, DType::kF32}};

GptConfig narrow_config(const std::vector<DType>& dtypes, bool tied) {
  GptConfig config = tiny_config();
  config.tied = tied;
  config.dtype = dtypes[0];
  config.norm_dtype = dtypes[1];
  config.logits_dtype = dtypes[2];
  return config;
}

TEST_P(Gpt, NarrowMatchesFloat64) {
  for (const std::vector<DType>& dtypes : kNarrow) {
    // Weights are those of the reference; what rounds is each activation once, by at most half a place: 2^-8
    // or 2^-11 of it. A path through the model and back has about 50 of them, which add up like a random
    // walk; measured over all parameters: at most 11 such roundings.
    const double rounding = dtypes[0] == DType::kBF16 ? 0x1p-8 : 0x1p-11;
    expect_matches_reference(gpt_case(narrow_config(dtypes, GetParam()), 5), 16 * rounding);
  }
}

TEST_P(Gpt, NarrowHasTrueCostsAndNoCutShows) {
  for (const std::vector<DType>& dtypes : kNarrow) {
    for (const Recomputation recompute : kRecomputations) {
      GptConfig config = narrow_config(dtypes, GetParam());
      config.recompute = recompute;
      const LayerCase c = gpt_case(config, 6);
      expect_cost_is_true(c);
      expect_no_cut_shows(c);
    }
  }
}

TEST_P(Gpt, CostIsTrue) {
  for (const Recomputation recompute : kRecomputations) {
    for (const float dropout : {0.0f, 0.2f}) {
      GptConfig config = tiny_config();
      config.tied = GetParam();
      config.recompute = recompute;
      config.dropout = dropout;
      expect_cost_is_true(gpt_case(config, 6));
    }
  }
}

TEST(GptModel, CostIsTheSumOfItsLayers) {
  const GptConfig config = tiny_config();
  const Model model = build_gpt(config);
  const Cost cost = model.cost(4, 6);
  const LayerCase c = gpt_case(config, 6);
  EXPECT_EQ(cost.total_flops(), c.layer->cost(4, 6).total_flops());
  EXPECT_EQ(cost.saved_bytes, c.layer->cost(4, 6).saved_bytes);
  // Products of the blocks (12 hidden^2 weights each) and the head, and causal attention.
  const double gemm = 2.0 * 24 * (2 * 12 * 8 * 8 + 11 * 8), attention = 2.0 * 2 * 2 * 4 * 21 * 8;
  EXPECT_EQ(cost.forward_flops, gemm + attention);
  EXPECT_EQ(cost.backward_weight_flops, gemm);
  EXPECT_EQ(cost.backward_input_flops, gemm + attention / 2 * 5);
}

TEST(GptModel, Parameters) {
  GptConfig config = tiny_config();
  config.layers = 1;
  config.mlp_hidden = 12;
  config.vocab = 10;
  config.tied = false;
  const Model model = build_gpt(config);
  struct Expected {
    const char* name;
    Shape shape, half;  // half: the part of a rank with tp=2
    bool decay;
  };
  const std::vector<Expected> expected = {{"wte.weight", {10, 8}, {5, 8}, true},
                                          {"wpe.weight", {6, 8}, {6, 8}, true},
                                          {"h.0.ln_1.weight", {8}, {8}, false},
                                          {"h.0.ln_1.bias", {8}, {8}, false},
                                          {"h.0.attn.qkv.weight", {24, 8}, {12, 8}, true},
                                          {"h.0.attn.qkv.bias", {24}, {12}, false},
                                          {"h.0.attn.proj.weight", {8, 8}, {8, 4}, true},
                                          {"h.0.attn.proj.bias", {8}, {8}, false},
                                          {"h.0.ln_2.weight", {8}, {8}, false},
                                          {"h.0.ln_2.bias", {8}, {8}, false},
                                          {"h.0.mlp.fc.weight", {12, 8}, {6, 8}, true},
                                          {"h.0.mlp.fc.bias", {12}, {6}, false},
                                          {"h.0.mlp.proj.weight", {8, 12}, {8, 6}, true},
                                          {"h.0.mlp.proj.bias", {8}, {8}, false},
                                          {"ln_f.weight", {8}, {8}, false},
                                          {"ln_f.bias", {8}, {8}, false},
                                          {"lm_head.weight", {10, 8}, {5, 8}, true}};
  const std::vector<ParamSpec>& specs = model.registry.specs();
  ASSERT_EQ(specs.size(), expected.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    EXPECT_EQ(specs[i].name, expected[i].name);
    EXPECT_EQ(specs[i].shape, expected[i].shape) << specs[i].name;
    EXPECT_EQ(specs[i].weight_decay, expected[i].decay) << specs[i].name;
    EXPECT_EQ(specs[i].tie_group, "") << specs[i].name;
    EXPECT_EQ(local_shape(specs[i], "tp", 2), expected[i].half) << specs[i].name;
    const auto& reductions = specs[i].grad_reductions;
    EXPECT_TRUE(std::any_of(reductions.begin(), reductions.end(), [](const AxisReduction& r) {
      return r.axis == "dp" && r.reduction == GradReduction::kLaneSum;
    })) << specs[i].name;
  }
  const auto std_of = [&](const char* name) {
    return specs[static_cast<size_t>(model.registry.index(name))].init.std;
  };
  EXPECT_EQ(std_of("h.0.mlp.fc.weight"), 0.02);
  EXPECT_DOUBLE_EQ(std_of("h.0.mlp.proj.weight"), 0.02 / std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(std_of("h.0.attn.proj.weight"), 0.02 / std::sqrt(2.0));
}

// Under sequence parallelism a rank of tp sees a share of the tokens, so what every token adds to and
// no cut divides is a partial sum.
TEST(GptModel, WhatTpLeavesWholeIsSummedOverItsLanes) {
  const Model model = build_gpt(tiny_config());
  for (const char* name : {"h.0.ln_1.weight", "h.0.ln_1.bias", "h.0.attn.proj.bias", "h.1.mlp.proj.bias",
                           "wpe.weight", "ln_f.weight", "ln_f.bias"}) {
    const ParamSpec& spec = model.registry.specs()[static_cast<size_t>(model.registry.index(name))];
    EXPECT_TRUE(std::any_of(spec.grad_reductions.begin(), spec.grad_reductions.end(),
                            [](const AxisReduction& r) { return r.axis == "tp"; }))
        << name;
  }
}

TEST(GptModel, ATiedHeadIsASecondUseOfTheEmbedding) {
  const Model model = build_gpt(tiny_config());
  const int wte = model.registry.index("wte.weight");
  EXPECT_EQ(model.registry.num_uses(wte), 2);
  EXPECT_EQ(model.registry.specs()[static_cast<size_t>(wte)].tie_group, "wte.weight");
  EXPECT_THROW_WITH(model.registry.index("lm_head.weight"), InvalidArgument, "'lm_head.weight'");
  for (size_t i = 1; i < model.registry.specs().size(); ++i)
    EXPECT_EQ(model.registry.num_uses(static_cast<int>(i)), 1);
}

TEST(GptModel, ErrorsNameFieldValueAndRule) {
  const auto text = [](const std::function<void(GptConfig&)>& change) {
    GptConfig config = tiny_config();
    change(config);
    return error_text<InvalidArgument>([&] { build_gpt(config); });
  };
  constexpr int64_t kHuge = int64_t{1} << 40;
  expect_parts(text([](auto& c) { c.layers = 0; }), {"layers=0", "expected 1 to"});
  expect_parts(text([](auto& c) { c.layers = kHuge; }), {"layers=1099511627776", "expected 1 to"});
  expect_parts(text([](auto& c) { c.hidden = -8; }), {"hidden=-8", "expected 1 to"});
  expect_parts(text([](auto& c) { c.hidden = kHuge; }), {"hidden=1099511627776", "expected 1 to"});
  expect_parts(text([](auto& c) { c.heads = 0; }), {"heads=0", "expected 1 to"});
  expect_parts(text([](auto& c) { c.heads = 3; }), {"hidden=8", "heads=3", "divide"});
  expect_parts(text([](auto& c) { c.vocab = 0; }), {"vocab=0", "expected 1 to"});
  // Token ids are int32: 2^31 tokens would make the largest one negative.
  expect_parts(text([](auto& c) { c.vocab = int64_t{1} << 31; }),
               {"vocab=2147483648", "expected 1 to 2147483647"});
  expect_parts(text([](auto& c) { c.seq_len = 0; }), {"seq_len=0", "expected 1 to"});
  expect_parts(text([](auto& c) { c.mlp_hidden = -1; }), {"mlp_hidden=-1", "expected 0"});
  expect_parts(text([](auto& c) { c.mlp_hidden = kHuge; }), {"mlp_hidden=1099511627776", "expected 0"});
  expect_parts(text([](auto& c) { c.dropout = 1.0f; }), {"dropout=1", "0 <= dropout < 1"});
  expect_parts(text([](auto& c) { c.dropout = -0.1f; }), {"dropout=-0.1", "0 <= dropout < 1"});
  expect_parts(text([](auto& c) { c.dropout = kNan; }), {"dropout=nan", "0 <= dropout < 1"});
  expect_parts(text([](auto& c) { c.layer_norm_eps = -1.0f; }), {"layer_norm_eps=-1", "finite"});
  expect_parts(text([](auto& c) { c.layer_norm_eps = kInf; }), {"layer_norm_eps=inf", "finite"});
  expect_parts(text([](auto& c) { c.init_std = -0.5; }), {"init_std=-0.5", "finite"});
  expect_parts(text([](auto& c) { c.init_std = std::nan(""); }), {"init_std=nan", "finite"});
}

}  // namespace
}  // namespace polyreme::testing
