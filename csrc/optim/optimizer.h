#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "optim/flat_layout.h"

namespace polyreme {

// Which rule, and its constants. The learning rate comes with every step.
struct OptimizerOptions {
  std::string rule = "adamw";  // or "sgd"
  double beta1 = 0.9;          // adamw
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0.0;             // sgd
  std::vector<double> weight_decay;  // per parameter, in order of the layout
};

// An update rule over flat buffers, with its state.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // One update of `weights` in place with gradients scale[0] * `grads`, both the optimizer's range of
  // the flat buffers. `step` counts applied updates from 1. A scale of NaN leaves weights and state as they
  // are.
  virtual void step(Stream& stream, const Tensor& weights, const Tensor& grads, const Tensor& scale,
                    double lr, int64_t step) = 0;
  // State tensors of the range, by name ("exp_avg", "exp_avg_sq"; "momentum").
  virtual std::vector<std::pair<std::string, Tensor>> state() const = 0;
};

// Updates `range` of the flat buffers and has state for it alone. State starts at zero on `stream`. Throws
// InvalidArgument for an unknown rule or constants out of range.
std::unique_ptr<Optimizer> make_optimizer(Stream& stream, const FlatLayout& layout, const FlatRange& range,
                                          const OptimizerOptions& options);

}  // namespace polyreme
