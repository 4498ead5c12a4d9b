#pragma once

#include <functional>

#include "optim/optimizer.h"

namespace polyreme {

// What the rules share: which elements of a shard are updated, with which constants.
class RuleBase : public Optimizer {
 public:
  const std::vector<OptimizerState>& state() const final { return state_; }

 protected:
  // Neighbouring elements of a unit's slice that are updated with the same constants.
  struct Run {
    int unit;
    int param;           // the first one
    int64_t begin, end;  // in the shard's slice of the unit
    int64_t step;        // 1 for a first update
    double lr, weight_decay;
    Tensor part(const Tensor& slice) const { return slice.slice(0, begin, end); }
    Tensor part(std::span<const Tensor> slices) const { return part(slices[static_cast<size_t>(unit)]); }
  };

  // Checks what all rules take. Throws InvalidArgument.
  RuleBase(const ShardMap& map, int64_t shard, const OptimizerOptions& options);

  // What a step updates, of the parameters that `wanted` picks. Parameters are apart from each other if not
  // `merged`; else they are joined across the zeros between them, which every element-wise rule leaves so.
  std::vector<Run> runs(const OptimizerStep& step, const std::function<bool(int)>& wanted, bool merged) const;
  std::vector<Run> runs(const OptimizerStep& step) const;
  // update(run, state) for all of them, with the run's part of every kind of state, in order of add_state.
  // What is kept on the host is copied for one unit at a time.
  void for_each_run(Stream& stream, const OptimizerStep& step,
                    const std::function<void(const Run&, std::span<const Tensor>)>& update) const;
  // Zeros for the units that hold a trainable parameter which `wanted` picks. The reference is valid for the
  // lifetime of the rule.
  const std::vector<Tensor>& add_state(Stream& stream, const char* name,
                                       const std::function<bool(int)>& wanted);
  const std::vector<Tensor>& add_state(Stream& stream, const char* name);

  const OptimizerOptions& options() const { return options_; }
  const ShardMap& map() const { return map_; }
  int64_t shard() const { return shard_; }
  double weight_decay(int param) const { return options_.weight_decay[static_cast<size_t>(param)]; }
  bool is_trainable(int param) const {
    return options_.trainable.empty() || options_.trainable[static_cast<size_t>(param)] != 0;
  }

  static void check_betas(const char* rule, const OptimizerOptions& options);
  static void check_eps(const char* rule, const OptimizerOptions& options);
  static void check_momentum(const char* rule, const OptimizerOptions& options);

 private:
  static constexpr size_t kMaxKinds = 4;  // of state: they never move in memory

  ShardMap map_;
  int64_t shard_;
  OptimizerOptions options_;
  std::vector<ShardMap::Piece> pieces_;
  std::vector<OptimizerState> state_;
};

// The rules that need whole parameters, in whole_param_rules.cpp.
std::unique_ptr<Optimizer> make_lamb(Stream& stream, const ShardMap& map, int64_t shard,
                                     Communicator* shard_group, const OptimizerOptions& options,
                                     const ParamParts& parts);
std::unique_ptr<Optimizer> make_muon(Stream& stream, const ShardMap& map, int64_t shard,
                                     Communicator* shard_group, const OptimizerOptions& options,
                                     const ParamParts& parts);

// Whether muon orthogonalizes a parameter of this shape.
bool is_muon_matrix(const OptimizerOptions& options, int param, const Shape& shape);

}  // namespace polyreme
