#pragma once

#include "engine/grad_store.h"
#include "engine/weight_store.h"

namespace polyreme {

// The weights and gradients of a rank, as layers see them.
class ParamStore final : public ParamStorage {
 public:
  ParamStore(Stream& compute, Stream& background, const ParamRegistry& registry, const UnitPlan& plan,
             const DpGroups& groups, int64_t local_lanes, const ZeroOptions& options, bool watch_ranks)
      : weights(compute, background, plan, groups, options),
        grads(compute, background, registry, plan, groups, local_lanes, options, watch_ranks) {}

  Tensor weight(const ParamUse& use) const override { return weights.weight(use.param); }
  Tensor grad(const ParamUse& use) const override { return grads.grad(use); }
  bool is_trainable(const ParamUse& use) const override { return grads.is_trainable(use.param); }

  WeightStore weights;
  GradStore grads;
};

}  // namespace polyreme
