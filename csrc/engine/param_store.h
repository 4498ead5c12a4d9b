#pragma once

#include <vector>

#include "mesh/lane_sum.h"
#include "nn/layer.h"
#include "optim/flat_layout.h"

namespace polyreme {

// The weights and gradients of a rank as flat buffers. First uses of all parameters accumulate
// into the lane's flat buffer; further uses of tied ones have buffers of their own, which are added
// in ascending order of use at the end of every lane.
//
// ZeRO (Rajbhandari et al. 2020): from stage 1 on a rank of dp owns one shard of the flat buffers. It gets
// the summed gradient of that shard alone, updates the weights there, and gathers the others' weights.
class ParamStore final : public ParamStorage {
 public:
  ParamStore(Stream& stream, const ParamRegistry& registry, int64_t local_lanes, Communicator& dp,
             int zero_stage);

  const FlatLayout& layout() const { return layout_; }
  const Tensor& weights() const { return weights_; }
  // The gradient of the last step, summed over all lanes; complete in own_range alone. Undefined before
  // the first step.
  const Tensor& grads() const { return grads_; }
  // What this rank updates: everything in stage 0, its shard otherwise.
  const FlatRange& own_range() const { return own_range_; }
  bool is_sharded() const { return own_range_.size() < layout_.num_elements(); }
  Tensor own_part(const Tensor& flat) const { return flat.slice(0, own_range_.begin, own_range_.end); }
  // Fills the rest of `flat` with the parts that the other ranks own. Collective if sharded.
  void gather(Stream& stream, const Tensor& flat) const;

  Tensor weight(const ParamUse& use) const override;
  Tensor grad(const ParamUse& use) const override;

  // Before the first lane of a step: forgets what a step that failed midway has left.
  void begin_step() { lane_sum_.restart(); }
  void begin_lane(Stream& stream);
  void end_lane(Stream& stream);
  // After the rank's last lane: sums over ranks, ordered before what `stream` runs next.
  void finish(Stream& stream);

 private:
  struct ExtraUse {
    ParamUse use;
    Tensor grad;
  };

  Communicator& dp_;
  FlatLayout layout_;
  FlatRange own_range_;
  Tensor weights_;
  Tensor lane_grads_;
  Tensor grads_;
  std::vector<ExtraUse> extra_uses_;
  LaneSum lane_sum_;
};

}  // namespace polyreme
