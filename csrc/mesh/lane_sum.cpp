#include "mesh/lane_sum.h"

#include <bit>

#include "comm/tree.h"
#include "ops/ops.h"

namespace polyreme {

void check_lanes(const std::string& axis, int64_t lanes, int64_t axis_size) {
  require(lanes >= 1 && (lanes == axis_size ||
                         (std::has_single_bit(static_cast<uint64_t>(lanes)) && lanes % axis_size == 0)),
          "lanes.", axis, "=", lanes, " with ", axis, "=", axis_size,
          "; lanes must equal the axis' size, or be a power "
          "of two that the size divides (then the layout can change later with the same bits)");
}

void check_wire(DType wire) {
  require(wire == DType::kF32 || wire == DType::kBF16 || wire == DType::kF16, "gradients communicated as ",
          dtype_name(wire), "; expected float32, bfloat16 or float16");
}

LaneSum::LaneSum(Device& device, const Shape& shape, int64_t local_lanes, Communicator& group, bool is_kept,
                 DType wire)
    : device_(device),
      shape_(shape),
      local_lanes_(local_lanes),
      group_(group),
      is_kept_(is_kept),
      wire_(wire),
      is_sent_rounded_(wire != DType::kF32 && local_lanes == 1 && group.size() > 1 &&
                       shape.numel() % group.size() == 0) {
  require(std::has_single_bit(static_cast<uint64_t>(local_lanes)), "a rank owns ", local_lanes,
          " lanes; expected a power of two");
  subtrees_.resize(static_cast<size_t>(std::bit_width(static_cast<uint64_t>(local_lanes))));
}

Tensor LaneSum::take_buffer() {
  constexpr const char* kLabel = "lane sum";
  if (free_.empty())
    return is_kept_ ? group_.allocate(device_, DType::kF32, shape_, kLabel)
                    : empty(device_, DType::kF32, shape_, kLabel);
  Tensor buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void LaneSum::restart() {
  if (current_.defined()) free_.push_back(std::exchange(current_, Tensor()));
  rounded_ = {};
  // The last one holds a finished sum, which stays valid until the next begin_lane.
  for (size_t level = 0; level + 1 < subtrees_.size(); ++level)
    if (subtrees_[level].defined()) free_.push_back(std::exchange(subtrees_[level], Tensor()));
}

Tensor LaneSum::begin_lane(Stream& stream, bool is_zeroed) {
  if (subtrees_.back().defined()) free_.push_back(std::exchange(subtrees_.back(), Tensor()));
  current_ = take_buffer();
  if (is_zeroed) fill(stream, current_, 0.0f);
  return current_;
}

bool LaneSum::add_lane(Stream& stream, const Tensor& partial) {
  if (subtrees_.back().defined()) free_.push_back(std::exchange(subtrees_.back(), Tensor()));
  current_ = partial;
  return end_lane(stream);
}

bool LaneSum::end_lane(Stream& stream) {
  Tensor sum = std::exchange(current_, Tensor());
  if (wire_ != DType::kF32) {
    const Tensor rounded = empty(device_, wire_, shape_, "rounded lane");
    cast(stream, sum, rounded);
    cast(stream, rounded, sum);
    if (is_sent_rounded_) rounded_ = rounded;
  }
  size_t level = 0;
  for (; subtrees_[level].defined(); ++level) {
    Tensor left = std::exchange(subtrees_[level], Tensor());
    add(stream, left, sum, left);
    free_.push_back(std::exchange(sum, left));
  }
  subtrees_[level] = sum;
  return subtrees_.back().defined();
}

const Tensor& LaneSum::local_sum() const {
  require(subtrees_.back().defined(), "finish was called before ", local_lanes_, " lanes were summed");
  return subtrees_.back();
}

std::unique_ptr<Work> LaneSum::finish(Stream& stream, Tensor* sum) {
  *sum = local_sum();
  return group_.all_reduce(*sum, ReduceOp::kSum, stream);
}

void LaneSum::exchange_slice(Stream& stream, const Tensor& slice) {
  const Tensor lanes = std::exchange(rounded_, Tensor());
  const Tensor received = empty(device_, wire_, shape_, "lanes of the ranks");
  group_.all_to_all(lanes, received, stream)->wait_on(stream);
  // The buffer takes the terms, one of each rank, in place of the lane that was sent.
  const Tensor terms = local_sum();
  cast(stream, received, terms);
  const auto term = [&](int rank) {
    const int64_t size = terms.numel() / group_.size();
    return terms.slice(0, rank * size, (rank + 1) * size);
  };
  const std::vector<TreeStep> steps = tree_order(group_.size());
  for (const TreeStep& step : steps)
    add(stream, term(step.into), term(step.from), &step == &steps.back() ? slice : term(step.into));
}

Tensor LaneSum::reduce(Stream& stream) {
  Tensor sum;
  if (!is_sent_rounded_) {
    finish(stream, &sum)->wait_on(stream);
    return sum;
  }
  sum = local_sum();
  exchange_slice(stream, own_slice());
  group_.all_gather(own_slice(), sum, stream)->wait_on(stream);
  return sum;
}

void LaneSum::reduce_slice(Stream& stream, const Tensor& slice) {
  if (is_sent_rounded_)
    exchange_slice(stream, slice);
  else
    finish_slice(stream, slice)->wait_on(stream);
}

Tensor LaneSum::own_slice() const {
  const int64_t size = local_sum().numel() / group_.size();
  return local_sum().slice(0, group_.rank() * size, (group_.rank() + 1) * size);
}

std::unique_ptr<Work> LaneSum::finish_slice(Stream& stream, const Tensor& slice) {
  return group_.reduce_scatter(local_sum(), slice, ReduceOp::kSum, stream);
}

std::unique_ptr<Work> LaneSum::finish_block(Stream& stream, int64_t first, const Tensor& slice) {
  const Tensor& sum = local_sum();
  const int64_t size = slice.numel() * group_.size();
  return group_.reduce_scatter(sum.view({sum.numel()}).slice(0, first, first + size), slice, ReduceOp::kSum,
                               stream);
}

void LaneSum::release() {
  free_.clear();
  subtrees_.back() = {};
}

}  // namespace polyreme
