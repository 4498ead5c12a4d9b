#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace polyreme {

// What a rank can ask of a group. kAttach is the meeting that opens a new group.
enum class CollectiveOp : uint8_t {
  kNone,
  kAttach,
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kBarrier,
  kSplit
};
// "all_reduce", ...; string literals.
const char* collective_name(CollectiveOp op);

// One call, as every rank must issue it. Plain bytes: it crosses process borders.
struct CollectiveCall {
  uint64_t sequence = 0;  // position in the group's order, from 1
  int64_t count = 0;      // elements of the input of all_gather, the output of reduce_scatter, else of data
  int32_t root = -1;      // of a broadcast
  CollectiveOp op = CollectiveOp::kNone;
  DType dtype = DType::kU8;
  ReduceOp reduce = ReduceOp::kSum;

  bool operator==(const CollectiveCall&) const = default;
  // "all_reduce float32[4] sum", "broadcast float32[8] root 0", "barrier"
  std::string to_string() const;
};

// "rank 1: broadcast float32[8] root 0; ranks 0, 2, 3: all_reduce float32[4] sum": equal calls
// together, the smallest set of ranks first. calls[r] is what rank r issued.
std::string mismatch_text(std::span<const CollectiveCall> calls);

// "rank 3", "ranks 0, 2, 3"
std::string ranks_text(std::span<const int> ranks);

// The calls of a group of `size` ranks, from arguments that were checked: defined, contiguous,
// matching counts and dtypes, no overlap but the documented one. Throw InvalidArgument,
// NotAvailable for a dtype that is not reduced.
CollectiveCall check_all_reduce(const Tensor& data, ReduceOp op);
CollectiveCall check_reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op, int rank,
                                    int size);
CollectiveCall check_all_gather(const Tensor& input, const Tensor& output, int rank, int size);
CollectiveCall check_broadcast(const Tensor& data, int root, int size);

}  // namespace polyreme
