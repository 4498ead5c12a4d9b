#pragma once

#include "engine/grad_store.h"
#include "engine/weight_store.h"

namespace polyreme {

// What one chunk of a pipeline has of parameters that another one owns.
class SharedUses {
 public:
  virtual ~SharedUses() = default;
  virtual bool has(int param) = 0;
  virtual Tensor weight(int param) = 0;
  // The accumulator of the current lane.
  virtual Tensor grad(int param) = 0;
  virtual bool is_trainable(int param) = 0;
};

// The weights and gradients of a rank, as layers see them. Layers know the parameters of the whole model;
// `local` tells which of the rank's each one is.
class ParamStore final : public ParamStorage {
 public:
  ParamStore(Stream& compute, Stream& background, const ParamRegistry& registry, const UnitPlan& plan,
             const DpGroups& groups, int64_t local_lanes, const ZeroOptions& options, bool watch_ranks,
             const std::vector<int>& local)
      : weights(compute, background, plan, groups, options),
        grads(compute, background, registry, plan, groups, local_lanes, options, watch_ranks),
        local_(local) {}

  void set_shared(SharedUses* shared) { shared_ = shared; }

  Tensor weight(const ParamUse& use) const override {
    return is_shared(use) ? shared_->weight(use.param) : weights.weight(local_of(use.param));
  }
  Tensor grad(const ParamUse& use) const override {
    return is_shared(use) ? shared_->grad(use.param) : grads.grad({local_of(use.param), use.use});
  }
  bool is_trainable(const ParamUse& use) const override {
    return is_shared(use) ? shared_->is_trainable(use.param) : grads.is_trainable(local_of(use.param));
  }

  WeightStore weights;
  GradStore grads;

 private:
  // The owning chunk has the first use, the other chunk the second and last.
  bool is_shared(const ParamUse& use) const { return shared_ && use.use > 0 && shared_->has(use.param); }
  int local_of(int param) const { return local_[static_cast<size_t>(param)]; }

  const std::vector<int>& local_;
  SharedUses* shared_ = nullptr;
};

}  // namespace polyreme
