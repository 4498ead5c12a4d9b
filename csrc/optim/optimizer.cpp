#include "optim/optimizer.h"

#include "ops/update.h"
#include "optim/rule_base.h"

namespace polyreme {
namespace {

class AdamW final : public RuleBase {
 public:
  AdamW(Stream& stream, const ShardMap& map, int64_t shard, const OptimizerOptions& options)
      : RuleBase(map, shard, options) {
    check_betas("AdamW", options);
    check_eps("AdamW", options);
    add_state(stream, "exp_avg");
    add_state(stream, "exp_avg_sq");
  }

  void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
            const OptimizerStep& step) override {
    for_each_run(stream, step, [&](const Run& run, std::span<const Tensor> state) {
      adamw(stream, run.part(weights), run.part(grads), state[0], state[1], step.scale,
            {.lr = run.lr,
             .beta1 = options().beta1,
             .beta2 = options().beta2,
             .eps = options().eps,
             .weight_decay = run.weight_decay,
             .step = run.step});
    });
  }
};

class Sgd final : public RuleBase {
 public:
  Sgd(Stream& stream, const ShardMap& map, int64_t shard, const OptimizerOptions& options)
      : RuleBase(map, shard, options) {
    check_momentum("SGD", options);
    if (options.momentum > 0) add_state(stream, "momentum");
  }

  void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
            const OptimizerStep& step) override {
    for_each_run(stream, step, [&](const Run& run, std::span<const Tensor> state) {
      sgd(stream, run.part(weights), run.part(grads), state.empty() ? Tensor() : state[0], step.scale,
          {.lr = run.lr,
           .momentum = options().momentum,
           .weight_decay = run.weight_decay,
           .first_step = run.step == 1});
    });
  }
};

class Lion final : public RuleBase {
 public:
  Lion(Stream& stream, const ShardMap& map, int64_t shard, const OptimizerOptions& options)
      : RuleBase(map, shard, options) {
    check_betas("Lion", options);
    add_state(stream, "exp_avg");
  }

  void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
            const OptimizerStep& step) override {
    for_each_run(stream, step, [&](const Run& run, std::span<const Tensor> state) {
      lion(stream, run.part(weights), run.part(grads), state[0], step.scale,
           {.lr = run.lr,
            .beta1 = options().beta1,
            .beta2 = options().beta2,
            .weight_decay = run.weight_decay});
    });
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(Stream& stream, const ShardMap& map, int64_t shard,
                                          Communicator* shard_group, const OptimizerOptions& options,
                                          const ParamParts& parts) {
  require(map.num_shards() == 1 || shard_group != nullptr, "an optimizer of ", map.num_shards(),
          " shards needs the group of the ranks that hold them");
  const Device& device = stream.device();
  require<NotAvailable>(
      device.kind() == DeviceKind::kCpu || !options.offload, "offload: the rules of ", device.description(),
      " do not work on memory of the host; leave it out, shard with zero=1 or higher, or train"
      " with device='cpu'");
  if (options.rule == "adamw") return std::make_unique<AdamW>(stream, map, shard, options);
  if (options.rule == "sgd") return std::make_unique<Sgd>(stream, map, shard, options);
  if (options.rule == "lion") return std::make_unique<Lion>(stream, map, shard, options);
  require<NotAvailable>(!options.offload || (options.rule != "lamb" && options.rule != "muon"),
                        "offload with ", options.rule,
                        ", which reads its state more than once in an update: this version offloads ",
                        "the state of adamw, sgd and lion; use one of them, or offload=False");
  if (options.rule == "lamb") return make_lamb(stream, map, shard, shard_group, options, parts);
  if (options.rule == "muon") return make_muon(stream, map, shard, shard_group, options, parts);
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
