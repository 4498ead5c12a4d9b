#include "engine/param_store.h"

#include "ops/ops.h"

namespace polyreme {

ParamStore::ParamStore(Stream& stream, const ParamRegistry& registry, ShardMap map, int64_t local_lanes,
                       Communicator& dp)
    : dp_(dp), map_(std::move(map)) {
  for (int unit = 0; unit < map_.num_units(); ++unit) {
    weights_.push_back(empty(stream.device(), DType::kF32, {map_.unit_elements(unit)}, "weights"));
    fill(stream, weights_.back(), 0.0f);
    lane_sums_.emplace_back(stream.device(), Shape{map_.unit_elements(unit)}, local_lanes, dp);
  }
  lane_grads_.resize(weights_.size());
  grads_.resize(weights_.size());
  for (int param = 0; param < map_.num_params(); ++param)
    for (int use = 1; use < registry.num_uses(param); ++use)
      extra_uses_.push_back(
          {{param, use}, empty(stream.device(), DType::kF32, map_.shape_of(param), "tied gradient")});
}

Tensor ParamStore::own_slice(const Tensor& unit_buffer, int unit) const {
  const FlatRange slice = map_.shard_slice(unit, shard());
  return unit_buffer.slice(0, slice.begin, slice.end);
}

std::vector<Tensor> ParamStore::own_weights() const {
  std::vector<Tensor> slices;
  for (int unit = 0; unit < map_.num_units(); ++unit) slices.push_back(own_slice(weights(unit), unit));
  return slices;
}

std::vector<Tensor> ParamStore::own_grads() const {
  std::vector<Tensor> slices;
  for (int unit = 0; unit < map_.num_units(); ++unit)
    slices.push_back(own_slice(grads_[static_cast<size_t>(unit)], unit));
  return slices;
}

Tensor ParamStore::gathered(Stream& stream, const Tensor& slice, int unit) const {
  if (!is_sharded()) return slice;
  const Tensor all = empty(stream.device(), DType::kF32, {map_.unit_elements(unit)}, "gathered");
  dp_.all_gather(slice, all, stream)->wait_on(stream);
  return all;
}

void ParamStore::gather_weights(Stream& stream) const {
  if (!is_sharded()) return;
  for (int unit = 0; unit < map_.num_units(); ++unit)
    dp_.all_gather(own_slice(weights(unit), unit), weights(unit), stream)->wait_on(stream);
}

Tensor ParamStore::view(const std::vector<Tensor>& buffers, int param) const {
  return map_.view(buffers[static_cast<size_t>(map_.unit_of(param))], param);
}

Tensor ParamStore::weight(const ParamUse& use) const { return view(weights_, use.param); }

Tensor ParamStore::grad(const ParamUse& use) const {
  if (use.use == 0) return view(lane_grads_, use.param);
  for (const ExtraUse& extra : extra_uses_)
    if (extra.use.param == use.param && extra.use.use == use.use) return extra.grad;
  throw Error(concat("parameter ", use.param, " has no use ", use.use));
}

void ParamStore::begin_step() {
  for (LaneSum& sum : lane_sums_) sum.restart();
}

void ParamStore::begin_lane(Stream& stream) {
  for (size_t unit = 0; unit < lane_sums_.size(); ++unit)
    lane_grads_[unit] = lane_sums_[unit].begin_lane(stream);
  for (const ExtraUse& extra : extra_uses_) fill(stream, extra.grad, 0.0f);
}

void ParamStore::end_lane(Stream& stream) {
  for (const ExtraUse& extra : extra_uses_) {
    const Tensor total = grad({extra.use.param, 0});
    add(stream, total, extra.grad, total);
  }
  for (size_t unit = 0; unit < lane_sums_.size(); ++unit) {
    lane_grads_[unit] = {};
    lane_sums_[unit].end_lane(stream);
  }
}

void ParamStore::finish(Stream& stream) {
  for (size_t unit = lane_sums_.size(); unit-- > 0;) {
    const auto work = is_sharded() ? lane_sums_[unit].finish_own_slice(stream, &grads_[unit])
                                   : lane_sums_[unit].finish(stream, &grads_[unit]);
    work->wait_on(stream);
  }
}

}  // namespace polyreme
