#pragma once

#include <vector>

#include "mesh/lane_sum.h"
#include "nn/layer.h"
#include "optim/shard_map.h"

namespace polyreme {

// The weights and gradients of a rank, a flat buffer for each unit of the shard map. First uses of all
// parameters accumulate into the unit's buffer of the lane; further uses of tied ones have buffers of
// their own, which are added in ascending order of use at the end of every lane.
//
// ZeRO (Rajbhandari et al. 2020): from stage 1 on a rank of dp owns one shard. It gets the summed gradient of
// its slices alone, updates the weights there, and gathers the others' weights.
class ParamStore final : public ParamStorage {
 public:
  ParamStore(Stream& stream, const ParamRegistry& registry, ShardMap map, int64_t local_lanes,
             Communicator& dp);

  const ShardMap& map() const { return map_; }
  bool is_sharded() const { return map_.num_shards() > 1; }
  int64_t shard() const { return is_sharded() ? dp_.rank() : 0; }
  // The part of a unit's buffer that this rank owns.
  Tensor own_slice(const Tensor& unit_buffer, int unit) const;
  // The slices that this rank updates, by unit. The gradient, of the last step, is summed over all lanes;
  // it is undefined before the first step.
  std::vector<Tensor> own_weights() const;
  std::vector<Tensor> own_grads() const;
  bool has_grads() const { return !grads_.empty() && grads_.front().defined(); }
  const Tensor& weights(int unit) const { return weights_[static_cast<size_t>(unit)]; }
  // All of a unit, of which each rank has its slice. Collective if sharded.
  Tensor gathered(Stream& stream, const Tensor& own_slice, int unit) const;
  // Fills the weights with the slices that the other ranks have updated. Collective if sharded.
  void gather_weights(Stream& stream) const;

  Tensor weight(const ParamUse& use) const override;
  Tensor grad(const ParamUse& use) const override;

  // Before the first lane of a step: forgets what a step that failed midway has left.
  void begin_step();
  void begin_lane(Stream& stream);
  void end_lane(Stream& stream);
  // After the rank's last lane: sums over ranks, ordered before what `stream` runs next.
  void finish(Stream& stream);

 private:
  struct ExtraUse {
    ParamUse use;
    Tensor grad;
  };
  Tensor view(const std::vector<Tensor>& buffers, int param) const;

  Communicator& dp_;
  ShardMap map_;
  std::vector<Tensor> weights_;     // by unit, as the others
  std::vector<Tensor> lane_grads_;  // of the current lane
  std::vector<Tensor> grads_;
  std::vector<LaneSum> lane_sums_;
  std::vector<ExtraUse> extra_uses_;
};

}  // namespace polyreme
