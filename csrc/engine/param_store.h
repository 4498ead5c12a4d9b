#pragma once

#include "engine/grad_store.h"
#include "engine/stage_part.h"
#include "engine/weight_store.h"

namespace polyreme {

// What one chunk of a pipeline has of parameters that another one owns.
class SharedUses {
 public:
  virtual ~SharedUses() = default;
  virtual bool has(const ParamUse& use) = 0;
  virtual Tensor weight(const ParamUse& use) = 0;
  // The accumulator of the current lane.
  virtual Tensor grad(const ParamUse& use) = 0;
  virtual bool is_trainable(int param) = 0;
};

// The weights and gradients of a rank, as layers see them. Layers know the parameters of the whole model;
// `part` tells which of the rank's each one is.
class ParamStore final : public ParamStorage {
 public:
  ParamStore(Stream& compute, Stream& background, const ParamRegistry& registry, const UnitPlan& plan,
             const DpGroups& groups, const TensorParallel* tp, int64_t local_lanes,
             const ZeroOptions& options, bool watch_ranks, const StagePart& part)
      : weights(compute, background, plan, groups, options),
        grads(compute, background, registry, plan, groups, tp, local_lanes, options, watch_ranks),
        part_(part) {}

  void set_shared(SharedUses* shared) { shared_ = shared; }

  Tensor weight(const ParamUse& use) const override {
    return is_shared(use) ? shared_->weight(use) : weights.weight(part_.local_of(use));
  }
  Tensor grad(const ParamUse& use) const override {
    return is_shared(use) ? shared_->grad(use) : grads.grad({part_.local_of(use), use.use, use.lane});
  }
  Tensor grad_to_write(const ParamUse& use, bool* adds) const override {
    *adds = true;
    if (is_shared(use)) return shared_->grad(use);
    return grads.grad_to_write({part_.local_of(use), use.use, use.lane}, adds);
  }
  bool is_trainable(const ParamUse& use) const override {
    return is_shared(use) ? shared_->is_trainable(use.param) : grads.is_trainable(part_.local_of(use));
  }

  WeightStore weights;
  GradStore grads;

 private:
  // The owning chunk has the first use, the other chunk the second and last.
  bool is_shared(const ParamUse& use) const { return shared_ && use.use > 0 && shared_->has(use); }

  const StagePart& part_;
  SharedUses* shared_ = nullptr;
};

}  // namespace polyreme
