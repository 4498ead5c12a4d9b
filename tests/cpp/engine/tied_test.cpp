// Parameters that two stages of a pipeline share.
#include "engine/engine_rig.h"
#include "nn/layers.h"
#include "pipeline/schedule/generators.h"

namespace polyreme::testing {
namespace {

constexpr int64_t kHidden = 4;

// Three linear layers in a chain, and three that have their weights in another order.
Model three_tied_weights() {
  Model model;
  model.description = "three tied weights";
  model.vocab = kVocab;
  model.max_seq_len = kSeq;
  model.boundary_features = kHidden;
  ParamRegistry& registry = model.registry;
  const auto add = [&](const auto& make) {
    registry.begin_layer(model.layers.size());
    model.layers.push_back(make());
  };
  const auto linear = [&](const std::string& name, const std::string& tied_to) {
    LinearOptions options{.bias = false, .init_std = 0.5};
    options.tied_to = tied_to;
    add([&] { return std::make_unique<Linear>(registry, name, kHidden, kHidden, options); });
  };
  add([&] { return std::make_unique<Embedding>(registry, kVocab, kSeq, kHidden, 1.0, DType::kF32); });
  for (const char* name : {"b", "a", "c"}) linear(name, "");
  model.cuts = {1, model.layers.size()};
  for (const char* name : {"c", "b", "a"}) linear(concat("again.", name), concat(name, ".weight"));
  model.cuts.push_back(model.layers.size());
  add([&] {
    return std::make_unique<Linear>(registry, "head", kHidden, kVocab,
                                    LinearOptions{.bias = false, .init_std = 0.5});
  });
  add([&] { return std::make_unique<CrossEntropy>(kVocab, DType::kF32); });
  return model;
}

std::vector<float> train(World& world, int pp) {
  EngineOptions options = tiny_options(/*lanes=*/2, /*micro_batch=*/2);
  Model model = three_tied_weights();
  options.optimizer.weight_decay.assign(model.registry.specs().size(), 0.1);
  if (pp > 1) {
    options.pipeline.schedule = pipeline::generate({.stages = pp, .micro_batches = 4});
    options.pipeline.split = {1, 1};
  }
  Mesh mesh(world.communicator(), MeshLayout({{"pp", pp}, {"dp", world.size() / pp}}, world.size()));
  Engine engine(world.device(), mesh, std::move(model), options);
  std::vector<float> result;
  for (uint32_t step = 0; step < 3; ++step) {
    result.push_back(static_cast<float>(engine.train_step(tiny_batch(step), kLr).grad_norm));
    for (const ParamSpec& spec : engine.model().registry.specs()) {
      append(result, engine.read_param(spec.name, "grad"));
      append(result, engine.read_param(spec.name, "weight"));
    }
  }
  return result;
}

// O-TW-03: the owners are stage 0, in the order of its layers; stage 1 reaches them in another one.
TEST(Tied, ThreeWeightsInTwoOrders) {
  std::vector<float> expected;
  run_ranks(1, {}, [&](World& world) { expected = train(world, 1); });
  std::vector<std::vector<float>> got(2);
  run_ranks(2, {}, [&](World& world) { got[static_cast<size_t>(world.rank())] = train(world, 2); });
  for (const std::vector<float>& each : got) expect_same_bits(each, expected);
}

}  // namespace
}  // namespace polyreme::testing
