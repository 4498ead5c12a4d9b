#include "optim/optimizer.h"

#include "ops/update.h"
#include "optim/rule_base.h"

namespace polyreme {
namespace {

class AdamW final : public RuleBase {
 public:
  AdamW(Stream& stream, const ShardMap& map, int64_t shard, const OptimizerOptions& options)
      : RuleBase(map, shard, options), m_(add_state(stream, "exp_avg")), v_(add_state(stream, "exp_avg_sq")) {
    check_betas("AdamW", options);
    check_eps("AdamW", options);
  }

  void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
            const OptimizerStep& step) override {
    for (const Run& run : runs(step))
      adamw(stream, run.part(weights), run.part(grads), run.part(m_), run.part(v_), step.scale,
            {.lr = run.lr,
             .beta1 = options().beta1,
             .beta2 = options().beta2,
             .eps = options().eps,
             .weight_decay = run.weight_decay,
             .step = run.step});
  }

 private:
  const std::vector<Tensor>& m_;
  const std::vector<Tensor>& v_;
};

class Sgd final : public RuleBase {
 public:
  Sgd(Stream& stream, const ShardMap& map, int64_t shard, const OptimizerOptions& options)
      : RuleBase(map, shard, options) {
    check_momentum("SGD", options);
    if (options.momentum > 0) buffer_ = &add_state(stream, "momentum");
  }

  void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
            const OptimizerStep& step) override {
    for (const Run& run : runs(step))
      sgd(stream, run.part(weights), run.part(grads), buffer_ ? run.part(*buffer_) : Tensor(), step.scale,
          {.lr = run.lr,
           .momentum = options().momentum,
           .weight_decay = run.weight_decay,
           .first_step = run.step == 1});
  }

 private:
  const std::vector<Tensor>* buffer_ = nullptr;
};

class Lion final : public RuleBase {
 public:
  Lion(Stream& stream, const ShardMap& map, int64_t shard, const OptimizerOptions& options)
      : RuleBase(map, shard, options), m_(add_state(stream, "exp_avg")) {
    check_betas("Lion", options);
  }

  void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
            const OptimizerStep& step) override {
    for (const Run& run : runs(step))
      lion(stream, run.part(weights), run.part(grads), run.part(m_), step.scale,
           {.lr = run.lr,
            .beta1 = options().beta1,
            .beta2 = options().beta2,
            .weight_decay = run.weight_decay});
  }

 private:
  const std::vector<Tensor>& m_;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(Stream& stream, const ShardMap& map, int64_t shard,
                                          Communicator* shard_group, const OptimizerOptions& options) {
  require(map.num_shards() == 1 || shard_group != nullptr, "an optimizer of ", map.num_shards(),
          " shards needs the group of the ranks that hold them");
  if (options.rule == "adamw") return std::make_unique<AdamW>(stream, map, shard, options);
  if (options.rule == "sgd") return std::make_unique<Sgd>(stream, map, shard, options);
  if (options.rule == "lion") return std::make_unique<Lion>(stream, map, shard, options);
  if (options.rule == "lamb") return make_lamb(stream, map, shard, shard_group, options);
  if (options.rule == "muon") return make_muon(stream, map, shard, shard_group, options);
  throw InvalidArgument(
      concat("unknown optimizer rule '", options.rule, "'; expected adamw, sgd, lion, lamb or muon"));
}

std::string describe(const OptimizerOptions& options) {
  std::string text = concat(options.rule, " betas=", options.beta1, ",", options.beta2, " eps=", options.eps,
                            " momentum=", options.momentum);
  const auto list = [&text](const char* name, const auto& values) {
    text += concat(" ", name, "=");
    for (const auto value : values) text += concat(+value, " ");
  };
  list("weight_decay", options.weight_decay);
  list("lr_multiplier", options.lr_multiplier);
  list("trainable", options.trainable);
  list("elementwise", options.elementwise);
  return text;
}

std::vector<int> state_groups(std::span<const ParamSpec> specs, const OptimizerOptions& options) {
  std::vector<int> groups;
  for (size_t i = 0; i < specs.size(); ++i) {
    const bool frozen = !options.trainable.empty() && options.trainable[i] == 0;
    const bool matrix =
        options.rule == "muon" && is_muon_matrix(options, static_cast<int>(i), specs[i].padded_shape);
    groups.push_back(frozen ? 2 : (matrix ? 1 : 0));
  }
  return groups;
}

}  // namespace polyreme
