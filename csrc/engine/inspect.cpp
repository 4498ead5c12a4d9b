// Engine: copies of parameters, gradients and optimizer state, and which of them is not finite.
#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "engine/engine.h"
#include "ops/update.h"

namespace polyreme {

std::string Engine::first_not_finite(const std::string& kind) {
  std::vector<bool> is_finite(static_cast<size_t>(map().num_params()));
  for (int unit = 0; unit < map().num_units(); ++unit) {
    const Tensor buffer = unit_buffer(kind, unit);
    for (const int param : map().params_of(unit)) {
      zero_limbs(*stream_, square_sum_);
      exact_sum_squares(*stream_, map().view(buffer, param), square_sum_);
      is_finite[static_cast<size_t>(param)] = std::isfinite(read_sum(square_sum_));
    }
  }
  const auto bad =
      static_cast<size_t>(std::find(is_finite.begin(), is_finite.end(), false) - is_finite.begin());
  return bad < is_finite.size() ? model_.registry.specs()[bad].name : std::string();
}

std::string Engine::what_is_not_finite() {
  // A bad weight spoils every gradient, so it is the better name.
  const std::string weight = first_not_finite("weight");
  if (!weight.empty()) return concat("the weight '", weight, "' was not finite before the step");
  const std::string grad = first_not_finite("grad");
  if (!grad.empty()) return concat("the gradient of '", grad, "' is not finite (the first such parameter)");
  return "every gradient is finite, but the loss of a token is not";
}

Tensor Engine::unit_buffer(const std::string& kind, int unit) {
  if (kind == "weight") return params_.weights.whole(unit);
  std::string known = "weight, grad";
  if (kind == "grad") {
    const Tensor& slice = params_.grads.own()[static_cast<size_t>(unit)];
    require(slice.defined(), "there is no gradient before the first step");
    return params_.weights.gathered(slice, unit);
  }
  for (const auto& [name, slices] : optimizer_->state()) {
    const Tensor& slice = slices[static_cast<size_t>(unit)];
    if (name == kind && slice.defined()) return params_.weights.gathered(slice, unit);
    known += ", " + name;
  }
  throw InvalidArgument(concat("unknown kind '", kind, "'; expected one of ", known));
}

std::vector<MemoryTerm> Engine::memory() const {
  const int64_t lane_samples = options_.global_batch / options_.lanes_dp;
  return memory_terms(
      plan_, model_.registry, optimizer_->state(),
      {.zero = options_.zero,
       .local_lanes = options_.lanes_dp / dp_.size(),
       .micro_batches = options_.zero.round_first ? 1 : ceil_div(lane_samples, options_.micro_batch)});
}

std::vector<float> Engine::read_param(const std::string& name, const std::string& kind) {
  const int param = model_.registry.index(name);
  const Tensor part = map().view(unit_buffer(kind, map().unit_of(param)), param);
  std::vector<float> values(static_cast<size_t>(part.numel()));
  copy_to_host(*stream_, part, values.data());
  stream_->synchronize();
  return values;
}

void Engine::write_param(const std::string& name, const std::vector<float>& values) {
  const int param = model_.registry.index(name);
  const Shape& shape = map().shape_of(param);
  require(static_cast<int64_t>(values.size()) == shape.numel(), "parameter '", name, "' has ",
          shape.to_string(), " = ", shape.numel(), " elements, got ", values.size());
  params_.weights.for_each_part(param, [&](const Tensor& part, int64_t first) {
    copy_from_host(*stream_, &values[static_cast<size_t>(first)], part);
  });
  stream_->synchronize();
}

}  // namespace polyreme
