// Rules whose update of an element depends on the whole parameter, of which a rank has a part.
#include <algorithm>
#include <cmath>
#include <map>

#include "ops/update.h"
#include "optim/rule_base.h"

namespace polyreme {
namespace {

AdamWOptions adamw_options(const OptimizerOptions& options, double lr, double weight_decay, int64_t step) {
  return {.lr = lr,
          .beta1 = options.beta1,
          .beta2 = options.beta2,
          .eps = options.eps,
          .weight_decay = weight_decay,
          .step = step};
}

// The norms of a parameter and of its direction are exact sums, whose order does not matter: ranks add those
// of their parts. A row of sums for each whole parameter, those that have parts elsewhere first.
class Lamb final : public RuleBase {
 public:
  Lamb(Stream& stream, const ShardMap& map, int64_t shard, Communicator* group,
       const OptimizerOptions& options, const ParamParts& parts)
      : RuleBase(map, shard, options),
        group_(group),
        parts_group_(parts.group),
        m_(add_state(stream, "exp_avg")),
        v_(add_state(stream, "exp_avg_sq")) {
    check_betas("LAMB", options);
    check_eps("LAMB", options);
    std::map<int, int64_t> rows;  // by whole parameter
    row_of_.resize(static_cast<size_t>(map.num_params()));
    for (const bool of_parts : {true, false}) {
      for (size_t param = 0; param < row_of_.size(); ++param) {
        const bool is_part = !parts.is_part.empty() && parts.is_part[param] != 0;
        if (is_part != of_parts) continue;
        const int whole = parts.whole.empty() ? static_cast<int>(param) : parts.whole[param];
        row_of_[param] = rows.emplace(whole, static_cast<int64_t>(rows.size())).first->second;
      }
      if (of_parts) num_part_rows_ = static_cast<int64_t>(rows.size());
    }
    num_rows_ = static_cast<int64_t>(rows.size());
  }

  void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
            const OptimizerStep& step) override {
    const auto decays = [this](int param) { return weight_decay(param) > 0; };
    for (const Run& run : runs(
             step, [&](int param) { return !decays(param); }, /*merged=*/true))
      adamw(stream, run.part(weights), run.part(grads), run.part(m_), run.part(v_), step.scale,
            adamw_options(options(), run.lr, 0.0, run.step));

    const std::vector<Run> adapted = runs(step, decays, /*merged=*/false);
    const Tensor sums =
        empty(stream.device(), DType::kI64, {num_rows_, 2, ExactSum::kLimbs}, "squared norms of parameters");
    zero(stream, sums);
    const auto sums_of = [&](int param) {
      const int64_t row = row_of_[static_cast<size_t>(param)];
      return sums.slice(0, row, row + 1).view({2, ExactSum::kLimbs});
    };
    const auto constants = [&](const Run& run) {
      return adamw_options(options(), run.lr, run.weight_decay, run.step);
    };
    for (const Run& run : adapted)
      lamb_moments(stream, run.part(weights), run.part(grads), run.part(m_), run.part(v_), step.scale,
                   constants(run), sums_of(run.param));
    if (group_ != nullptr && map().num_shards() > 1)
      group_->all_reduce(sums, ReduceOp::kSum, stream)->wait_on(stream);
    if (parts_group_ != nullptr && num_part_rows_ > 0)
      parts_group_->all_reduce(sums.slice(0, 0, num_part_rows_), ReduceOp::kSum, stream)->wait_on(stream);
    for (const Run& run : adapted)
      lamb_apply(stream, run.part(weights), run.part(m_), run.part(v_), sums_of(run.param), step.scale,
                 constants(run));
  }

 private:
  static void zero(Stream& stream, const Tensor& sums) {
    const Tensor rows = sums.view({sums.numel() / ExactSum::kLimbs, ExactSum::kLimbs});
    for (int64_t row = 0; row < rows.size(0); ++row)
      zero_limbs(stream, rows.slice(0, row, row + 1).view({ExactSum::kLimbs}));
  }

