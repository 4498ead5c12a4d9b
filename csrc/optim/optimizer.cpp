#include "optim/optimizer.h"

#include <algorithm>
#include <cmath>

#include "ops/ops.h"

namespace polyreme {
namespace {

// Neighbouring parameters of a unit with one weight decay: what one launch updates. Relative to the shard's
// slice of the unit.
struct DecayRun {
  int unit;
  int64_t begin, end;
  int64_t shard_begin;  // in the shard
  double weight_decay;
};

std::vector<DecayRun> decay_runs(const ShardMap& map, int64_t shard,
                                 const std::vector<double>& weight_decay) {
  require(weight_decay.size() == static_cast<size_t>(map.num_params()), "weight_decay has ",
          weight_decay.size(), " entries for ", map.num_params(), " parameters");
  for (size_t i = 0; i < weight_decay.size(); ++i)
    require(weight_decay[i] >= 0 && std::isfinite(weight_decay[i]), "weight_decay of parameter ", i, " is ",
            weight_decay[i], "; expected a finite number, 0 or more");
  std::vector<DecayRun> runs;
  for (const ShardMap::Piece& piece : map.pieces(shard)) {
    const int unit = map.unit_of(piece.param);
    const double decay = weight_decay[static_cast<size_t>(piece.param)];
    const int64_t end = piece.unit_shard_begin + piece.size;
    // The gap between two parameters is zero, and an update leaves it so.
    if (!runs.empty() && runs.back().unit == unit && runs.back().weight_decay == decay)
      runs.back().end = end;
    else
      runs.push_back({unit, piece.unit_shard_begin, end, piece.shard_begin, decay});
  }
  return runs;
}

// The run's part of the unit's slice, and of a state tensor.
Tensor part_of(const DecayRun& run, std::span<const Tensor> slices) {
  return slices[static_cast<size_t>(run.unit)].slice(0, run.begin, run.end);
}
Tensor part_of(const DecayRun& run, const Tensor& state) {
  return state.slice(0, run.shard_begin, run.shard_begin + run.end - run.begin);
}

Tensor zeros(Stream& stream, const ShardMap& map, const char* label) {
  Tensor flat = empty(stream.device(), DType::kF32, {map.shard_elements()}, label);
  fill(stream, flat, 0.0f);
  return flat;
}

class AdamW final : public Optimizer {
 public:
  AdamW(Stream& stream, const ShardMap& map, int64_t shard, const OptimizerOptions& options)
      : runs_(decay_runs(map, shard, options.weight_decay)), options_(options) {
    require(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
            "AdamW: betas (", options.beta1, ", ", options.beta2, "); expected 0 <= beta < 1");
    // The update computes with fp32: an eps that is 0 there would divide the zeros of the gaps by zero.
    const auto eps = static_cast<float>(options.eps);
    require(eps > 0 && std::isfinite(eps), "AdamW: eps=", options.eps,
            "; expected more than 0, and finite, in fp32");
    m_ = zeros(stream, map, "adamw exp_avg");
    v_ = zeros(stream, map, "adamw exp_avg_sq");
  }

  void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
            const Tensor& scale, double lr, int64_t step) override {
    for (const DecayRun& run : runs_) {
      adamw(stream, part_of(run, weights), part_of(run, grads), part_of(run, m_), part_of(run, v_), scale,
            {.lr = lr,
             .beta1 = options_.beta1,
             .beta2 = options_.beta2,
             .eps = options_.eps,
             .weight_decay = run.weight_decay,
             .step = step});
    }
  }

  std::vector<std::pair<std::string, Tensor>> state() const override {
    return {{"exp_avg", m_}, {"exp_avg_sq", v_}};
  }

 private:
  std::vector<DecayRun> runs_;
  OptimizerOptions options_;
  Tensor m_, v_;
};

class Sgd final : public Optimizer {
 public:
  Sgd(Stream& stream, const ShardMap& map, int64_t shard, const OptimizerOptions& options)
      : runs_(decay_runs(map, shard, options.weight_decay)), momentum_(options.momentum) {
    require(momentum_ >= 0 && momentum_ < 1, "SGD: momentum=", momentum_, "; expected 0 <= momentum < 1");
    if (momentum_ > 0) buffer_ = zeros(stream, map, "sgd momentum");
  }

  void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
            const Tensor& scale, double lr, int64_t step) override {
    for (const DecayRun& run : runs_) {
      sgd(stream, part_of(run, weights), part_of(run, grads),
          buffer_.defined() ? part_of(run, buffer_) : Tensor(), scale,
          {.lr = lr, .momentum = momentum_, .weight_decay = run.weight_decay, .first_step = step == 1});
    }
  }

  std::vector<std::pair<std::string, Tensor>> state() const override {
    if (!buffer_.defined()) return {};
    return {{"momentum", buffer_}};
  }

 private:
  std::vector<DecayRun> runs_;
  double momentum_;
  Tensor buffer_;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(Stream& stream, const ShardMap& map, int64_t shard,
                                          const OptimizerOptions& options) {
  if (options.rule == "adamw") return std::make_unique<AdamW>(stream, map, shard, options);
  if (options.rule == "sgd") return std::make_unique<Sgd>(stream, map, shard, options);
  throw InvalidArgument(concat("unknown optimizer rule '", options.rule, "'; expected adamw or sgd"));
}

}  // namespace polyreme
