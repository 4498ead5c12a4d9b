#pragma once

#include <vector>

#include "comm/communicator.h"
#include "tensor/tensor.h"

namespace polyreme {

// Lanes say where a sum may be cut; ranks only say who computes it. A sum over an axis with
// `lanes` lanes is the balanced binary tree over the lanes' partial sums. A rank owns a block of
// neighbouring lanes, which is a subtree, so the tree over ranks continues it and the bits are the
// same for every size of the axis. Every sum that some layout cuts goes through here.
//
// Throws InvalidArgument unless lanes == axis_size, or lanes is a power of two that axis_size divides.
void check_lanes(const std::string& axis, int64_t lanes, int64_t axis_size);
// Throws InvalidArgument unless lanes can be rounded to it.
void check_wire(DType wire);

// Forms the sum of one rank's lanes and then of all ranks. Partial sums of finished subtrees are
// merged as soon as both halves are there (a binary counter), so at most log2(lanes) + 1 buffers live.
class LaneSum {
 public:
  // Sums of `shape`, fp32. `group` must outlive this object. `is_kept`: buffers stay, so they are in memory
  // of the group, whose ranks read it in place. For those that are released after every sum ordinary memory
  // costs less: the device keeps it for reuse, where the group's pages would be new each time (measured with
  // two processes and 21 M gradients: 0.06 of 0.22 s of processor time a step).
  //
  // wire: what lanes are rounded to, once, when they end: kF32 (they are not), kBF16 or kF16. Sums of lanes
  // stay fp32. So it changes the bits, equally on every layout, and a rank's only lane can travel in half the
  // bytes (reduce, reduce_slice); sums of several lanes travel as fp32.
  LaneSum(Device& device, const Shape& shape, int64_t local_lanes, Communicator& group, bool is_kept = true,
          DType wire = DType::kF32);

  // Forgets the lanes of a sum that an error broke off; without effect between two sums.
  void restart();
  // A buffer for the next lane's partial sum, zeroed or undefined. Lanes come in ascending order.
  Tensor begin_lane(Stream& stream, bool is_zeroed = true);
  // Returns whether it was the last lane of this rank: the sum can be finished.
  bool end_lane(Stream& stream);
  // begin_lane and end_lane for a partial sum in memory of its own, of `shape`, which the sum may overwrite.
  bool add_lane(Stream& stream, const Tensor& partial);
  // After local_lanes lanes: the sum over all lanes of all ranks, the same on every rank. Valid
  // until the next begin_lane. The caller must wait_on the returned work before it reads `sum`.
  std::unique_ptr<Work> finish(Stream& stream, Tensor* sum);
  // The same for 1-D sums that the ranks share out: `slice`, which may be own_slice(), becomes this rank's
  // part of the sum, an equal one in rank order. Half the bytes of finish. The rest of the buffer is
  // undefined.
  std::unique_ptr<Work> finish_slice(Stream& stream, const Tensor& slice);
  // The same as finish and finish_slice, complete for what is enqueued on `stream` after them; in the wire's
  // dtype where that has the same bits.
  Tensor reduce(Stream& stream);
  void reduce_slice(Stream& stream, const Tensor& slice);
  // The same of the block [first, first + size() * slice.numel()) of the sum's elements.
  std::unique_ptr<Work> finish_block(Stream& stream, int64_t first, const Tensor& slice);
  // This rank's part of the buffer that holds the sum of its lanes.
  Tensor own_slice() const;
  // The sum of this rank's lanes alone, between its last lane and finish or finish_slice.
  const Tensor& local_sum() const;
  // Gives the memory back, after finish or finish_slice; what is enqueued keeps what it needs.
  void release();

 private:
  Tensor take_buffer();
  // Sums what `stream` has received of the ranks in rank_lane_, of this rank's slice, into `slice`.
  void exchange_slice(Stream& stream, const Tensor& slice);

  Device& device_;
  Shape shape_;
  int64_t local_lanes_;
  Communicator& group_;
  bool is_kept_;
  DType wire_;
  bool is_sent_rounded_;  // a lane travels in the wire's dtype
  std::vector<Tensor> free_;
  std::vector<Tensor> subtrees_;  // [level]: a finished sum of 2^level lanes, or undefined
  Tensor current_;
  Tensor rounded_;  // the rank's only lane in the wire's dtype, from its end to its reduction
};

}  // namespace polyreme
