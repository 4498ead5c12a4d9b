// Every layer against float64: outputs, input gradients and parameter gradients (central differences
// of the reference), equal bits on all devices and for all cuts into micro-batches, and true costs.
#include "nn/layer_check.h"

namespace polyreme::testing {
namespace {

// Relative, norm by norm. One rounding to fp32 is at most 2^-24 = 6e-8 of its result; chains of up to 24
// terms add theirs up like a random walk. Measured: at most 1.3e-7 for one layer, 4.8e-7 for four in a
// row. The references are good to 1e-9, and a wrong formula, mask or scale is off by more than 1e-3.
constexpr double kBound = 4e-7, kBlockBound = 1.5e-6;

// A case without layer: the batch, and no parameters yet.
LayerCase new_case() {
  LayerCase c;
  const std::vector<float> draws = random_floats(static_cast<size_t>(c.batch.rows()), 11, 10.0f);
  for (const float draw : draws) {
    c.batch.tokens.push_back(std::abs(static_cast<int32_t>(draw)) % 9);
    c.batch.targets.push_back(std::abs(static_cast<int32_t>(draw * 3)) % 9);
  }
  return c;
}

// Draws parameters, input and output gradient: gains and weights of a size that makes every term count.
void draw_inputs(LayerCase& c, int64_t in_features, int64_t out_features) {
  for (const ParamSpec& spec : c.registry.specs()) {
    c.params.push_back(random_floats(static_cast<size_t>(spec.shape.numel()),
                                     static_cast<uint32_t>(100 + c.params.size()), 0.7f));
    if (spec.init.kind == ParamInit::Kind::kOnes)
      for (float& value : c.params.back()) value += 1.0f;
  }
  c.in_features = in_features;
  c.x = random_floats(static_cast<size_t>(c.batch.rows() * in_features), 21);
  c.dy = random_floats(static_cast<size_t>(c.batch.rows() * out_features), 31);
}

LayerCase embedding_case() {
  LayerCase c = new_case();
  c.layer = std::make_unique<Embedding>(c.registry, 9, 7, 6, 0.02);  // 7 positions, of which 5 are used
  draw_inputs(c, 0, 6);
  c.reference = [](const LayerCase& self, const Values&, const std::vector<Values>& p) {
    return reference::embedding(self.batch.tokens, p[0], p[1], 5, 6);
  };
  return c;
}

LayerCase linear_case(bool bias) {
  LayerCase c = new_case();
  c.layer = std::make_unique<Linear>(c.registry, "fc", 6, 11, LinearOptions{.bias = bias});
  draw_inputs(c, 6, 11);
  c.reference = [bias](const LayerCase&, const Values& x, const std::vector<Values>& p) {
    return reference::linear(x, p[0], bias ? p[1] : Values(), 6, 11);
  };
  return c;
}

LayerCase layer_norm_case() {
  LayerCase c = new_case();
  c.layer = std::make_unique<LayerNorm>(c.registry, "ln", 24, 1e-2f);
  draw_inputs(c, 24, 24);
  c.reference = [](const LayerCase&, const Values& x, const std::vector<Values>& p) {
    return reference::layer_norm(x, p[0], p[1], static_cast<double>(1e-2f));
  };
  return c;
}

LayerCase attention_case() {
  LayerCase c = new_case();
  c.layer = std::make_unique<CausalAttention>(10, 2);
  draw_inputs(c, 30, 10);
  c.reference = [](const LayerCase&, const Values& x, const std::vector<Values>&) {
    return reference::attention(x, 5, 2, 5);
  };
  return c;
}

LayerCase gelu_case() {
  LayerCase c = new_case();
  c.layer = std::make_unique<Gelu>(7);
  draw_inputs(c, 7, 7);
  c.reference = [](const LayerCase&, const Values& x, const std::vector<Values>&) {
    return reference::gelu(x);
  };
  return c;
}

LayerCase dropout_case() {
  LayerCase c = new_case();
  c.batch.first_sample = 3;
  c.layer = std::make_unique<Dropout>(7, 0.3f, 5);
  draw_inputs(c, 7, 7);
  c.reference = [](const LayerCase& self, const Values& x, const std::vector<Values>&) {
    return reference::dropout(x, static_cast<double>(0.3f), dropout_key(self, 5), 3 * 5 * 7);
  };
  return c;
}

LayerCase cross_entropy_case() {
  LayerCase c = new_case();
  for (const size_t row : {0, 7, 13, 19}) c.batch.targets[row] = kIgnoreIndex;
  c.layer = std::make_unique<CrossEntropy>(9);
  draw_inputs(c, 9, 0);
  c.reference = [](const LayerCase& self, const Values& x, const std::vector<Values>&) {
    return reference::cross_entropy(x, self.batch.targets);
  };
  return c;
}

// x + fc2(gelu(fc1(norm(x)))), built from parts as a block of a model is.
LayerCase mlp_case(bool recompute) {
  LayerCase c = new_case();
  auto norm = std::make_unique<LayerNorm>(c.registry, "ln", 6, 1e-3f);
  auto up = std::make_unique<Linear>(c.registry, "fc1", 6, 12, LinearOptions{});
  auto down = std::make_unique<Linear>(c.registry, "fc2", 12, 6, LinearOptions{});
  std::vector<LayerPtr> parts;
  parts.push_back(std::move(norm));
  parts.push_back(std::move(up));
  parts.push_back(std::make_unique<Gelu>(12));
  parts.push_back(std::move(down));
  parts.push_back(std::make_unique<Dropout>(6, 0.25f, 1));
  c.layer = std::make_unique<Residual>(std::make_unique<Sequential>(std::move(parts)), 6);
  if (recompute) c.layer = std::make_unique<Recompute>(std::move(c.layer), 6);
  draw_inputs(c, 6, 6);
  c.reference = [](const LayerCase& self, const Values& x, const std::vector<Values>& p) {
    Values y = reference::layer_norm(x, p[0], p[1], static_cast<double>(1e-3f));
    y = reference::gelu(reference::linear(y, p[2], p[3], 6, 12));
    y = reference::dropout(reference::linear(y, p[4], p[5], 12, 6), 0.25, dropout_key(self, 1), 0);
    return reference::add(x, y);
  };
  return c;
}

// The three properties of every layer.
void check(const LayerCase& c, double bound = kBound) {
  expect_matches_reference(c, bound);
  expect_no_cut_shows(c);
  expect_cost_is_true(c);
}

TEST(Layers, Embedding) { check(embedding_case()); }
TEST(Layers, LinearWithBias) { check(linear_case(true)); }
TEST(Layers, LinearWithoutBias) { check(linear_case(false)); }
TEST(Layers, LayerNorm) { check(layer_norm_case()); }
TEST(Layers, CausalAttention) { check(attention_case()); }
TEST(Layers, Gelu) { check(gelu_case()); }
TEST(Layers, Dropout) { check(dropout_case()); }
TEST(Layers, CrossEntropy) { check(cross_entropy_case()); }
TEST(Layers, ResidualSequential) { check(mlp_case(false), kBlockBound); }
TEST(Layers, Recompute) { check(mlp_case(true), kBlockBound); }

TEST(Layers, RecomputeChangesNoBit) {
  Rig rig;
  const LayerCase plain = mlp_case(false), recompute = mlp_case(true);
  expect_same_bits(run_layer(rig, recompute, {1, 4}).joined(), run_layer(rig, plain, {1, 4}).joined());
  const Cost a = plain.layer->cost(4, 5), b = recompute.layer->cost(4, 5);
  EXPECT_EQ(b.backward_input_flops, a.backward_input_flops + a.forward_flops);
  EXPECT_EQ(b.saved_bytes, 4 * 4 * 5 * 6);
  EXPECT_LT(b.saved_bytes, a.saved_bytes);
}

TEST(Layers, InferenceKeepsNothingAndDropsNothing) {
  const std::function<LayerCase()> cases[] = {embedding_case,     [] { return linear_case(true); },
                                              layer_norm_case,    attention_case,
                                              gelu_case,          dropout_case,
                                              cross_entropy_case, [] { return mlp_case(false); }};
  for (const auto& make_case : cases) {
    Rig rig;
    LayerCase c = make_case();
    c.training = false;
    const Uploaded on_device(rig, c);
    const TestParams params(rig, c, 0);
    const Context context = make_context(rig, c, params, on_device.micro_batch(c, 0, c.batch.samples));
    Saved saved;
    const std::vector<float> kept = rig.download(c.layer->forward(context, on_device.x, &saved));
    const int64_t before = rig.device().memory().in_use_bytes;
    {
      const Tensor y = c.layer->forward(context, on_device.x, nullptr);
      expect_same_bits(rig.download(y), kept);
    }
    EXPECT_EQ(rig.device().memory().in_use_bytes, before);
  }
  Rig rig;
  LayerCase c = dropout_case();
  c.training = false;
  const Outcome outcome = run_layer(rig, c, {4});
  expect_same_bits(outcome.y, c.x);
  expect_same_bits(outcome.dx, c.dy);
}

// Which mask is drawn depends on seed, step, layer and position in the global batch, on each of them.
TEST(Layers, DropoutMasksDiffer) {
  Rig rig;
  const auto mask = [&](const std::function<void(LayerCase&)>& change) {
    LayerCase c = dropout_case();
    c.batch.samples = 40;
    c.batch.tokens.clear();
    c.batch.targets.clear();
    c.layer = std::make_unique<Dropout>(7, 0.5f, 5);
    c.x.assign(40 * 5 * 7, 1.0f);
    c.dy = c.x;
    change(c);
    const Outcome outcome = run_layer(rig, c, {40});
    expect_same_bits(outcome.dx, outcome.y);  // backward draws the same mask
    return outcome.y;
  };
  const std::vector<float> first = mask([](LayerCase&) {});
  expect_same_bits(mask([](LayerCase&) {}), first);
  const std::function<void(LayerCase&)> changes[] = {
      [](LayerCase& c) { c.seed += 1; }, [](LayerCase& c) { c.step += 1; },
      [](LayerCase& c) { c.batch.first_sample += 1; },
      [](LayerCase& c) { c.layer = std::make_unique<Dropout>(7, 0.5f, 6); }};
  for (const auto& change : changes) {
    const std::vector<float> other = mask(change);
    int64_t equal = 0;
    for (size_t i = 0; i < first.size(); ++i) equal += first[i] == other[i];
    // 1400 fair coins: five standard deviations are 94.
    EXPECT_NEAR(static_cast<double>(equal), 700.0, 94.0);
  }
}

// y = w * dropout(x, 0.5), loss = sum(y), w = 1: the gradient of w is the loss, if backward uses the
// mask of the forward that made the loss.
TEST(Layers, ORn01RecomputeDrawsTheSameMask) {
  Rig rig;
  std::vector<float> with[2];
  for (const bool recompute : {false, true}) {
    for (uint32_t step = 0; step < 5; ++step) {
      LayerCase c;
      c.batch = {.samples = 1, .seq = 64};
      std::vector<LayerPtr> parts;
      parts.push_back(std::make_unique<Dropout>(1, 0.5f, 0));
      parts.push_back(std::make_unique<Linear>(c.registry, "w", 1, 1, LinearOptions{.bias = false}));
      c.layer = std::make_unique<Sequential>(std::move(parts));
      if (recompute) c.layer = std::make_unique<Recompute>(std::move(c.layer), 1);
      draw_inputs(c, 1, 1);
      c.params = {{1.0f}};
      c.dy.assign(64, 1.0f);
      c.step = step;
      const Outcome outcome = run_layer(rig, c, {1});
      double loss = 0;
      for (const float y : outcome.y) loss += static_cast<double>(y);
      EXPECT_NEAR(static_cast<double>(outcome.grads.at({0, 0})[0]), loss, 1e-6 * 64);
      append(with[recompute], outcome.joined());
    }
  }
  expect_same_bits(with[1], with[0]);
}

TEST(Layers, GemmFlopsAreTwoPerMultiplyAdd) {
  ParamRegistry registry;
  const Linear linear(registry, "fc", 6, 11, {});
  const Cost cost = linear.cost(4, 5);
  EXPECT_EQ(cost.forward_flops, 2.0 * 20 * 6 * 11);
  EXPECT_EQ(cost.backward_input_flops, 2.0 * 20 * 11 * 6);
  EXPECT_EQ(cost.backward_weight_flops, 2.0 * 11 * 20 * 6);
  EXPECT_EQ(cost.total_flops(), 3 * cost.forward_flops);
  // Query i sees i + 1 keys: 15 pairs of 5 tokens, in 4 samples, with 10 features over all heads.
  const CausalAttention attention(10, 2);
  EXPECT_EQ(attention.cost(4, 5).forward_flops, 2.0 * 2 * 15 * 4 * 10);
  EXPECT_EQ(attention.cost(4, 5).backward_input_flops, 5.0 * 2 * 15 * 4 * 10);
}

TEST(Layers, LinearSpecsSayHowTheyMayBeCut) {
  ParamRegistry registry;
  const LinearOptions qkv{.init_std = 0.5, .cut = LinearCut::kColumn, .cut_blocks = 3};
  const Linear column(registry, "qkv", 4, 12, qkv);
  const Linear row(registry, "proj", 8, 4, {.cut = LinearCut::kRow});
  const Linear whole(registry, "whole", 3, 5, {});
  const auto spec = [&](const char* name) {
    return registry.specs()[static_cast<size_t>(registry.index(name))];
  };
  EXPECT_EQ(spec("qkv.weight").shape, (Shape{12, 4}));
  EXPECT_EQ(spec("qkv.weight").padded_shape, (Shape{12, 4}));
  EXPECT_EQ(local_shape(spec("qkv.weight"), "tp", 2), (Shape{6, 4}));
  EXPECT_EQ(local_shape(spec("qkv.bias"), "tp", 2), (Shape{6}));
  EXPECT_EQ(local_shape(spec("qkv.weight"), "dp", 2), (Shape{12, 4}));
  EXPECT_EQ(local_shape(spec("proj.weight"), "tp", 2), (Shape{4, 4}));
  EXPECT_EQ(local_shape(spec("proj.bias"), "tp", 2), (Shape{4}));
  EXPECT_EQ(local_shape(spec("whole.weight"), "tp", 2), (Shape{5, 3}));
  // 12 rows in 3 blocks of 4: 8 ranks do not divide a block.
  EXPECT_THROW_WITH(local_shape(spec("qkv.weight"), "tp", 8), InvalidArgument, "'qkv.weight'");
  EXPECT_EQ(spec("qkv.weight").cuts[0].blocks, 3);
  EXPECT_EQ(spec("qkv.weight").init.std, 0.5);
  EXPECT_EQ(spec("qkv.bias").init.kind, ParamInit::Kind::kZeros);
  EXPECT_TRUE(spec("qkv.weight").weight_decay);
  EXPECT_FALSE(spec("qkv.bias").weight_decay);
}

TEST(Layers, OneDimensionalParametersAreNotDecayed) {
  const LayerCase norm = layer_norm_case(), embedding = embedding_case();
  for (const ParamSpec& spec : norm.registry.specs()) EXPECT_FALSE(spec.weight_decay) << spec.name;
  for (const ParamSpec& spec : embedding.registry.specs()) EXPECT_TRUE(spec.weight_decay) << spec.name;
  EXPECT_EQ(norm.registry.specs()[0].init.kind, ParamInit::Kind::kOnes);
}

TEST(ParamRegistry, NamesAreUniqueAndUsesAreCounted) {
  ParamRegistry registry;
  const ParamUse first = registry.declare({.name = "a", .shape = {2, 3}});
  EXPECT_EQ(registry.specs()[0].padded_shape, (Shape{2, 3}));
  EXPECT_EQ(registry.declare({.name = "b", .shape = {2}, .padded_shape = {4}}).param, 1);
  EXPECT_EQ(registry.specs()[1].padded_shape, (Shape{4}));
  const ParamUse second = registry.declare_use("a");
  EXPECT_EQ(first.param, second.param);
  EXPECT_EQ(first.use, 0);
  EXPECT_EQ(second.use, 1);
  EXPECT_EQ(registry.num_uses(0), 2);
  EXPECT_EQ(registry.num_uses(1), 1);
  EXPECT_EQ(registry.specs()[0].tie_group, "a");
  EXPECT_EQ(registry.specs()[1].tie_group, "");
  EXPECT_THROW_WITH(registry.declare({.name = "a"}), InvalidArgument, "'a' is declared twice");
  EXPECT_THROW_WITH(registry.declare_use("c"), InvalidArgument, "'c'");
  EXPECT_THROW_WITH(Linear(registry, "fc", 2, 3, {.tied_to = "a"}), InvalidArgument, "[3, 2]");
}

}  // namespace
}  // namespace polyreme::testing
