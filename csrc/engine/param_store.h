#pragma once

#include "engine/grad_store.h"
#include "engine/weight_store.h"

namespace polyreme {

// The weights and gradients of a rank, as layers see them.
class ParamStore final : public ParamStorage {
 public:
  ParamStore(Stream& compute, Stream& background, const ParamRegistry& registry, const UnitPlan& plan,
             const DpGroups& groups, int64_t local_lanes, const ZeroOptions& options)
      : weights(compute, background, plan, groups, options),
        grads(compute, background, registry, plan, groups, local_lanes, options) {}

  Tensor weight(const ParamUse& use) const override { return weights.weight(use.param); }
  Tensor grad(const ParamUse& use) const override { return grads.grad(use); }

  WeightStore weights;
  GradStore grads;
};

}  // namespace polyreme
