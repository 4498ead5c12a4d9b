#include "mesh/tensor_parallel.h"

namespace polyreme {

TensorParallel::TensorParallel(Communicator& group, int64_t lanes) : group_(group) {
  check_lanes("tp", lanes, group.size());
  const int64_t count = lanes / group.size();
  lanes_ = {lanes, group.rank() * count, count};
}

Tensor TensorParallel::gather_tokens(Stream& stream, const Tensor& own, int64_t samples) const {
  if (size() == 1 || own.numel() == 0) return own;
  const int64_t rows = own.size(0) / samples;
  const Tensor all =
      empty(stream.device(), own.dtype(), {own.size(0) * size(), own.size(1)}, "gathered tokens");
  for (int64_t sample = 0; sample < samples; ++sample)
    group_
        .all_gather(own.slice(0, sample * rows, (sample + 1) * rows),
                    all.slice(0, sample * rows * size(), (sample + 1) * rows * size()), stream)
        ->wait_on(stream);
  return all;
}

LaneSum TensorParallel::new_sum(Device& device, const Shape& shape) const {
  return {device, shape, lanes_.count, group_, /*is_kept=*/false};
}

Tensor TensorParallel::finish_own_tokens(Stream& stream, LaneSum& sum, int64_t samples) const {
  const Tensor& all = sum.local_sum();
  if (size() == 1 || all.numel() == 0) return all;
  const int64_t rows = all.size(0) / samples / size(), cols = all.size(1);
  const Tensor own = empty(stream.device(), DType::kF32, {samples * rows, cols}, "own tokens");
  for (int64_t sample = 0; sample < samples; ++sample)
    sum.finish_block(stream, sample * rows * size() * cols,
                     own.slice(0, sample * rows, (sample + 1) * rows).view({rows * cols}))
        ->wait_on(stream);
  return own;
}

Tensor TensorParallel::finish_everywhere(Stream& stream, LaneSum& sum) const {
  Tensor result;
  sum.finish(stream, &result)->wait_on(stream);
  return result;
}

void TensorParallel::max_everywhere(Stream& stream, const Tensor& values) const {
  if (size() > 1) group_.all_reduce(values, ReduceOp::kMax, stream)->wait_on(stream);
}

}  // namespace polyreme
