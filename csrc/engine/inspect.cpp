// Engine: copies of parameters, gradients and optimizer state, and which of them is not finite.
#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "engine/engine.h"
#include "engine/layer_steps.h"
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
  if (pipeline_) {
    const Tensor on_device = empty(device_, DType::kI64, {1}, "first parameter");
    copy_from_host(*stream_, &first, on_device);
    pipeline_->group().all_reduce(on_device, ReduceOp::kMin, *stream_)->wait_on(*stream_);
    copy_to_host(*stream_, on_device, &first);
    stream_->synchronize();
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
  // Which ranks brought it into the sum, by what each has seen of its unit.
  const Tensor squares = params_.grads.local_squares(map().unit_of(param));
  const int64_t is_bad = std::isfinite(read_sum(squares)) ? 0 : 1;
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
  for (const auto& [name, slices] : optimizer_->state()) {
    const Tensor& slice = slices[static_cast<size_t>(unit)];
    require(name != kind || slice.defined(), "the parameter has no '", kind, "'");
    if (name == kind) return params_.weights.gathered(slice, unit);
    known += ", " + name;
  }
  throw InvalidArgument(concat("unknown kind '", kind, "'; expected one of ", known));
}

std::vector<MemoryTerm> Engine::memory() const {
  const int64_t lane_samples = options_.global_batch / options_.lanes_dp;
  return memory_terms(
      plan_, part_.registry, optimizer_->state(),
      {.zero = options_.zero,
       .local_lanes = options_.lanes_dp / dp_.size(),
       .micro_batches = options_.zero.round_first ? 1 : ceil_div(lane_samples, options_.micro_batch),
       .ranks = dp_.size()});
}

std::vector<float> Engine::read_param(const std::string& name, const std::string& kind) {
  const auto whole = static_cast<size_t>(model_.registry.index(name));
  const int param = part_.local[whole];
  check_kind(kind, whole);
  const Tensor part =
      param >= 0 ? map().view(unit_buffer(kind, map().unit_of(param)), param)
                 : empty(device_, DType::kF32, model_.registry.specs()[whole].padded_shape, "parameter");
  if (pipeline_) pipeline_->group().broadcast(part, part_.stage_of[whole], *stream_)->wait_on(*stream_);
  std::vector<float> values(static_cast<size_t>(part.numel()));
  copy_to_host(*stream_, part, values.data());
  stream_->synchronize();
  if (kind == "grad" && *grad_scale_ != 1)
    for (float& value : values) value = static_cast<float>(value / *grad_scale_);
  return values;
}

void Engine::write_param(const std::string& name, const std::vector<float>& values) {
  const auto whole = static_cast<size_t>(model_.registry.index(name));
  const int param = part_.local[whole];
  const Shape& shape = model_.registry.specs()[whole].padded_shape;
  require(static_cast<int64_t>(values.size()) == shape.numel(), "parameter '", name, "' has ",
          shape.to_string(), " = ", shape.numel(), " elements, got ", values.size());
  if (pipeline_) pipeline_->write_shared(static_cast<int>(whole), values);
  if (param < 0) return;  // on another stage
  params_.weights.write(param, [&](const Tensor& part, int64_t first) {
    copy_from_host(*stream_, &values[static_cast<size_t>(first)], part);
  });
  stream_->synchronize();
}

}  // namespace polyreme
