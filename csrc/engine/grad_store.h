#pragma once

#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "engine/dp_groups.h"
#include "engine/unit_plan.h"
#include "mesh/tensor_parallel.h"
#include "nn/layer.h"

namespace polyreme {

// The gradients of a rank, by unit. First uses of parameters accumulate into the unit's buffer of the lane;
// further uses of tied ones have buffers of their own, which are added in ascending order of use when the
// lane's gradient of the unit is complete. In the rank's last lane a unit is summed over the ranks as soon as
// it is complete, on `background` while backward goes on if that is another stream than `compute`.
//
// Parameters that tp does not cut have an accumulator for the tokens of each of this rank's lanes of tp. When
// a lane of dp completes such a unit they are summed over all lanes of tp, and what follows sees the same
// gradient on every rank of tp.
//
// From stage 2 on a unit's buffer lives from its first gradient to its reduction: where a rank has one lane
// and the lane one micro-batch, or rounds are reduced at once, that is a few layers; otherwise the whole
// local gradient is held until the last lane ends.
class GradStore {
 public:
  // From stage 2 on, buffers that may wait for their reduction when backward begins another.
  static constexpr size_t kMaxInFlight = 1;

  // All arguments but `options` must outlive this object. watch_ranks: keeps what local_squares tells, which
  // costs a pass over the rank's gradient.
  GradStore(Stream& compute, Stream& background, const ParamRegistry& registry, const UnitPlan& plan,
            const DpGroups& groups, const TensorParallel* tp, int64_t local_lanes, const ZeroOptions& options,
            bool watch_ranks);

  // Before the first lane of a step: forgets the last gradient, and what a step that failed has left.
  void begin_step();
  // Before the backward of a layer: makes the accumulators of what it adds to, unless this lane has them.
  void begin_layer(size_t layer);
  // After the backward of a layer by the lane's last micro-batch: units that are complete leave the lane,
  // and after the rank's last lane they are reduced.
  void complete_layer(size_t layer);
  // After the last layer of the last lane: `compute` goes on when all reductions are done.
  void finish();

  // use.lane: of which lane of tp the tokens are, where that makes a difference.
  Tensor grad(const ParamUse& use) const;
  // See ParamStorage: the large gradients, products of matrices, need not be zeroed before.
  Tensor grad_to_write(const ParamUse& use, bool* adds) const;
  // The parameter, alone in its unit, is not complete before complete_deferred: another stage has a share.
  void defer(int param) { is_deferred_[static_cast<size_t>(plan_.map.unit_of(param))] = true; }
  // Lanes (of rounds) that wait for it.
  size_t num_deferred(int param) const { return late_[static_cast<size_t>(plan_.map.unit_of(param))].size(); }
  // Adds one gradient to each of them, in order, and reduces.
  void complete_deferred(int param, std::span<const Tensor> shares);
  bool is_trainable(int param) const {
    return !plan_.is_frozen[static_cast<size_t>(plan_.map.unit_of(param))];
  }
  // This rank's slices of the gradient, by unit: summed over all lanes, after finish. Undefined before, and
  // of frozen units.
  const std::vector<Tensor>& own() const { return own_; }
  bool watches_ranks() const { return !local_squares_.empty(); }
  // An exact sum of the squares of the unit's gradient as this rank alone had it, before the ranks were
  // summed.
  const Tensor& local_squares(int unit) const { return local_squares_[static_cast<size_t>(unit)]; }

 private:
  struct ExtraUse {
    ParamUse use;
    size_t layer;
    int unit;
    Tensor grad;
    bool is_begun = false;
    mutable uint8_t has_terms = 0;
  };
  void begin_unit(int unit);
  // Zeros where no parameter is, which the norm and sums read too.
  void fill_gaps(int unit, const Tensor& buffer);
  // The memory of a use, and the flag of whether it has a gradient; null: it is there from the start.
  std::pair<Tensor, uint8_t*> accumulator(const ParamUse& use) const;
  // The lane's gradient, summed over tp.
  void sum_over_tp(int unit);
  void reduce(int unit);
  // The slice of the sum over all ranks, enqueued on `stream`.
  Tensor sum_over_ranks(int unit, Stream& stream);

  Stream& compute_;
  Stream& background_;
  const UnitPlan& plan_;
  const DpGroups& groups_;
  const TensorParallel* tp_;  // null: one lane
  bool round_first_;
  bool keeps_slices_;               // stage 2: buffers go after the reduction
  std::vector<LaneSum> lane_sums_;  // by unit, as the following
  std::vector<Tensor> lane_grads_;  // of the current lane; undefined: not begun
  mutable std::vector<uint8_t>
      has_terms_;  // by parameter: lane_grads_ has its gradient, else undefined memory
  // Of the current lane, for the second and further lanes of tp where the unit needs them.
  std::vector<std::vector<Tensor>> tp_grads_;
  std::vector<Tensor> slices_;  // where the reduction goes; undefined: stays in the buffer
  std::vector<Tensor> own_;
  std::vector<Tensor> local_squares_;  // int64 limbs; none: nobody asks
  std::vector<std::unique_ptr<Event>> reduced_;
  std::vector<bool> is_deferred_;
  std::vector<std::vector<Tensor>> late_;  // of deferred units, by lane
  std::vector<ExtraUse> extra_uses_;
  std::deque<int> in_flight_;  // units whose buffers a reduction may still hold, oldest first
  std::unique_ptr<Event> completed_;
};

}  // namespace polyreme
