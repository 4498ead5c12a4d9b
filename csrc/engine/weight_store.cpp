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
      keeps_gathered_(options.gather_for_step),
      updated_(compute.device().create_event()) {
  Device& device = compute.device();
  const ShardMap& map = plan.map;
  for (int unit = 0; unit < map.num_units(); ++unit) {
    const FlatRange slice = map.shard_slice(unit, groups.shard_rank() % map.num_shards());
    const bool is_whole = plan.stays_whole[at(unit)];
    // What the ranks read of each other is in memory of the group, all else in the device's own, whose pages
    // are larger.
    const Shape shape{is_whole ? map.unit_elements(unit) : slice.size()};
    const Tensor buffer = map.num_shards() > 1
                              ? groups.shard().allocate(device, map.dtype_of(unit), shape, "weights")
                              : empty(device, map.dtype_of(unit), shape, "weights");
    fill(compute, buffer, 0.0f);
    whole_.push_back(is_whole ? buffer : Tensor());
    own_.push_back(is_whole ? buffer.slice(0, slice.begin, slice.end) : buffer);
    masters_.push_back(is_narrow(unit) ? empty(device, DType::kF32, {slice.size()}, "master weights")
                                       : own_.back());
    if (is_narrow(unit)) fill(compute, masters_.back(), 0.0f);
    gathered_.push_back(device.create_event());
  }
}

void WeightStore::plan_visits(std::vector<size_t> layers) {
  release();
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
  if (position_ == visits_.size()) return release();
  if (keeps_gathered_) return;
  for (const int unit : plan_.used_by[layer])
    if (!plan_.stays_whole[at(unit)] && !is_in_sight(unit)) whole_[at(unit)] = {};
}

void WeightStore::release() {
  for (size_t unit = 0; unit < whole_.size(); ++unit)
    if (!plan_.stays_whole[unit]) whole_[unit] = {};
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
  const Tensor all =
      empty(compute_.device(), map.dtype_of(unit), {map.unit_elements(unit)}, "gathered weights");
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
  for (int unit = 0; unit < plan_.map.num_units(); ++unit)
    if (is_narrow(unit)) cast(compute_, masters_[at(unit)], own_[at(unit)]);
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
  const Tensor all =
      empty(compute_.device(), slice.dtype(), {plan_.map.unit_elements(unit)}, "gathered copy");
  groups_.shard().all_gather(slice, all, compute_)->wait_on(compute_);
  return all;
}

Tensor WeightStore::whole(int unit) const {
  return plan_.stays_whole[at(unit)] ? whole_[at(unit)] : gathered(own_[at(unit)], unit);
}

Tensor WeightStore::whole_masters(int unit) const {
  return is_narrow(unit) ? gathered(masters_[at(unit)], unit) : whole(unit);
}

void WeightStore::write(int param, const std::function<void(const Tensor&, int64_t)>& body) const {
  const ShardMap& map = plan_.map;
  const int unit = map.unit_of(param);
  const int64_t numel = map.shape_of(param).numel();
  Tensor values;  // of the whole parameter, where it is stored whole
  if (plan_.stays_whole[at(unit)]) {
    const Tensor stored = map.view(whole_[at(unit)], param).view({numel});
    values = is_narrow(unit) ? empty(compute_.device(), DType::kF32, {numel}, "parameter") : stored;
    body(values, 0);
    if (!is_narrow(unit)) return;
    cast(compute_, values, stored);
  }
  for (const ShardMap::Piece& piece : map.pieces(groups_.shard_rank() % map.num_shards())) {
    if (piece.param != param) continue;
    const auto part = [&piece](const Tensor& slice) {
      return slice.slice(0, piece.unit_shard_begin, piece.unit_shard_begin + piece.size);
    };
    if (values.defined())
      copy(compute_, values.slice(0, piece.param_begin, piece.param_begin + piece.size),
           part(masters_[at(unit)]));
    else
      body(part(masters_[at(unit)]), piece.param_begin);
    if (is_narrow(unit)) cast(compute_, part(masters_[at(unit)]), part(own_[at(unit)]));
  }
}

}  // namespace polyreme
