#include "optim/sharded_optimizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/hash.h"
#include "mesh/agreement.h"
#include "ops/update.h"

namespace polyreme {
namespace {

size_t at(int i) { return static_cast<size_t>(i); }

const ShardedOptimizerOptions& checked(const ShardedOptimizerOptions& options,
                                       const std::vector<ParamSpec>& specs) {
  require(!specs.empty(), "ShardedOptimizer: there are no parameters");
  require<NotAvailable>(options.stage != 3,
                        "ShardedOptimizer: stage=3 would divide the weights themselves, which the ",
                        "caller's arrays hold whole; use stage=2, or a polyreme Trainer with zero=3");
  require(options.stage >= 0 && options.stage <= 2, "ShardedOptimizer: stage=", options.stage,
          "; expected 0, 1 or 2");
  require(options.clip_norm >= 0, "ShardedOptimizer: clip_norm=", options.clip_norm,
          "; expected 0 (no limit) or more");
  require(options.bucket_bytes >= 1, "ShardedOptimizer: bucket_bytes=", options.bucket_bytes,
          "; expected at least 1");
  check_wire(options.wire);
  return options;
}

int64_t local_lanes(const ShardedOptimizerOptions& options, const Communicator& group) {
  const int64_t lanes = options.lanes == 0 ? group.size() : options.lanes;
  check_lanes("dp", lanes, group.size());
  return lanes / group.size();
}

ShardMap make_map(const std::vector<ParamSpec>& specs, const ShardedOptimizerOptions& options,
                  int64_t num_shards) {
  const std::vector<int> groups = state_groups(specs, options.rule);
  return {specs, make_units(specs, {}, {.bucket_bytes = options.bucket_bytes, .group_of_param = groups}),
          num_shards};
}

int64_t bytes_of(const std::vector<Tensor>& tensors) {
  int64_t bytes = 0;
  for (const Tensor& tensor : tensors)
    if (tensor.defined()) bytes += tensor.size_bytes();
  return bytes;
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(Device& device, Stream& background, Communicator& group,
                                   std::vector<ParamSpec> specs, const ShardedOptimizerOptions& options)
    : device_(device),
      group_(group),
      specs_(std::move(specs)),
      options_(checked(options, specs_)),
      compute_(device.create_stream("optimizer")),
      map_(make_map(specs_, options_, options_.stage == 0 ? 1 : group.size())),
      gradients_(*compute_, background, map_, group, options_.rule.trainable,
                 {.keeps_slices = options_.stage == 2,
                  .local_lanes = local_lanes(options_, group),
                  .micro_batches = options_.micro_batches,
                  .wire = options_.wire}),
      rule_(make_optimizer(*compute_, map_, shard(), &group, options_.rule)),
      weights_(at(map_.num_units())),
      sums_(empty(device, DType::kI64, norm_shape(options_.norm_type), "gradient norm")),
      scale_(empty(device, DType::kF32, {1}, "gradient scale")) {
  for (int unit = 0; unit < map_.num_units(); ++unit) {
    if (!gradients_.uses(unit)) continue;
    weights_[at(unit)] = empty(device, DType::kF32, {map_.shard_slice(unit, shard()).size()}, "weights");
    fill(*compute_, weights_[at(unit)], 0.0f);
  }
  agree_on_settings();
}

void ShardedOptimizer::agree_on_settings() {
  polyreme::agree(group_, *compute_, {fact("number of parameters", static_cast<int64_t>(specs_.size()))},
                  nullptr);
  std::vector<Fact> facts = {
      fact("stage", options_.stage),
      fact("lanes", options_.lanes),
      fact("micro_batches", options_.micro_batches),
      fact("bucket_bytes", options_.bucket_bytes),
      fact("dtype of communicated gradients", std::string(dtype_name(options_.wire))),
      fact("clipping", concat(options_.clip_norm, " in norm ", options_.norm_type)),
      fact("rule", describe(options_.rule)),
      fact("stochastic rounding", concat(options_.stochastic_rounding, " of seed ", options_.seed))};
  for (const ParamSpec& spec : specs_)
    facts.push_back(fact("parameter", concat(spec.name, " ", spec.shape, " ", dtype_name(spec.dtype))));
  polyreme::agree(group_, *compute_, facts, nullptr);
}

void ShardedOptimizer::agree(const std::exception_ptr& refusal) {
  polyreme::agree(group_, *compute_, {}, refusal);
}

ShardedStepResult ShardedOptimizer::meet(const ShardedStep& step, std::vector<uint8_t>& has_grad) {
  const auto bits = [](const char* name, double value) {
    return Fact{name, std::bit_cast<int64_t>(value), concat(value)};
  };
  const int64_t count = polyreme::agree(
      group_, *compute_,
      {bits("learning rate", step.lr),
       bits("loss scale", step.loss_scale),
       {"way of averaging", int64_t{step.counted}, step.counted ? "with count" : "without count"}},
      nullptr, step.count);
  const std::vector<uint8_t>& own = gradients_.had_grad();
  std::vector<int32_t> flags(own.begin(), own.end());
  const WaitAtExit wait(*compute_);
  const Tensor all = empty(device_, DType::kI32, {map_.num_params()}, "parameters with gradients");
  copy_from_host(*compute_, flags.data(), all);
  group_.all_reduce(all, ReduceOp::kMax, *compute_)->wait_on(*compute_);
  copy_to_host(*compute_, all, flags.data());
  compute_->synchronize();
  has_grad.assign(flags.begin(), flags.end());
  return {.count = count};
}

ShardedStepResult ShardedOptimizer::step(const ShardedStep& step) {
  gradients_.finish();
  std::vector<uint8_t> has_grad;
  ShardedStepResult result = meet(step, has_grad);
  if (result.count <= 0) return result;  // nothing to learn from: not even weight decay is applied
  const double multiplier = 1.0 / (static_cast<double>(result.count) * step.loss_scale);
  const bool is_max = std::isinf(options_.norm_type);
  std::vector<int64_t> sums(static_cast<size_t>(sums_.numel()), 0);
  const WaitAtExit wait(*compute_);
  copy_from_host(*compute_, sums.data(), sums_);
  for (const Tensor& own : gradients_.own())
    if (own.defined()) add_to_norm(*compute_, own, options_.norm_type, sums_);
  if (map_.num_shards() > 1)
    group_.all_reduce(sums_, is_max ? ReduceOp::kMax : ReduceOp::kSum, *compute_)->wait_on(*compute_);
  clip_scale(*compute_, sums_, options_.clip_norm, scale_, multiplier, options_.norm_type);
  rule_->step(*compute_, weights_, gradients_.own(), {.lr = step.lr, .scale = scale_, .has_grad = has_grad});
  copy_to_host(*compute_, sums_, sums.data());
  compute_->synchronize();
  result.grad_norm = norm_value(sums, options_.norm_type) * multiplier;
  result.applied = std::isfinite(result.grad_norm);
  if (result.applied)
    rule_->applied(has_grad);
  else
    find_culprit(result);
  return result;
}

int64_t ShardedOptimizer::reduce_on_host(int64_t value, ReduceOp op) {
  const WaitAtExit wait(*compute_);
  const Tensor data = empty(device_, DType::kI64, {1}, "agreed number");
  copy_from_host(*compute_, &value, data);
  group_.all_reduce(data, op, *compute_)->wait_on(*compute_);
  copy_to_host(*compute_, data, &value);
  compute_->synchronize();
  return value;
}

void ShardedOptimizer::find_culprit(ShardedStepResult& result) {
  std::vector<int32_t> flags(specs_.size());
  copy_to_host(*compute_, gradients_.not_finite(), flags.data());
  compute_->synchronize();
  const auto first = std::ranges::find_if(flags, [](int32_t flag) { return flag != 0; });
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  // Ordered by parameter, then by rank.
  const int64_t mine = first == flags.end() ? kNone : (first - flags.begin()) * group_.size() + group_.rank();
  const int64_t culprit = reduce_on_host(mine, ReduceOp::kMin);
  if (culprit == kNone) return;
  result.culprit_param = static_cast<int>(culprit / group_.size());
  result.culprit_rank = static_cast<int>(culprit % group_.size());
}

const std::vector<Tensor>& ShardedOptimizer::slices(const std::string& kind) const {
  if (kind == "weight") return weights_;
  if (kind == "grad") return gradients_.own();
  std::string known = "weight, grad";
  for (const OptimizerState& state : rule_->state()) {
    if (state.name == kind) return state.slices;
    known += ", " + state.name;
  }
  throw InvalidArgument(concat("unknown kind '", kind, "'; expected one of ", known));
}

void ShardedOptimizer::round_weight(const Tensor& from, const Tensor& to, int param, int64_t begin) {
  // By the number of updates: a weight that a step leaves alone is rounded as before.
  const RandomKey key{options_.seed, RandomPurpose::kRounding,
                      static_cast<uint32_t>(text_hash(specs_[at(param)].name)),
                      static_cast<uint32_t>(rule_->updates()[at(param)])};
  round_stochastic(*compute_, from, to, key, begin);
}

Tensor ShardedOptimizer::gathered(int unit, const Tensor& own, DType dtype, bool rounds) {
  if (map_.num_shards() == 1) return own;
  const Tensor whole = empty(device_, dtype, {map_.unit_elements(unit)}, "gathered unit");
  const FlatRange range = map_.shard_slice(unit, shard());
  const Tensor part = whole.slice(0, range.begin, range.end);
  if (rounds) {
    fill(*compute_, part, 0.0f);
    for (const ShardMap::Piece& piece : map_.pieces(shard())) {
      if (map_.unit_of(piece.param) != unit) continue;
      const auto of = [&piece](const Tensor& slice) {
        return slice.slice(0, piece.unit_shard_begin, piece.unit_shard_begin + piece.size);
      };
      round_weight(of(own), of(part), piece.param, piece.param_begin);
    }
  } else {
    cast(*compute_, own, part);
  }
  group_.all_gather(part, whole, *compute_)->wait_on(*compute_);
  return whole;
}

void ShardedOptimizer::read(const std::string& kind, const std::vector<Tensor>& out) {
  const std::vector<Tensor>& own = slices(kind);
  require(out.size() == specs_.size(), "read: ", out.size(), " arrays for ", specs_.size(), " parameters");
  const WaitAtExit wait(*compute_);
  for (int unit = 0; unit < map_.num_units(); ++unit) {
    if (!own[at(unit)].defined()) continue;
    Tensor whole;
    for (const int param : map_.params_of(unit)) {
      const Tensor& to = out[at(param)];
      if (!to.defined()) continue;
      const bool rounds = kind == "weight" && to.dtype() == DType::kBF16 && options_.stochastic_rounding;
      if (!whole.defined()) whole = gathered(unit, own[at(unit)], to.dtype(), rounds);
      const Tensor from = map_.view(whole, param).view({to.numel()});
      if (rounds && map_.num_shards() == 1)
        round_weight(from, to.view({to.numel()}), param, 0);
      else
        cast(*compute_, from, to.view({to.numel()}));
    }
  }
  compute_->synchronize();
}

Tensor ShardedOptimizer::piece(const std::string& kind, const ShardMap::Piece& piece) const {
  const Tensor& slice = slices(kind)[at(map_.unit_of(piece.param))];
  return slice.defined() ? slice.slice(0, piece.unit_shard_begin, piece.unit_shard_begin + piece.size)
                         : Tensor();
}

void ShardedOptimizer::write(const std::string& kind, int param, const Tensor& values) {
  require(kind != "grad", "write: gradients come by add");
  require(values.numel() == map_.shape_of(param).numel(), "parameter '", specs_[at(param)].name, "' has ",
          map_.shape_of(param).numel(), " elements, got ", values.numel());
  const Tensor flat = values.view({values.numel()});
  const WaitAtExit wait(*compute_);
  for (const ShardMap::Piece& each : map_.pieces(shard())) {
    if (each.param != param) continue;
    const Tensor part = piece(kind, each);
    if (part.defined()) cast(*compute_, flat.slice(0, each.param_begin, each.param_begin + each.size), part);
  }
  compute_->synchronize();
}

std::vector<std::pair<std::string, int64_t>> ShardedOptimizer::persistent_bytes() const {
  int64_t gradients = 0, state = 0;
  for (int unit = 0; unit < map_.num_units(); ++unit)
    if (gradients_.uses(unit))
      gradients +=
          4 * (options_.stage == 2 ? map_.shard_slice(unit, shard()).size() : map_.unit_elements(unit));
  for (const OptimizerState& kind : rule_->state()) state += bytes_of(kind.slices);
  return {{"weights", bytes_of(weights_)}, {"gradients", gradients}, {"state", state}};
}

}  // namespace polyreme
