#include "optim/rule_base.h"

#include <sys/mman.h>

#include <cmath>
#include <cstdlib>

#include "base/math.h"
#include "ops/update.h"

namespace polyreme {
namespace {

void check_list(const char* name, const std::vector<double>& values, int num_params) {
  require(values.size() == static_cast<size_t>(num_params), name, " has ", values.size(), " entries for ",
          num_params, " parameters");
  for (size_t i = 0; i < values.size(); ++i)
    require(values[i] >= 0 && std::isfinite(values[i]), name, " of parameter ", i, " is ", values[i],
            "; expected a finite number, 0 or more");
}

void check_flags(const char* name, const std::vector<uint8_t>& flags, int num_params) {
  require(flags.empty() || flags.size() == static_cast<size_t>(num_params), name, " has ", flags.size(),
          " entries for ", num_params, " parameters");
}

// fp32 memory of the host, which no device counts as its own.
Tensor host_tensor(Device& device, const Shape& shape) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const auto size_bytes = static_cast<size_t>(shape.numel()) * sizeof(float);
  const size_t alignment = size_bytes >= kHugePage ? kHugePage : size_t{64};
  const auto rounded = static_cast<size_t>(
      round_up(static_cast<int64_t>(std::max(size_bytes, size_t{1})), static_cast<int64_t>(alignment)));
  const std::shared_ptr<void> memory(std::aligned_alloc(alignment, rounded), std::free);
  require<OutOfMemory>(memory != nullptr, "out of host memory: ", rounded, " bytes for optimizer state");
  if (alignment == kHugePage) madvise(memory.get(), rounded, MADV_HUGEPAGE);
  return Tensor(device.wrap_host(memory.get(), size_bytes, memory), DType::kF32, shape);
}

}  // namespace

void Optimizer::applied(std::span<const uint8_t> has_grad) {
  for (size_t i = 0; i < updates_.size(); ++i)
    if (has_grad.empty() || has_grad[i]) ++updates_[i];
}

void Optimizer::set_updates(std::vector<int64_t> updates) {
  require(updates.size() == updates_.size(), "update counts of ", updates.size(), " parameters for ",
          updates_.size());
  for (size_t i = 0; i < updates.size(); ++i)
    require(updates[i] >= 0, "parameter ", i, " cannot have had ", updates[i], " updates");
  updates_ = std::move(updates);
}

RuleBase::RuleBase(const ShardMap& map, int64_t shard, const OptimizerOptions& options)
    : Optimizer(map.num_params()), map_(map), shard_(shard), options_(options), pieces_(map.pieces(shard)) {
  check_list("weight_decay", options.weight_decay, map.num_params());
  if (!options.lr_multiplier.empty()) check_list("lr_multiplier", options.lr_multiplier, map.num_params());
  check_flags("trainable", options.trainable, map.num_params());
  check_flags("elementwise", options.elementwise, map.num_params());
  state_.reserve(kMaxKinds);
}

std::vector<RuleBase::Run> RuleBase::runs(const OptimizerStep& step, const std::function<bool(int)>& wanted,
                                          bool merged) const {
  check_flags("has_grad", {step.has_grad.begin(), step.has_grad.end()}, map_.num_params());
  std::vector<Run> result;
  for (const ShardMap::Piece& piece : pieces_) {
    const auto i = static_cast<size_t>(piece.param);
    if (!is_trainable(piece.param) || (!step.has_grad.empty() && !step.has_grad[i]) || !wanted(piece.param))
      continue;
    const Run run{.unit = map_.unit_of(piece.param),
                  .param = piece.param,
                  .begin = piece.unit_shard_begin,
                  .end = piece.unit_shard_begin + piece.size,
                  .step = updates()[i] + 1,
                  .lr = step.lr * (options_.lr_multiplier.empty() ? 1.0 : options_.lr_multiplier[i]),
                  .weight_decay = options_.weight_decay[i]};
    // A parameter in between that is left out must not be joined over.
    const bool neighbours = !result.empty() && result.back().unit == run.unit &&
                            run.begin - result.back().end < ShardMap::kAlignment;
    if (merged && neighbours && result.back().step == run.step && result.back().lr == run.lr &&
        result.back().weight_decay == run.weight_decay)
      result.back().end = run.end;
    else
      result.push_back(run);
  }
  return result;
}

std::vector<RuleBase::Run> RuleBase::runs(const OptimizerStep& step) const {
  return runs(
      step, [](int) { return true; }, /*merged=*/true);
}

void RuleBase::for_each_run(Stream& stream, const OptimizerStep& step,
                            const std::function<void(const Run&, std::span<const Tensor>)>& update) const {
  const std::vector<Run> all = runs(step);
  for (size_t i = 0; i < all.size();) {
    const auto unit = static_cast<size_t>(all[i].unit);
    std::vector<Tensor> slices;
    for (const OptimizerState& kind : state_) {
      slices.push_back(kind.slices[unit]);
      if (!kind.on_host) continue;
      slices.back() = empty(stream.device(), DType::kF32, kind.slices[unit].shape(), "visiting state");
      copy(stream, kind.slices[unit], slices.back());
    }
    for (; i < all.size() && static_cast<size_t>(all[i].unit) == unit; ++i) {
      std::vector<Tensor> parts;
      for (const Tensor& slice : slices) parts.push_back(all[i].part(slice));
      update(all[i], parts);
    }
    for (size_t kind = 0; kind < state_.size(); ++kind)
      if (state_[kind].on_host) copy(stream, slices[kind], state_[kind].slices[unit]);
  }
}

const std::vector<Tensor>& RuleBase::add_state(Stream& stream, const char* name,
                                               const std::function<bool(int)>& wanted) {
  require(state_.size() < kMaxKinds, "a rule has at most ", kMaxKinds, " kinds of state");
  OptimizerState& state = state_.emplace_back(OptimizerState{name, options_.offload, {}});
  for (int unit = 0; unit < map_.num_units(); ++unit) {
    bool needed = false;
    for (const int param : map_.params_of(unit)) needed |= is_trainable(param) && wanted(param);
    Tensor& slice = state.slices.emplace_back();
    if (!needed) continue;
    const Shape shape{map_.shard_slice(unit, shard_).size()};
    slice = options_.offload ? host_tensor(stream.device(), shape)
                             : empty(stream.device(), DType::kF32, shape, "optimizer state");
    fill(stream, slice, 0.0f);
  }
  return state.slices;
}

const std::vector<Tensor>& RuleBase::add_state(Stream& stream, const char* name) {
  return add_state(stream, name, [](int) { return true; });
}

void RuleBase::check_betas(const char* rule, const OptimizerOptions& options) {
  require(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1, rule,
          ": betas (", options.beta1, ", ", options.beta2, "); expected 0 <= beta < 1");
}

void RuleBase::check_eps(const char* rule, const OptimizerOptions& options) {
  // The update computes with fp32: an eps that is 0 there would divide the zeros of the gaps by zero.
  const auto eps = static_cast<float>(options.eps);
  require(eps > 0 && std::isfinite(eps), rule, ": eps=", options.eps,
          "; expected more than 0, and finite, in fp32");
}

void RuleBase::check_momentum(const char* rule, const OptimizerOptions& options) {
  require(options.momentum >= 0 && options.momentum < 1, rule, ": momentum=", options.momentum,
          "; expected 0 <= momentum < 1");
}

}  // namespace polyreme
