#pragma once

#include <memory>
#include <string>
#include <vector>

#include "optim/optimizer.h"
#include "optim/unit_gradients.h"

namespace polyreme {

struct ShardedOptimizerOptions {
  // ZeRO (Rajbhandari et al. 2020): what is divided over the group. 0: nothing; 1: weights in fp32 and
  // optimizer state; 2: summed gradients too.
  int stage = 1;
  int64_t lanes = 0;          // see LaneSum; 0: one for each rank
  int64_t micro_batches = 0;  // see UnitGradients
  int64_t bucket_bytes = int64_t{25} << 20;
  DType wire = DType::kF32;  // of communicated gradients, see LaneSum
  float clip_norm = 0;       // 0: no limit
  double norm_type = 2;      // 1 or more, or infinity
  // Weights are rounded to bf16 arrays up or down at random, by what is drawn for (seed, name, updates,
  // element), instead of to the nearest.
  bool stochastic_rounding = false;
  uint64_t seed = 0;
  OptimizerOptions rule;
};

// What one step has to know of this rank, and what came out.
struct ShardedStep {
  double lr = 0;
  double loss_scale = 1;  // the gradients are those of a loss that was multiplied by it
  int64_t count = 0;      // divides the sum of all gradients, added up over the ranks
  bool counted = true;    // how the counts came about, the same on all ranks
};
struct ShardedStepResult {
  int64_t count = 0;     // over all ranks
  double grad_norm = 0;  // of the averaged gradient, before clipping
  bool applied = false;  // false: nothing has changed, as the count is 0 or the norm not finite
  // The first parameter, and the first rank with it, whose gradient was not finite; -1: each was, but not
  // their sum.
  int culprit_param = -1;
  int culprit_rank = -1;
};

// The optimizer half of a training step on arrays of the caller: sums gradients over the ranks of a group,
// updates the weights that this rank owns, and writes all weights into the caller's arrays. Knows nothing of
// models. Weights are kept in fp32 whatever the arrays' dtype is.
//
// The weights have the same bits for every stage, size of buckets and size of the group, given lanes.
class ShardedOptimizer {
 public:
  // Collective over `group`; compares what must be equal on all ranks. All references must outlive this
  // object. Throws InvalidArgument before anything is communicated, or on all ranks, naming what differs.
  ShardedOptimizer(Device& device, Stream& background, Communicator& group, std::vector<ParamSpec> specs,
                   const ShardedOptimizerOptions& options);

  const std::vector<ParamSpec>& specs() const { return specs_; }
  const ShardMap& map() const { return map_; }
  Optimizer& rule() { return *rule_; }
  UnitGradients& gradients() { return gradients_; }
  const ShardedOptimizerOptions& options() const { return options_; }
  int64_t shard() const { return map_.num_shards() > 1 ? group_.rank() : 0; }

  // Collective. `refusal`: why this rank cannot take part in what comes next; then all ranks throw.
  void agree(const std::exception_ptr& refusal);
  // Collective. Waits.
  ShardedStepResult step(const ShardedStep& step);

  // Collective. Writes what a kind ("weight", "grad" (the sum, before it is divided), or one of the rule's
  // state) holds into `out`, one contiguous tensor of fp32, bf16 or fp16 for each parameter; undefined ones
  // are left out, on all ranks alike. Waits. Throws InvalidArgument for an unknown kind.
  void read(const std::string& kind, const std::vector<Tensor>& out);
  // This rank's part of a parameter from all of its values; "weight" or a kind of state. Waits.
  void write(const std::string& kind, int param, const Tensor& values);
  // This rank's elements [begin, begin + size) of a piece of the map, as a tensor.
  Tensor piece(const std::string& kind, const ShardMap::Piece& piece) const;
  // Bytes that this rank keeps between steps, by what they are for.
  std::vector<std::pair<std::string, int64_t>> persistent_bytes() const;

 private:
  const std::vector<Tensor>& slices(const std::string& kind) const;
  void agree_on_settings();
  // Where all ranks meet before a step: sums of counts, whose parameters have gradients.
  ShardedStepResult meet(const ShardedStep& step, std::vector<uint8_t>& has_grad);
  // A parameter's elements from `begin` on, as its array holds them.
  void round_weight(const Tensor& from, const Tensor& to, int param, int64_t begin);
  // All of a unit, of which each rank has its slice, in `dtype`.
  Tensor gathered(int unit, const Tensor& own, DType dtype, bool rounds);
  void find_culprit(ShardedStepResult& result);
  int64_t reduce_on_host(int64_t value, ReduceOp op);

  Device& device_;
  Communicator& group_;
  std::vector<ParamSpec> specs_;
  ShardedOptimizerOptions options_;
  std::unique_ptr<Stream> compute_;
  ShardMap map_;
  UnitGradients gradients_;
  std::unique_ptr<Optimizer> rule_;
  std::vector<Tensor> weights_;  // this rank's slices, by unit
  Tensor sums_;                  // of the norm
  Tensor scale_;
};

}  // namespace polyreme
