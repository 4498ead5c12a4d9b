#pragma once

#include "engine/grad_store.h"
#include "engine/weight_store.h"

namespace polyreme {

// The weights and gradients of a rank, as layers see them. Layers know the parameters of the whole model;
// `local` tells which of the rank's each one is.
class ParamStore final : public ParamStorage {
 public:
  ParamStore(Stream& compute, Stream& background, const ParamRegistry& registry, const UnitPlan& plan,
             const DpGroups& groups, int64_t local_lanes, const ZeroOptions& options,
             const std::vector<int>& local)
      : weights(compute, background, plan, groups, options),
        grads(compute, background, registry, plan, groups, local_lanes, options),
        local_(local) {}

  Tensor weight(const ParamUse& use) const override { return weights.weight(local_of(use.param)); }
  Tensor grad(const ParamUse& use) const override { return grads.grad({local_of(use.param), use.use}); }
  bool is_trainable(const ParamUse& use) const override { return grads.is_trainable(local_of(use.param)); }

  WeightStore weights;
  GradStore grads;

 private:
  int local_of(int param) const { return local_[static_cast<size_t>(param)]; }

  const std::vector<int>& local_;
};

}  // namespace polyreme
