#include "engine/param_store.h"

#include "ops/ops.h"

namespace polyreme {

ParamStore::ParamStore(Stream& stream, const ParamRegistry& registry, int64_t local_lanes, Communicator& dp,
                       int zero_stage)
    : dp_(dp),
      layout_(registry.specs(), zero_stage == 0 ? 1 : dp.size()),
      own_range_(layout_.shard(zero_stage == 0 ? 0 : dp.rank())),
      weights_(empty(stream.device(), DType::kF32, {layout_.num_elements()}, "weights")),
      lane_sum_(stream.device(), {layout_.num_elements()}, local_lanes, dp) {
  fill(stream, weights_, 0.0f);
  for (int param = 0; param < static_cast<int>(registry.specs().size()); ++param)
    for (int use = 1; use < registry.num_uses(param); ++use)
      extra_uses_.push_back(
          {{param, use},
           empty(stream.device(), DType::kF32, registry.specs()[static_cast<size_t>(param)].padded_shape,
                 "tied gradient")});
}

Tensor ParamStore::weight(const ParamUse& use) const {
  return layout_.view(weights_, static_cast<size_t>(use.param));
}

Tensor ParamStore::grad(const ParamUse& use) const {
  if (use.use == 0) return layout_.view(lane_grads_, static_cast<size_t>(use.param));
  for (const ExtraUse& extra : extra_uses_)
    if (extra.use.param == use.param && extra.use.use == use.use) return extra.grad;
  throw Error(concat("parameter ", use.param, " has no use ", use.use));
}

void ParamStore::begin_lane(Stream& stream) {
  lane_grads_ = lane_sum_.begin_lane(stream);
  for (const ExtraUse& extra : extra_uses_) fill(stream, extra.grad, 0.0f);
}

void ParamStore::end_lane(Stream& stream) {
  for (const ExtraUse& extra : extra_uses_) {
    const Tensor total = grad({extra.use.param, 0});
    add(stream, total, extra.grad, total);
  }
  lane_grads_ = {};
  lane_sum_.end_lane(stream);
}

void ParamStore::finish(Stream& stream) {
  const auto work =
      is_sharded() ? lane_sum_.finish_own_slice(stream, &grads_) : lane_sum_.finish(stream, &grads_);
  work->wait_on(stream);
}

void ParamStore::gather(Stream& stream, const Tensor& flat) const {
  if (is_sharded()) dp_.all_gather(own_part(flat), flat, stream)->wait_on(stream);
}

}  // namespace polyreme
