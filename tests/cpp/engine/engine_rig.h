// Trains small models on any number of thread ranks and collects what must not depend on it.
#pragma once

#include "common/error_text.h"
#include "common/thread_ranks.h"
#include "engine/engine.h"
#include "ops/cpu/enqueue.h"
#include "ops/op_test.h"

namespace polyreme::testing {

// The loss of a token t is w * unit * t: the gradient of w is the mean of unit * t over valid tokens.
class LinearLoss final : public Layer {
 public:
  LinearLoss(ParamRegistry& registry, float unit)
      : unit_(unit),
        use_(registry.declare({.name = "w", .shape = {1}, .init = {.kind = ParamInit::Kind::kOnes}})) {}

  Tensor forward(const Context& context, const Tensor&, Saved*) const override {
    const MicroBatch& batch = context.batch;
    const Tensor loss =
        empty(context.stream.device(), DType::kF32, {batch.num_samples() * batch.seq_len()}, "loss");
    const Tensor weight = context.params.weight(use_);
    as_cpu(context.stream)
        .enqueue({"linear loss"}, {reads(batch.tokens), reads(batch.targets), reads(weight), writes(loss)},
                 [=, unit = unit_](const CpuContext&) {
                   for (int64_t i = 0; i < loss.numel(); ++i)
                     loss.address<float>()[i] = x(batch, i, unit) * *weight.address<float>();
                 });
    return loss;
  }
  Tensor backward_input(const Context&, const Tensor&, Saved&) const override { return {}; }
  void backward_weight(const Context& context, Saved&) const override {
    const Tensor grad = context.params.grad(use_);
    const MicroBatch& batch = context.batch;
    as_cpu(context.stream)
        .enqueue({"linear loss grad"}, {reads(batch.tokens), reads(batch.targets), reads(grad), writes(grad)},
                 [=, unit = unit_, scale = context.loss_scale](const CpuContext&) {
                   for (int64_t i = 0; i < batch.tokens.numel(); ++i)
                     *grad.address<float>() += scale * x(batch, i, unit);
                 });
  }
  Cost cost(int64_t, int64_t) const override { return {}; }

 private:
  static float x(const MicroBatch& batch, int64_t i, float unit) {
    const bool valid = batch.targets.address<int32_t>()[i] != kIgnoreIndex;
    return valid ? unit * static_cast<float>(batch.tokens.address<int32_t>()[i]) : 0.0f;
  }

  float unit_;
  ParamUse use_;
};

inline Model linear_model(int64_t seq_len, float unit = 1.0f) {
  Model model;
  model.vocab = 1000;
  model.max_seq_len = seq_len;
  model.layers.push_back(std::make_unique<LinearLoss>(model.registry, unit));
  return model;
}

// Samples of valid tokens, filled up to seq_len with ignored ones.
inline HostBatch token_batch(const std::vector<std::vector<int32_t>>& samples, int64_t seq_len) {
  HostBatch batch{.num_samples = static_cast<int64_t>(samples.size()), .seq_len = seq_len};
  for (const std::vector<int32_t>& sample : samples)
    for (size_t i = 0; i < static_cast<size_t>(seq_len); ++i) {
      batch.tokens.push_back(i < sample.size() ? sample[i] : 0);
      batch.targets.push_back(i < sample.size() ? 0 : kIgnoreIndex);
    }
  return batch;
}

// Samples [begin, end) of `batch`.
inline HostBatch part_of(const HostBatch& batch, int64_t begin, int64_t end) {
  const auto cut = [&](const std::vector<int32_t>& values) {
    return std::vector<int32_t>(values.begin() + begin * batch.seq_len, values.begin() + end * batch.seq_len);
  };
  return {cut(batch.tokens), cut(batch.targets), end - begin, batch.seq_len};
}

// An engine on this rank's world, with a mesh of dp alone. Without weight_decay nothing decays.
struct EngineRig {
  Mesh mesh;
  EngineOptions options;
  Engine engine;

  EngineRig(World& world, Model model, EngineOptions given)
      : mesh(world.communicator(), MeshLayout({{"dp", world.size()}}, world.size())),
        options(with_decay(std::move(given), model)),
        engine(world.device(), mesh, std::move(model), options) {}

  // This rank's part of a global batch.
  HostBatch part(const HostBatch& batch) const {
    const int64_t local = engine.local_batch(), first = mesh.coordinate("dp") * local;
    return part_of(batch, first, first + local);
  }
  StepStats step(const HostBatch& global_batch, double lr) {
    return engine.train_step(part(global_batch), lr);
  }
  // All parameters one after the other.
  std::vector<float> read(const std::string& kind) {
    std::vector<float> all;
    for (const ParamSpec& spec : engine.model().registry.specs())
      append(all, engine.read_param(spec.name, kind));
    return all;
  }

 private:
  static EngineOptions with_decay(EngineOptions options, const Model& model) {
    if (options.optimizer.weight_decay.empty())
      options.optimizer.weight_decay.resize(model.registry.specs().size(), 0.0);
    return options;
  }
};

// A GPT that trains in milliseconds, with dropout.
inline constexpr int64_t kSeq = 6, kVocab = 13, kBatch = 8;
inline constexpr double kLr = 0.05;

inline GptConfig tiny_config() {
  return {.layers = 2,
          .hidden = 8,
          .heads = 2,
          .vocab = kVocab,
          .seq_len = kSeq,
          .dropout = 0.1f,
          .init_std = 0.3};
}

inline EngineOptions tiny_options(int64_t lanes, int64_t micro_batch) {
  EngineOptions options{
      .global_batch = kBatch, .micro_batch = micro_batch, .lanes_dp = lanes, .seed = 5, .clip_norm = 0.5};
  return options;
}

// Random tokens; every fifth target is ignored.
inline HostBatch tiny_batch(uint32_t seed) {
  HostBatch batch{.num_samples = kBatch, .seq_len = kSeq};
  std::mt19937 generator(seed);
  for (int64_t i = 0; i < kBatch * kSeq; ++i) {
    batch.tokens.push_back(static_cast<int32_t>(generator() % kVocab));
    batch.targets.push_back(i % 5 == 3 ? kIgnoreIndex : static_cast<int32_t>(generator() % kVocab));
  }
  return batch;
}

// SGD on the linear model, without clipping.
inline EngineOptions linear_options(int64_t samples, int64_t micro_batch) {
  EngineOptions options{.global_batch = samples, .micro_batch = micro_batch};
  options.optimizer.rule = "sgd";
  return options;
}

}  // namespace polyreme::testing
