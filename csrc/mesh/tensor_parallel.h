#pragma once

#include "mesh/lane_sum.h"
#include "tensor/param_spec.h"

namespace polyreme {

// The tp axis as layers see it: `lanes.tp` lanes, of which this rank owns `lanes().count` neighbouring ones.
//
// A lane has its part of every parameter that tp cuts, and runs the layers between an all-gather and a
// reduce-scatter of activations on it alone (Shoeybi et al. 2019), with tensors whose shapes do not depend on
// the number of ranks. So all that a rank with several lanes does differently is to form a part of the tree
// over lanes itself, and every size of the axis has the same bits on every backend. Between those regions
// activations are cut along the sequence (Korthikanti et al. 2022): a rank has its lanes' blocks of every
// sample's tokens, rows [sample][own token].
//
// Collectives work sample by sample: a sample's own tokens are then one contiguous slice of the sample, and
// nothing has to be rearranged. All of them are enqueued; nothing waits.
//
// They are not cut into chunks beside the products that they feed: on a CPU with a core for each rank nobody
// is free to move them meanwhile. Measured at tp=2 (6 x 768, 4 samples of 1024 tokens, two processes):
// collectives are 5.6 % of a step, and 3.5 % are there even for the rank that comes last, which is the
// copying and adding itself. Chunks could hide a part of the other 2 %, in which a rank waits for its
// neighbour. A GPU with copy engines is another case.
class TensorParallel {
 public:
  // `group` must outlive this object. Throws InvalidArgument as check_lanes does.
  TensorParallel(Communicator& group, int64_t lanes);

  Communicator& group() const { return group_; }
  const LaneRange& lanes() const { return lanes_; }
  int64_t size() const { return group_.size(); }
  int64_t rank() const { return group_.rank(); }

  // Own tokens of a sample of `seq_len`, which the lanes divide.
  int64_t own_tokens(int64_t seq_len) const { return seq_len / size(); }
  int64_t first_token(int64_t seq_len) const { return rank() * own_tokens(seq_len); }

  // [samples * own tokens, cols], any dtype, to [samples * seq_len, cols].
  Tensor gather_tokens(Stream& stream, const Tensor& own, int64_t samples) const;
  // A sum over lanes, formed lane by lane with LaneSum::add_lane.
  LaneSum new_sum(Device& device, const Shape& shape) const;
  // The own tokens [samples * own tokens, cols] of a sum of [samples * seq_len, cols] that has all lanes of
  // this rank.
  Tensor finish_own_tokens(Stream& stream, LaneSum& sum, int64_t samples) const;
  // The whole sum, the same on every rank.
  Tensor finish_everywhere(Stream& stream, LaneSum& sum) const;
  // In place, over ranks.
  void max_everywhere(Stream& stream, const Tensor& values) const;

 private:
  Communicator& group_;
  LaneRange lanes_;
};

}  // namespace polyreme
