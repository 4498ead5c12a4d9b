#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "optim/shard_map.h"

namespace polyreme {

// Which rule, and its constants. Lists are per parameter, in order of declaration; an empty one is the
// default.
struct OptimizerOptions {
  // "adamw", "sgd", "lion", "lamb" (You et al. 2020: parameters without weight decay take AdamW's step, as
  // those who use it do) or "muon" (Jordan et al. 2024, with the step size of Liu et al. 2025, so that one lr
  // suits both parts: matrices are orthogonalized, all else takes AdamW).
  std::string rule = "adamw";
  double beta1 = 0.9;  // all but sgd
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0.0;              // sgd, muon
  std::vector<double> weight_decay;   // never empty
  std::vector<double> lr_multiplier;  // default: 1
  std::vector<uint8_t> trainable;     // 0: never updated, and no state
  std::vector<uint8_t> elementwise;   // muon: 1 takes AdamW; default: what has other than two dims
  // State is kept in host memory and visits the device for the update, unit by unit (ZeRO-Offload, Ren et al.
  // 2021, keeps the update on the host too): adamw, sgd and lion.
  bool offload = false;
};

// Where parameters are parts of larger ones, which tensor parallelism cuts: what a rule that needs whole
// ones, or their norms, puts together.
struct ParamParts {
  std::vector<int> whole;        // per parameter: whose part it is; the same number, the same one
  std::vector<uint8_t> is_part;  // per parameter: 0: it is a whole one
  Communicator* group =
      nullptr;           // ranks that have the other parts; alike on them: numbers and order of `whole`
  LaneRange lanes = {};  // whose parts this rank has, of each whole one in order
  std::vector<ParamSpec> specs;  // of whole ones, by their number
};

struct OptimizerStep {
  double lr = 0;
  Tensor scale;  // one fp32 element, multiplies the gradients; where it is NaN nothing changes
  // Per parameter: whether it takes part. One that does not is left entirely as it is, its state too.
  // Empty: all do.
  std::span<const uint8_t> has_grad = {};
};

// One kind of state: for every unit the shard's slice; undefined where no parameter of the unit has such
// state.
struct OptimizerState {
  std::string name;  // "exp_avg", "exp_avg_sq", "momentum"
  bool on_host = false;
  std::vector<Tensor> slices;
};

// An update rule over the slices of one shard, with its state. The bits of the result depend neither on the
// units nor on the number of shards.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // One update of `weights` in place with gradients scale[0] * `grads`: the shard's slice of every unit, in
  // order of the units; a grad may be undefined where no parameter of the unit takes part. Collective over
  // the shard group for lamb and muon.
  virtual void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
                    const OptimizerStep& step) = 0;
  virtual const std::vector<OptimizerState>& state() const = 0;

  // How many updates each parameter has had: what bias correction counts. They advance by `applied`, which is
  // called when a step is known to have been applied.
  const std::vector<int64_t>& updates() const { return updates_; }
  void applied(std::span<const uint8_t> has_grad = {});
  // Throws InvalidArgument for another number of parameters or a negative count.
  void set_updates(std::vector<int64_t> updates);

 protected:
  explicit Optimizer(int num_params) : updates_(static_cast<size_t>(num_params), 0) {}

 private:
  std::vector<int64_t> updates_;
};

// Updates shard `shard` of the map and has state for it alone, zero at first. `shard_group`: the ranks that
// hold the other shards, in order; null where there is one shard. Throws InvalidArgument for an unknown rule
// or constants out of range, naming them; NotAvailable for a rule that needs its state on the device, or a
// device that cannot reach the host's memory.
std::unique_ptr<Optimizer> make_optimizer(Stream& stream, const ShardMap& map, int64_t shard,
                                          Communicator* shard_group, const OptimizerOptions& options,
                                          const ParamParts& parts = {});

// All constants in words, to be compared between ranks.
std::string describe(const OptimizerOptions& options);

// Parameters of different groups should not share a unit (UnitOptions::group_of_param): then no state is kept
// for parameters that need none.
std::vector<int> state_groups(std::span<const ParamSpec> specs, const OptimizerOptions& options);

}  // namespace polyreme
