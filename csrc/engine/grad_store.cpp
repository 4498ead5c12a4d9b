#include "engine/grad_store.h"

#include <algorithm>
#include <utility>

#include "ops/ops.h"

namespace polyreme {
namespace {

size_t at(int i) { return static_cast<size_t>(i); }

}  // namespace

GradStore::GradStore(Stream& compute, Stream& background, const ParamRegistry& registry, const UnitPlan& plan,
                     const DpGroups& groups, const TensorParallel* tp, int64_t local_lanes,
                     const ZeroOptions& options, bool watch_ranks)
    : compute_(compute),
      background_(background),
      plan_(plan),
      groups_(groups),
      tp_(tp),
      round_first_(options.round_first),
      keeps_slices_(options.stage >= 2 && groups.num_shards() > 1),
      completed_(compute.device().create_event()) {
  Device& device = compute.device();
  const ShardMap& map = plan.map;
  const auto num_units = at(map.num_units());
  lane_grads_.resize(num_units);
  has_terms_.resize(at(map.num_params()));
  tp_grads_.resize(num_units);
  slices_.resize(num_units);
  own_.resize(num_units);
  is_deferred_.resize(num_units);
  late_.resize(num_units);
  for (int unit = 0; unit < map.num_units(); ++unit) {
    lane_sums_.emplace_back(device, Shape{map.unit_elements(unit)}, local_lanes, groups.shard(),
                            /*is_kept=*/!keeps_slices_, options.wire);
    reduced_.push_back(device.create_event());
    if ((keeps_slices_ || round_first_) && !plan.is_frozen[at(unit)])
      slices_[at(unit)] = groups.dp().allocate(
          device, DType::kF32, {map.unit_elements(unit) / map.num_shards()}, "gradient slice");
  }
  for (int unit = 0; watch_ranks && unit < map.num_units(); ++unit)
    local_squares_.push_back(empty(device, DType::kI64, {ExactSum::kLimbs}, "squares of a rank"));
  for (int param = 0; param < map.num_params(); ++param)
    for (int use = 1; use < registry.num_uses(param) && is_trainable(param); ++use)
      extra_uses_.push_back(
          {.use = {param, use}, .layer = at(registry.layers_of(param)[at(use)]), .unit = map.unit_of(param)});
}

void GradStore::begin_step() {
  for (LaneSum& sum : lane_sums_) sum.restart();
  std::fill(lane_grads_.begin(), lane_grads_.end(), Tensor());
  std::fill(own_.begin(), own_.end(), Tensor());
  for (ExtraUse& extra : extra_uses_) extra.is_begun = false;
  for (const Tensor& squares : local_squares_) zero_limbs(compute_, squares);
  in_flight_.clear();
  for (std::vector<Tensor>& late : late_) late.clear();
}

void GradStore::begin_layer(size_t layer) {
  for (const int unit : plan_.accumulated_by[layer])
    if (!lane_grads_[at(unit)].defined()) begin_unit(unit);
  for (ExtraUse& extra : extra_uses_) {
    if (extra.layer != layer || extra.is_begun) continue;
    if (!extra.grad.defined())
      extra.grad =
          empty(compute_.device(), DType::kF32, plan_.map.shape_of(extra.use.param), "tied gradient");
    extra.is_begun = true;
    extra.has_terms = 0;
  }
}

void GradStore::fill_gaps(int unit, const Tensor& buffer) {
  const ShardMap& map = plan_.map;
  const std::vector<int>& params = map.params_of(unit);
  for (size_t i = 0; i < params.size(); ++i) {
    const int64_t end = map.offset_in_unit(params[i]) + map.shape_of(params[i]).numel();
    const int64_t next = i + 1 < params.size() ? map.offset_in_unit(params[i + 1]) : map.unit_elements(unit);
    if (end < next) fill(compute_, buffer.slice(0, end, next), 0.0f);
  }
}

void GradStore::begin_unit(int unit) {
  for (const int param : plan_.map.params_of(unit)) has_terms_[at(param)] = 0;
  // Of an earlier round, which may still be on its way.
  compute_.wait(*reduced_[at(unit)]);
  while (keeps_slices_ && in_flight_.size() > kMaxInFlight) {
    compute_.wait(*reduced_[at(in_flight_.front())]);
    in_flight_.pop_front();
  }
  if (is_deferred_[at(unit)]) {
    lane_grads_[at(unit)] =
        empty(compute_.device(), DType::kF32, {plan_.map.unit_elements(unit)}, "deferred gradient");
    fill_gaps(unit, lane_grads_[at(unit)]);
    return;
  }
  lane_grads_[at(unit)] = lane_sums_[at(unit)].begin_lane(compute_, /*is_zeroed=*/false);
  fill_gaps(unit, lane_grads_[at(unit)]);
  if (!tp_ || plan_.is_cut[at(unit)]) return;
  std::vector<Tensor>& more = tp_grads_[at(unit)];
  more.resize(static_cast<size_t>(tp_->lanes().count - 1));
  for (Tensor& grads : more) {
    if (!grads.defined())
      grads = empty(compute_.device(), DType::kF32, {plan_.map.unit_elements(unit)}, "gradient of a tp lane");
    fill(compute_, grads, 0.0f);
  }
}

void GradStore::sum_over_tp(int unit) {
  if (!tp_ || plan_.is_cut[at(unit)]) return;
  LaneSum sum = tp_->new_sum(compute_.device(), {plan_.map.unit_elements(unit)});
  // The first lane's buffer becomes the sum.
  sum.add_lane(compute_, lane_grads_[at(unit)]);
  for (const Tensor& grads : tp_grads_[at(unit)]) sum.add_lane(compute_, grads);
  tp_->finish_everywhere(compute_, sum);
  if (keeps_slices_) tp_grads_[at(unit)].clear();
}

void GradStore::complete_layer(size_t layer) {
  for (const int unit : plan_.completed_by[layer]) {
    for (ExtraUse& extra : extra_uses_) {
      if (extra.unit != unit) continue;
      const Tensor total = grad({extra.use.param, 0});
      add(compute_, total, grad(extra.use), total);
      extra.is_begun = false;
      if (keeps_slices_) extra.grad = {};
    }
    for (const int param : plan_.map.params_of(unit)) grad({param, 0});  // zeros where there was none
    sum_over_tp(unit);
    if (is_deferred_[at(unit)]) {
      late_[at(unit)].push_back(std::exchange(lane_grads_[at(unit)], {}));
      continue;
    }
    lane_grads_[at(unit)] = {};
    if (lane_sums_[at(unit)].end_lane(compute_)) reduce(unit);
  }
}

void GradStore::complete_deferred(int param, std::span<const Tensor> shares) {
  const int unit = plan_.map.unit_of(param);
  const std::vector<Tensor> late = std::exchange(late_[at(unit)], {});
  require<Error>(late.size() == shares.size(), "a shared parameter has ", late.size(), " lanes here and ",
                 shares.size(), " where it is used again");
  for (size_t lane = 0; lane < late.size(); ++lane) {
    compute_.wait(*reduced_[at(unit)]);  // of an earlier round, as in begin_unit
    const Tensor buffer = lane_sums_[at(unit)].begin_lane(compute_);
    copy(compute_, late[lane], buffer);
    const Tensor total = plan_.map.view(buffer, param);
    add(compute_, total, shares[lane], total);
    if (lane_sums_[at(unit)].end_lane(compute_)) reduce(unit);
  }
}

Tensor GradStore::sum_over_ranks(int unit, Stream& stream) {
  LaneSum& sum = lane_sums_[at(unit)];
  if (groups_.num_shards() == 1) return sum.reduce(stream);
  const Tensor slice = round_first_ || !keeps_slices_ ? sum.own_slice() : slices_[at(unit)];
  sum.reduce_slice(stream, slice);
  if (groups_.replicas()) groups_.replicas()->all_reduce(slice, ReduceOp::kSum, stream)->wait_on(stream);
  return slice;
}

void GradStore::reduce(int unit) {
  if (&background_ != &compute_) {
    compute_.record(*completed_);
    background_.wait(*completed_);
  }
  if (watches_ranks())
    exact_sum_squares(background_, lane_sums_[at(unit)].local_sum(), local_squares_[at(unit)]);
  const Tensor sum = sum_over_ranks(unit, background_);
  if (round_first_) {
    const Tensor& total = slices_[at(unit)];
    if (own_[at(unit)].defined())
      add(background_, total, sum, total);
    else
      copy(background_, sum, total);
  }
  own_[at(unit)] = round_first_ ? slices_[at(unit)] : sum;
  if (keeps_slices_) lane_sums_[at(unit)].release();
  background_.record(*reduced_[at(unit)]);
  in_flight_.push_back(unit);
}

void GradStore::finish() {
  for (const std::unique_ptr<Event>& reduced : reduced_) compute_.wait(*reduced);
  in_flight_.clear();
}

std::pair<Tensor, uint8_t*> GradStore::accumulator(const ParamUse& use) const {
  // What is added to it is dropped: of a parameter whose layer computes two gradients at once.
  if (!is_trainable(use.param))
    return {empty(compute_.device(), DType::kF32, plan_.map.shape_of(use.param), "gradient of a frozen one"),
            nullptr};
  if (use.use == 0) {
    const int unit = plan_.map.unit_of(use.param);
    const bool is_first = use.lane == 0 || tp_grads_[at(unit)].empty();
    if (!is_first) return {plan_.map.view(tp_grads_[at(unit)][at(use.lane - 1)], use.param), nullptr};
    return {plan_.map.view(lane_grads_[at(unit)], use.param), &has_terms_[at(use.param)]};
  }
  for (const ExtraUse& extra : extra_uses_)
    if (extra.use.param == use.param && extra.use.use == use.use) return {extra.grad, &extra.has_terms};
  throw Error(concat("parameter ", use.param, " has no use ", use.use));
}

Tensor GradStore::grad(const ParamUse& use) const {
  const auto [memory, has_terms] = accumulator(use);
  if (has_terms && !std::exchange(*has_terms, uint8_t{1})) fill(compute_, memory, 0.0f);
  return memory;
}

Tensor GradStore::grad_to_write(const ParamUse& use, bool* adds) const {
  const auto [memory, has_terms] = accumulator(use);
  *adds = !has_terms || std::exchange(*has_terms, uint8_t{1});
  return memory;
}

}  // namespace polyreme
