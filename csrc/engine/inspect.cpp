// Engine: copies of parameters, gradients and optimizer state, and which of them is not finite.
#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "engine/engine.h"
#include "engine/layer_steps.h"
#include "mesh/agreement.h"
#include "ops/update.h"

namespace polyreme {
size_t Engine::first_not_finite(const std::string& kind) {
  int64_t first = static_cast<int64_t>(model_.registry.specs().size());
  for (int unit = 0; unit < map().num_units(); ++unit) {
    if (kind == "grad" && plan_.is_frozen[static_cast<size_t>(unit)]) continue;
    const Tensor buffer = unit_buffer(kind, unit);
    for (const int param : map().params_of(unit)) {
      zero_limbs(*stream_, square_sum_);
      exact_sum_squares(*stream_, map().view(buffer, param), square_sum_);
      if (!std::isfinite(read_sum(square_sum_)))
        first = std::min<int64_t>(first, part_.whole[static_cast<size_t>(param)]);
    }
  }
  const std::vector<Communicator*> others = {pipeline_ ? &pipeline_->group() : nullptr,
                                             tp_ ? &tp_->group() : nullptr};
  for (Communicator* group : others) {
    if (!group) continue;
    const std::vector<int64_t> found = gather_values(*group, *stream_, {first});
    first = *std::min_element(found.begin(), found.end());
  }
  return static_cast<size_t>(first);
}

std::string Engine::what_is_not_finite() {
  const std::vector<ParamSpec>& specs = model_.registry.specs();
  // A bad weight spoils every gradient, so it is the better name.
  const size_t weight = first_not_finite("weight");
  if (weight < specs.size())
    return concat("the weight '", specs[weight].name, "' was not finite before the step");
  const size_t grad = first_not_finite("grad");
  if (grad >= specs.size()) return "every gradient is finite, but the loss of a token is not";
  std::string text =
      concat("the gradient of '", specs[grad].name, "' is not finite (the first such parameter)");
  const int param = part_.local[grad];
  if (!params_.grads.watches_ranks() || param < 0) return text;
  // Which ranks brought it into the sum, by what each has seen of its units.
  int64_t is_bad = 0;
  for (int lane = 0; lane < part_.num_parts[grad]; ++lane) {
    const Tensor squares = params_.grads.local_squares(map().unit_of(param + lane));
    if (!std::isfinite(read_sum(squares))) is_bad = 1;
  }
  if (tp_) {
    const std::vector<int64_t> found = gather_values(tp_->group(), *stream_, {is_bad});
    is_bad = *std::max_element(found.begin(), found.end());
  }
  const std::vector<int64_t> bad = gather_values(dp_, *stream_, {is_bad});
  const auto first = std::find(bad.begin(), bad.end(), 1);
  if (first == bad.end()) return text + "; no rank alone has it, their sum is too large";
  return text + concat("; dp rank ", first - bad.begin(), " is the first of ",
                       std::count(bad.begin(), bad.end(), 1), " to have it");
}

void Engine::check_kind(const std::string& kind, size_t param) const {
  std::string known = "weight, master, grad";
  bool is_known = kind == "weight" || kind == "master" || kind == "grad";
  for (const OptimizerState& state : optimizer_->state()) {
    is_known |= state.name == kind;
    known += ", " + state.name;
  }
  require(is_known, "unknown kind '", kind, "'; expected one of ", known);
  require(kind != "grad" || grad_scale_, "there is no gradient before the first step");
  const std::vector<uint8_t>& trainable = options_.optimizer.trainable;
  const bool learns = trainable.empty() || trainable[param] != 0;
  require(learns || kind == "weight" || kind == "master", "the parameter is frozen: it has no ",
          kind == "grad" ? "gradient" : concat("'", kind, "'"));
}

Tensor Engine::unit_buffer(const std::string& kind, int unit) {
  if (kind == "weight") return wide(*stream_, params_.weights.whole(unit));
  if (kind == "master") return params_.weights.whole_masters(unit);
  std::string known = "weight, master, grad";
  if (kind == "grad") {
    return params_.weights.gathered(params_.grads.own()[static_cast<size_t>(unit)], unit);
  }
  for (const auto& [name, on_host, slices] : optimizer_->state()) {
    const Tensor& slice = slices[static_cast<size_t>(unit)];
    if (name == kind) return params_.weights.gathered(slice, unit);
    known += ", " + name;
  }
  throw InvalidArgument(concat("unknown kind '", kind, "'; expected one of ", known));
}

std::vector<MemoryTerm> Engine::memory() const {
  const int64_t lane_samples = options_.global_batch / options_.lanes_dp;
  std::vector<MemoryTerm> terms = memory_terms(
      plan_, part_.registry, optimizer_->state(),
      {.zero = options_.zero,
       .local_lanes = options_.lanes_dp / dp_.size(),
       .tp_lanes = part_.lanes.count,
       .micro_batches = options_.zero.round_first ? 1 : ceil_div(lane_samples, options_.micro_batch),
       .ranks = dp_.size()});
  if (pipeline_) {
    const auto lanes = std::ranges::count_if(micro_ranges(), &MicroRange::completes_lane);
    for (const MemoryTerm& term : pipeline_->memory(lanes)) terms.push_back(term);
  }
  return terms;
}

}  // namespace polyreme
