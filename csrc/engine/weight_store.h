#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/dp_groups.h"
#include "engine/unit_plan.h"
#include "tensor/tensor.h"

namespace polyreme {

// The weights of a rank, by unit: whole, or from stage 3 on its slice alone. What layers read has the dtype
// of the unit; where that is narrower than fp32, the rank keeps fp32 masters of its slice, which are updated
// and rounded to the weights. A pass over layers is announced by `plan_visits`; units that are not whole are
// then gathered ahead of the layers that use them, on `background`, and released behind the last use in
// sight. Every rank makes the same visits.
class WeightStore {
 public:
  // Weights are zero. All arguments but `options` must outlive this object.
  WeightStore(Stream& compute, Stream& background, const UnitPlan& plan, const DpGroups& groups,
              const ZeroOptions& options);

  // The layers that will run, in order; forgets earlier plans.
  void plan_visits(std::vector<size_t> layers);
  // Before the next layer of the plan runs: its weights are there for what `compute` runs next.
  void arrive();
  // After it: weights that no layer in sight (of the step, see ZeroOptions::gather_for_step) uses are
  // released.
  void leave();

  // Throws Error if the unit is not there.
  Tensor weight(int param) const;
  // The fp32 slices that this rank updates, by unit: weights, or the masters of narrower ones.
  const std::vector<Tensor>& own() const { return masters_; }
  // After an update of own(): rounds masters to weights, and gathers the other ranks' slices of what is kept
  // whole. `compute` waits for them.
  void gather_updated();

  // All of a unit, of which each rank has `slice`. Collective if sharded.
  Tensor gathered(const Tensor& slice, int unit) const;
  // All of a unit's weights. Collective if it is not whole here.
  Tensor whole(int unit) const;
  // All of what own() has a slice of. Collective if sharded and narrow, or not whole here.
  Tensor whole_masters(int unit) const;
  // Sets a parameter: body(part [n] of fp32, first element) fills what this rank stores of it, all or pieces.
  void write(int param, const std::function<void(const Tensor&, int64_t)>& body) const;

 private:
  void gather(int unit);
  void release();
  bool is_narrow(int unit) const { return plan_.map.dtype_of(unit) != DType::kF32; }
  bool is_in_sight(int unit) const;

  Stream& compute_;
  Stream& background_;
  const UnitPlan& plan_;
  const DpGroups& groups_;
  int64_t prefetch_;
  bool keeps_gathered_;
  std::vector<Tensor> own_;      // by unit, as the following: the slice of the weights
  std::vector<Tensor> masters_;  // fp32; the memory of own_ where that is fp32
  std::vector<Tensor> whole_;    // undefined: not here
  std::vector<std::unique_ptr<Event>> gathered_;
  std::unique_ptr<Event> updated_;
  std::vector<size_t> visits_;
  size_t position_ = 0;  // of the visit that runs, or comes next
  size_t horizon_ = 0;   // visits before it have their weights gathered or on their way
};

}  // namespace polyreme
