#include "engine/weight_store.h"

#include <algorithm>

#include "ops/ops.h"

namespace polyreme {
namespace {

size_t at(int i) { return static_cast<size_t>(i); }

}  // namespace

WeightStore::WeightStore(Stream& compute, Stream& background, const UnitPlan& plan, const DpGroups& groups,
                         const ZeroOptions& options)
    : compute_(compute),
      background_(background),
      plan_(plan),
      groups_(groups),
      prefetch_(options.prefetch),
      updated_(compute.device().create_event()) {
  Device& device = compute.device();
  const ShardMap& map = plan.map;
  for (int unit = 0; unit < map.num_units(); ++unit) {
    const FlatRange slice = map.shard_slice(unit, groups.shard_rank() % map.num_shards());
    const bool is_whole = plan.stays_whole[at(unit)];
    const Tensor buffer = groups.shard().allocate(
        device, DType::kF32, {is_whole ? map.unit_elements(unit) : slice.size()}, "weights");
    fill(compute, buffer, 0.0f);
    whole_.push_back(is_whole ? buffer : Tensor());
    own_.push_back(is_whole ? buffer.slice(0, slice.begin, slice.end) : buffer);
    gathered_.push_back(device.create_event());
  }
}

void WeightStore::plan_visits(std::vector<size_t> layers) {
  for (size_t unit = 0; unit < whole_.size(); ++unit)
    if (!plan_.stays_whole[unit]) whole_[unit] = {};
  visits_ = std::move(layers);
  position_ = horizon_ = 0;
  compute_.record(*updated_);  // what is gathered was written there
  if (&background_ != &compute_) background_.wait(*updated_);
}

void WeightStore::arrive() {
  require<Error>(position_ < visits_.size(), "more layers ran than were planned");
  int64_t ahead = 0;  // layers from the next one on whose weights must be gathered
  for (horizon_ = position_; horizon_ < visits_.size() && ahead <= prefetch_; ++horizon_) {
    bool needs_any = false;
    for (const int unit : plan_.used_by[visits_[horizon_]]) {
      needs_any |= !plan_.stays_whole[at(unit)];
      if (!whole_[at(unit)].defined()) gather(unit);
    }
    if (needs_any && horizon_ > position_) ++ahead;
  }
  for (const int unit : plan_.used_by[visits_[position_]])
    if (!plan_.stays_whole[at(unit)]) compute_.wait(*gathered_[at(unit)]);
}

void WeightStore::leave() {
  const size_t layer = visits_[position_++];
  for (const int unit : plan_.used_by[layer])
    if (!plan_.stays_whole[at(unit)] && !is_in_sight(unit)) whole_[at(unit)] = {};
}

bool WeightStore::is_in_sight(int unit) const {
  for (size_t visit = position_; visit < horizon_; ++visit) {
    const std::vector<int>& units = plan_.used_by[visits_[visit]];
    if (std::find(units.begin(), units.end(), unit) != units.end()) return true;
  }
  return false;
}

void WeightStore::gather(int unit) {
  const ShardMap& map = plan_.map;
  const Tensor all = empty(compute_.device(), DType::kF32, {map.unit_elements(unit)}, "gathered weights");
  groups_.shard().all_gather(own_[at(unit)], all, background_)->wait_on(background_);
  background_.record(*gathered_[at(unit)]);
  whole_[at(unit)] = all;
}

Tensor WeightStore::weight(int param) const {
  const Tensor& unit = whole_[at(plan_.map.unit_of(param))];
  require<Error>(unit.defined(), "the weights of parameter ", param, " are not gathered");
  return plan_.map.view(unit, param);
}

void WeightStore::gather_updated() {
  if (plan_.map.num_shards() == 1) return;
  compute_.record(*updated_);
  if (&background_ != &compute_) background_.wait(*updated_);
  for (int unit = 0; unit < plan_.map.num_units(); ++unit) {
    if (!plan_.stays_whole[at(unit)]) continue;
    groups_.shard().all_gather(own_[at(unit)], whole_[at(unit)], background_)->wait_on(background_);
  }
  background_.record(*updated_);
  compute_.wait(*updated_);
}

Tensor WeightStore::gathered(const Tensor& slice, int unit) const {
  if (plan_.map.num_shards() == 1) return slice;
  const Tensor all = empty(compute_.device(), DType::kF32, {plan_.map.unit_elements(unit)}, "gathered copy");
  groups_.shard().all_gather(slice, all, compute_)->wait_on(compute_);
  return all;
}

Tensor WeightStore::whole(int unit) const {
  return plan_.stays_whole[at(unit)] ? whole_[at(unit)] : gathered(own_[at(unit)], unit);
}

void WeightStore::for_each_part(int param, const std::function<void(const Tensor&, int64_t)>& body) const {
  const ShardMap& map = plan_.map;
  const int unit = map.unit_of(param);
  const int64_t numel = map.shape_of(param).numel();
  if (plan_.stays_whole[at(unit)]) {
    body(map.view(whole_[at(unit)], param).view({numel}), 0);
    return;
  }
  for (const ShardMap::Piece& piece : map.pieces(groups_.shard_rank()))
    if (piece.param == param)
      body(own_[at(unit)].slice(0, piece.unit_shard_begin, piece.unit_shard_begin + piece.size),
           piece.param_begin);
}

}  // namespace polyreme