  Communicator *group_, *parts_group_;
  std::vector<int64_t> row_of_;  // by parameter
  int64_t num_part_rows_ = 0, num_rows_ = 0;
  const std::vector<Tensor>& m_;
  const std::vector<Tensor>& v_;
};

// Matrices: the momentum of a unit is gathered, and a rank orthogonalizes those of which it has a part. A
// matrix that lies on a border of shards is computed by both sides; nothing is sent back. One that tp cuts is
// put together on all ranks of tp, which compute it alike. All else takes AdamW.
class Muon final : public RuleBase {
 public:
  Muon(Stream& stream, const ShardMap& map, int64_t shard, Communicator* group,
       const OptimizerOptions& options, const ParamParts& parts)
      : RuleBase(map, shard, options),
        group_(group),
        parts_(parts),
        momentum_(add_state(stream, "momentum", [this](int param) { return is_matrix(param); })),
        m_(add_state(stream, "exp_avg", [this](int param) { return !is_matrix(param); })),
        v_(add_state(stream, "exp_avg_sq", [this](int param) { return !is_matrix(param); })) {
    check_betas("Muon", options);
    check_eps("Muon", options);
    check_momentum("Muon", options);
    std::map<int, int64_t> seen;  // parts, by whole parameter
    for (size_t param = 0; param < parts_.is_part.size(); ++param)
      lane_of_.push_back(parts_.is_part[param] ? seen[parts_.whole[param]]++ : 0);
  }

  void step(Stream& stream, std::span<const Tensor> weights, std::span<const Tensor> grads,
            const OptimizerStep& step) override {
    for (const Run& run : runs(
             step, [this](int param) { return !is_matrix(param); }, /*merged=*/true))
      adamw(stream, run.part(weights), run.part(grads), run.part(m_), run.part(v_), step.scale,
            adamw_options(options(), run.lr, run.weight_decay, run.step));
    const auto runs_of_matrices = runs(
        step, [this](int param) { return is_matrix(param); }, /*merged=*/false);
    struct Cut {
      Tensor parts;  // the directions of this rank's, [lane, elements]
      int64_t count = 0;
    };
    std::map<int, Cut> cuts;  // by whole parameter, whose parts may lie in several units
    for (int unit = 0; unit < map().num_units(); ++unit) {
      if (!takes_part(unit, step)) continue;  // on all ranks alike: the gathering is collective
      const Tensor all = gathered_directions(stream, unit, runs_of_matrices, grads, step);
      for (const Run& run : runs_of_matrices)
        if (run.unit == unit && !is_part(run.param)) update(stream, run, all, weights, step.scale);
      for (const int param : map().params_of(unit)) {
        if (!is_part(param) || !is_matrix(param) || !is_trainable(param)) continue;
        const int64_t lane = lane_of_[static_cast<size_t>(param)], elements = map().shape_of(param).numel();
        Cut& cut = cuts[whole_of(param)];
        if (cut.count == 0)
          cut.parts = empty(stream.device(), DType::kF32, {parts_.lanes.count, elements}, "muon parts");
        copy(stream, map().view(all, param).view({1, elements}), cut.parts.slice(0, lane, lane + 1));
        if (++cut.count < parts_.lanes.count) continue;
        update_parts(stream, whole_of(param), cut.parts, runs_of_matrices, weights, step.scale);
        cuts.erase(whole_of(param));
      }
    }
  }

 private:
  bool is_matrix(int param) const { return is_muon_matrix(options(), param, map().shape_of(param)); }
  bool is_part(int param) const {
    return !parts_.is_part.empty() && parts_.is_part[static_cast<size_t>(param)] != 0;
  }
  int whole_of(int param) const { return parts_.whole[static_cast<size_t>(param)]; }
  bool takes_part(int unit, const OptimizerStep& step) const {
    return std::ranges::any_of(map().params_of(unit), [&](int param) {
      return is_trainable(param) && is_matrix(param) &&
             (step.has_grad.empty() || step.has_grad[static_cast<size_t>(param)]);
    });
  }

  // Updates the momentum of this shard; the Nesterov directions of all shards, as the unit's buffer.
  Tensor gathered_directions(Stream& stream, int unit, const std::vector<Run>& runs,
                             std::span<const Tensor> grads, const OptimizerStep& step) {
    const Tensor all = empty(stream.device(), DType::kF32, {map().unit_elements(unit)}, "muon directions");
    const FlatRange own_range = map().shard_slice(unit, shard());
    const Tensor own = all.slice(0, own_range.begin, own_range.end);
    fill(stream, own, 0.0f);
    for (const Run& run : runs)
      if (run.unit == unit)
        muon_momentum(stream, run.part(grads), run.part(momentum_), step.scale, options().momentum,
                      own.slice(0, run.begin, run.end));
    if (group_ != nullptr && map().num_shards() > 1) group_->all_gather(own, all, stream)->wait_on(stream);
    return all;
  }

