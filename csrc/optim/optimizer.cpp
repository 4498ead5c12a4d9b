#include "optim/optimizer.h"

#include <algorithm>
#include <cmath>

#include "ops/update.h"

namespace polyreme {
namespace {

// Neighbouring parameters with one weight decay: what one launch updates. Relative to the optimizer's range.
struct DecayRun {
  int64_t begin, end;
  double weight_decay;
};

std::vector<DecayRun> decay_runs(const FlatLayout& layout, const FlatRange& range,
                                 const std::vector<double>& weight_decay) {
  require(weight_decay.size() == layout.size(), "weight_decay has ", weight_decay.size(), " entries for ",
          layout.size(), " parameters");
  std::vector<DecayRun> runs;
  for (size_t i = 0; i < layout.size(); ++i) {
    require(weight_decay[i] >= 0 && std::isfinite(weight_decay[i]), "weight_decay of parameter ", i, " is ",
            weight_decay[i], "; expected a finite number, 0 or more");
    const int64_t begin = std::max(layout.offset(i), range.begin) - range.begin;
    const int64_t next = i + 1 < layout.size() ? layout.offset(i + 1) : layout.num_elements();
    const int64_t end = std::min(next, range.end) - range.begin;
    if (begin >= end) continue;
    if (runs.empty() || runs.back().weight_decay != weight_decay[i])
      runs.push_back({begin, end, weight_decay[i]});
    else
      runs.back().end = end;
  }
  return runs;
}

Tensor zeros(Stream& stream, const FlatRange& range, const char* label) {
  Tensor flat = empty(stream.device(), DType::kF32, {range.size()}, label);
  fill(stream, flat, 0.0f);
  return flat;
}

class AdamW final : public Optimizer {
 public:
  AdamW(Stream& stream, const FlatLayout& layout, const FlatRange& range, const OptimizerOptions& options)
      : runs_(decay_runs(layout, range, options.weight_decay)), options_(options) {
    require(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
            "AdamW: betas (", options.beta1, ", ", options.beta2, "); expected 0 <= beta < 1");
    // The update computes with fp32: an eps that is 0 there would divide the zeros of the gaps by zero.
    const auto eps = static_cast<float>(options.eps);
    require(eps > 0 && std::isfinite(eps), "AdamW: eps=", options.eps,
            "; expected more than 0, and finite, in fp32");
    m_ = zeros(stream, range, "adamw exp_avg");
    v_ = zeros(stream, range, "adamw exp_avg_sq");
  }

  void step(Stream& stream, const Tensor& weights, const Tensor& grads, const Tensor& scale, double lr,
            int64_t step) override {
    for (const DecayRun& run : runs_) {
      const auto part = [&run](const Tensor& flat) { return flat.slice(0, run.begin, run.end); };
      adamw(stream, part(weights), part(grads), part(m_), part(v_), scale,
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
  Sgd(Stream& stream, const FlatLayout& layout, const FlatRange& range, const OptimizerOptions& options)
      : runs_(decay_runs(layout, range, options.weight_decay)), momentum_(options.momentum) {
    require(momentum_ >= 0 && momentum_ < 1, "SGD: momentum=", momentum_, "; expected 0 <= momentum < 1");
    if (momentum_ > 0) buffer_ = zeros(stream, range, "sgd momentum");
  }

  void step(Stream& stream, const Tensor& weights, const Tensor& grads, const Tensor& scale, double lr,
            int64_t step) override {
    for (const DecayRun& run : runs_) {
      const auto part = [&run](const Tensor& flat) { return flat.slice(0, run.begin, run.end); };
      sgd(stream, part(weights), part(grads), buffer_.defined() ? part(buffer_) : Tensor(), scale,
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

std::unique_ptr<Optimizer> make_optimizer(Stream& stream, const FlatLayout& layout, const FlatRange& range,
                                          const OptimizerOptions& options) {
  if (options.rule == "adamw") return std::make_unique<AdamW>(stream, layout, range, options);
  if (options.rule == "sgd") return std::make_unique<Sgd>(stream, layout, range, options);
  throw InvalidArgument(concat("unknown optimizer rule '", options.rule, "'; expected adamw or sgd"));
}

}  // namespace polyreme
