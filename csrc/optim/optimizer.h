#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "optim/shard_map.h"

namespace polyreme {

// Which rule, and its constants. The learning rate comes with every step.
struct OptimizerOptions {
  std::string rule = "adamw";  // or "sgd"
  double beta1 = 0.9;          // adamw
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0.0;             // sgd
  std::vector<double> weight_decay;  // per parameter, in order of declaration
};

// An update rule over the slices of one shard, with its state.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // One update of `weights` in place with gradients scale[0] * `grads`: the shard's slice of every unit, in
  // order of the units. `step` counts applied updates from 1. A scale of NaN leaves weights and state as
  // they are.
  virtual void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
                    const Tensor& scale, double lr, int64_t step) = 0;
  // State tensors [shard_elements()], by name ("exp_avg", "exp_avg_sq"; "momentum").
  virtual std::vector<std::pair<std::string, Tensor>> state() const = 0;
};

// Updates shard `shard` of the map and has state for it alone. State starts at zero on `stream`. Throws
// InvalidArgument for an unknown rule or constants out of range.
std::unique_ptr<Optimizer> make_optimizer(Stream& stream, const ShardMap& map, int64_t shard,
                                          const OptimizerOptions& options);

}  // namespace polyreme
