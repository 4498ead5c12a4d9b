#include "optim/unit_gradients.h"

#include <algorithm>

#include "ops/update.h"

namespace polyreme {
namespace {

size_t at(int i) { return static_cast<size_t>(i); }

}  // namespace

UnitGradients::UnitGradients(Stream& compute, Stream& background, const ShardMap& map, Communicator& group,
                             std::vector<uint8_t> trainable, const Options& options)
    : compute_(compute),
      background_(background),
      map_(map),
      group_(group),
      trainable_(std::move(trainable)),
      options_(options),
      lane_buffers_(at(map.num_units())),
      own_(at(map.num_units())),
      given_(at(map.num_params()), 0),
      had_grad_(at(map.num_params()), 0),
      not_finite_(empty(compute.device(), DType::kI32, {map.num_params()}, "gradient flags")),
      completed_(compute.device().create_event()),
      reduced_(compute.device().create_event()) {
  require(options.micro_batches % options.local_lanes == 0 &&
              (options.micro_batches > 0 || options.local_lanes == 1),
          "micro_batches=", options.micro_batches, " with ", options.local_lanes,
          " lanes on every rank; give a multiple, so that it is known which micro-batches make a lane");
  for (int unit = 0; unit < map.num_units(); ++unit) {
    const bool used =
        std::ranges::any_of(map.params_of(unit), [this](int param) { return is_trainable(param); });
    lane_sums_.push_back(used ? std::make_unique<LaneSum>(compute.device(), Shape{map.unit_elements(unit)},
                                                          options.local_lanes, group,
                                                          /*is_kept=*/true, options.wire)
                              : nullptr);
  }
}

bool UnitGradients::any(const std::vector<uint8_t>& flags) {
  return std::ranges::any_of(flags, [](uint8_t flag) { return flag != 0; });
}

void UnitGradients::restart() {
  for (const std::unique_ptr<LaneSum>& sum : lane_sums_)
    if (sum) sum->restart();
  std::ranges::fill(lane_buffers_, Tensor());
  std::ranges::fill(given_, uint8_t{0});
  micro_batches_done_ = 0;
  is_begun_ = false;
}

void UnitGradients::begin_step() {
  if (is_begun_) return;
  is_begun_ = true;
  std::ranges::fill(had_grad_, uint8_t{0});
  std::ranges::fill(own_, Tensor());
  clear_flags(compute_, not_finite_);
  next_unit_ = map_.num_units() - 1;
}

Tensor UnitGradients::lane_buffer(int unit) {
  Tensor& buffer = lane_buffers_[at(unit)];
  if (!buffer.defined()) buffer = lane_sums_[at(unit)]->begin_lane(compute_);
  return buffer;
}

void UnitGradients::add(int param, const Tensor& grad) {
  require(is_trainable(param), "parameter ", param, " is frozen; it takes no gradient");
  require(!given_[at(param)], "its gradient was already given in this micro-batch; give the sum of both");
  require(options_.micro_batches == 0 || micro_batches_done_ < options_.micro_batches, "all ",
          options_.micro_batches, " micro-batches of the step were given; call step");
  const int64_t count = map_.shape_of(param).numel();
  require(grad.numel() == count, "the gradient has ", grad.numel(), " elements; the parameter ", count);
  begin_step();
  const int unit = map_.unit_of(param);
  accumulate(compute_, grad.view({count}), map_.view(lane_buffer(unit), param).view({count}),
             not_finite_.slice(0, param, param + 1));
  given_[at(param)] = had_grad_[at(param)] = 1;
  if (is_last_micro_batch()) advance(/*all=*/false);
}

void UnitGradients::end_micro_batch() {
  require(options_.micro_batches == 0 || micro_batches_done_ < options_.micro_batches, "all ",
          options_.micro_batches, " micro-batches of the step were given; call step");
  begin_step();
  const bool is_last = is_last_micro_batch();
  ++micro_batches_done_;
  std::ranges::fill(given_, uint8_t{0});
  if (is_last) {
    advance(/*all=*/true);
  } else if (options_.micro_batches > 0 &&
             micro_batches_done_ % (options_.micro_batches / options_.local_lanes) == 0) {
    for (int unit = 0; unit < map_.num_units(); ++unit) {
      if (!lane_sums_[at(unit)]) continue;
      lane_buffer(unit);  // a lane without a gradient is a term too
      lane_buffers_[at(unit)] = {};
      lane_sums_[at(unit)]->end_lane(compute_);
    }
  }
}

bool UnitGradients::is_complete(int unit) const {
  return std::ranges::all_of(map_.params_of(unit),
                             [this](int param) { return !is_trainable(param) || given_[at(param)]; });
}

void UnitGradients::advance(bool all) {
  for (; next_unit_ >= 0; --next_unit_) {
    if (!lane_sums_[at(next_unit_)]) continue;
    if (!all && !is_complete(next_unit_)) return;
    reduce(next_unit_);
  }
}

void UnitGradients::reduce(int unit) {
  LaneSum& sum = *lane_sums_[at(unit)];
  lane_buffer(unit);
  lane_buffers_[at(unit)] = {};
  sum.end_lane(compute_);
  compute_.record(*completed_);
  background_.wait(*completed_);
  Tensor own;
  if (map_.num_shards() == 1) {
    own = sum.reduce(background_);
  } else {
    const int64_t size = map_.unit_elements(unit) / map_.num_shards();
    own = options_.keeps_slices ? group_.allocate(compute_.device(), DType::kF32, {size}, "gradient slice")
                                : sum.own_slice();
    sum.reduce_slice(background_, own);
    if (options_.keeps_slices) sum.release();
  }
  own_[at(unit)] = own;
}

void UnitGradients::finish() {
  require(options_.local_lanes == 1 || micro_batches_done_ == options_.micro_batches, "the step has ",
          micro_batches_done_, " micro-batches of ", options_.micro_batches,
          "; with several lanes on a rank all of them are needed");
  begin_step();
  advance(/*all=*/true);
  background_.record(*reduced_);
  compute_.wait(*reduced_);
  micro_batches_done_ = 0;
  is_begun_ = false;
}

}  // namespace polyreme
