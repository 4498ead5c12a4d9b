#pragma once

#include <memory>
#include <vector>

#include "mesh/lane_sum.h"
#include "optim/shard_map.h"

namespace polyreme {

// Gradients that a caller hands over one by one, in any order, summed over micro-batches, lanes and ranks by
// unit. In the last micro-batch of a step a unit is reduced as soon as it is complete, on `background` while
// the caller goes on; from the last unit to the first on every rank, as backward passes complete them.
class UnitGradients {
 public:
  struct Options {
    bool keeps_slices = false;  // only this rank's slices stay after the reduction
    int64_t local_lanes = 1;
    int64_t micro_batches =
        0;  // of this rank in a step, a multiple of local_lanes; 0: known at `finish` (one lane)
    DType wire = DType::kF32;  // see LaneSum
  };
  // All arguments but `options` must outlive this object. `trainable`: per parameter; empty: all. Units
  // without a trainable parameter are left out.
  UnitGradients(Stream& compute, Stream& background, const ShardMap& map, Communicator& group,
                std::vector<uint8_t> trainable, const Options& options);

  // Forgets what a step that failed has left.
  void restart();
  // Adds a parameter's gradient (float32, bfloat16 or float16, of its number of elements) to the micro-batch
  // at hand. Throws InvalidArgument for a second one in a micro-batch, for one that is too many, or does not
  // fit.
  void add(int param, const Tensor& grad);
  // Parameters that were not handed over count as zero.
  void end_micro_batch();
  // After the last micro-batch: reduces what is left; `compute` goes on when all units are reduced. Throws
  // InvalidArgument if micro-batches are missing that lanes need.
  void finish();

  // Whether a unit has trainable parameters.
  bool uses(int unit) const { return lane_sums_[static_cast<size_t>(unit)] != nullptr; }
  int64_t micro_batches_done() const { return micro_batches_done_; }
  // Whether gradients were added since the last finish or restart.
  bool is_empty() const { return micro_batches_done_ == 0 && !any(given_); }
  // Per parameter: whether a gradient came in any micro-batch of the step.
  const std::vector<uint8_t>& had_grad() const { return had_grad_; }
  // int32 per parameter: whether a gradient of this rank had NaN or infinity.
  const Tensor& not_finite() const { return not_finite_; }
  // This rank's slices of the sum (all of a unit where the map has one shard), by unit, until the next step;
  // undefined for units that are left out and before the first finish.
  const std::vector<Tensor>& own() const { return own_; }

 private:
  static bool any(const std::vector<uint8_t>& flags);
  bool is_trainable(int param) const { return trainable_.empty() || trainable_[static_cast<size_t>(param)]; }
  bool is_last_micro_batch() const { return micro_batches_done_ + 1 == options_.micro_batches; }
  void begin_step();
  Tensor lane_buffer(int unit);
  bool is_complete(int unit) const;
  // Reduces the units that are next in order, as far as they are complete (or all of them).
  void advance(bool all);
  void reduce(int unit);

  Stream& compute_;
  Stream& background_;
  const ShardMap& map_;
  Communicator& group_;
  std::vector<uint8_t> trainable_;
  Options options_;
  std::vector<std::unique_ptr<LaneSum>> lane_sums_;  // by unit, as the next two; null: left out
  std::vector<Tensor> lane_buffers_;                 // of the current lane
  std::vector<Tensor> own_;
  std::vector<uint8_t> given_;     // per parameter: in the micro-batch at hand
  std::vector<uint8_t> had_grad_;  // per parameter: in the step
  Tensor not_finite_;
  std::unique_ptr<Event> completed_, reduced_;
  int64_t micro_batches_done_ = 0;
  int next_unit_ = -1;  // to be reduced; those above it are on their way
  bool is_begun_ = false;
};

}  // namespace polyreme