  void update(Stream& stream, const Run& run, const Tensor& all, std::span<const Tensor> weights,
              const Tensor& scale) {
    const Tensor matrix = map().view(all, run.param);
    orthogonalize(stream, matrix);
    const int64_t first = map().shard_slice(run.unit, shard()).begin;
    muon_apply(stream, run.part(weights), all.slice(0, first + run.begin, first + run.end), scale,
               constants(run, matrix));
  }

  // The same of a matrix of which this rank has `parts`; leaves their new directions there.
  void update_parts(Stream& stream, int whole, const Tensor& parts, const std::vector<Run>& runs,
                    std::span<const Tensor> weights, const Tensor& scale) {
    const auto is_of_it = [&](const Run& run) { return is_part(run.param) && whole_of(run.param) == whole; };
    if (std::ranges::none_of(runs, is_of_it)) return;  // on all ranks of tp alike: they hold the same shard
    const ParamSpec& spec = parts_.specs[static_cast<size_t>(whole)];
    const int64_t lanes = parts_.lanes.lanes, elements = parts.size(1);
    Tensor all = parts.view({parts.numel()});
    if (parts_.group->size() > 1) {
      const Tensor own = all;
      all = empty(stream.device(), DType::kF32, {lanes * elements}, "muon parts");
      parts_.group->all_gather(own, all, stream)->wait_on(stream);
    }
    const Tensor matrix = empty(stream.device(), DType::kF32, spec.shape, "muon matrix");
    const Tensor flat = matrix.view({matrix.numel()});
    for (int64_t lane = 0; lane < lanes; ++lane)
      copy_runs(stream, all.slice(0, lane * elements, (lane + 1) * elements), flat,
                copies(spec, lane, /*to_whole=*/true));
    orthogonalize(stream, matrix);
    for (int64_t lane = 0; lane < parts_.lanes.count; ++lane)
      copy_runs(stream, flat, parts.slice(0, lane, lane + 1).view({elements}),
                copies(spec, parts_.lanes.first + lane, /*to_whole=*/false));
    for (const Run& run : runs) {
      if (!is_of_it(run)) continue;
      const int64_t begin =
          map().shard_slice(run.unit, shard()).begin + run.begin - map().offset_in_unit(run.param);
      const int64_t lane = lane_of_[static_cast<size_t>(run.param)];
      const Tensor direction = parts.slice(0, lane, lane + 1).view({elements});
      muon_apply(stream, run.part(weights), direction.slice(0, begin, begin + run.end - run.begin), scale,
                 constants(run, matrix));
    }
  }

  std::vector<CopyRun> copies(const ParamSpec& spec, int64_t lane, bool to_whole) const {
    std::vector<CopyRun> result;
    for (const auto& [part, whole, size] : part_runs(spec, "tp", parts_.lanes.lanes, lane))
      result.push_back(to_whole ? CopyRun{part, whole, size} : CopyRun{whole, part, size});
    return result;
  }

  static MuonOptions constants(const Run& run, const Tensor& matrix) {
    return {.lr = run.lr,
            .weight_decay = run.weight_decay,
            .factor = 0.2 * std::sqrt(static_cast<double>(std::max(matrix.size(0), matrix.size(1))))};
  }

  Communicator* group_;
  ParamParts parts_;
  std::vector<int64_t> lane_of_;  // by parameter: of this rank's lanes
  const std::vector<Tensor>& momentum_;
  const std::vector<Tensor>& m_;
  const std::vector<Tensor>& v_;
};

}  // namespace

std::unique_ptr<Optimizer> make_lamb(Stream& stream, const ShardMap& map, int64_t shard,
                                     Communicator* shard_group, const OptimizerOptions& options,
                                     const ParamParts& parts) {
  return std::make_unique<Lamb>(stream, map, shard, shard_group, options, parts);
}

std::unique_ptr<Optimizer> make_muon(Stream& stream, const ShardMap& map, int64_t shard,
                                     Communicator* shard_group, const OptimizerOptions& options,
                                     const ParamParts& parts) {
  return std::make_unique<Muon>(stream, map, shard, shard_group, options, parts);
}

bool is_muon_matrix(const OptimizerOptions& options, int param, const Shape& shape) {
  return shape.size() == 2 &&
         (options.elementwise.empty() || !options.elementwise[static_cast<size_t>(param)]);
}

}  // namespace polyreme
