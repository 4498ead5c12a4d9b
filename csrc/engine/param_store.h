#pragma once

#include <vector>

#include "mesh/lane_sum.h"
#include "nn/layer.h"
#include "optim/flat_layout.h"

namespace polyreme {

// The weights and gradients of a rank as flat buffers. First uses of all parameters accumulate
// into the lane's flat buffer; further uses of tied ones have buffers of their own, which are added
// in ascending order of use at the end of every lane.
class ParamStore final : public ParamStorage {
 public:
  ParamStore(Stream& stream, const ParamRegistry& registry, int64_t local_lanes, Communicator& dp);

  const FlatLayout& layout() const { return layout_; }
  const Tensor& weights() const { return weights_; }
  // The gradient of the last step, summed over all lanes. Undefined before the first step.
  const Tensor& grads() const { return grads_; }

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

  FlatLayout layout_;
  Tensor weights_;
  Tensor lane_grads_;
  Tensor grads_;
  std::vector<ExtraUse> extra_uses_;
  LaneSum lane_sum_;
};

}  // namespace polyreme
