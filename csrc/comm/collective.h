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
  kAllToAll,
  kExchange,
  kBarrier,
  kSplit
};
// "all_reduce", ...; string literals.
const char* collective_name(CollectiveOp op);

// One call, as every rank must issue it. Plain bytes: it crosses process borders.
struct CollectiveCall {
  uint64_t sequence = 0;  // position in the group's order, from 1; exchanges are numbered apart, per rank
  // Elements of the input of all_gather (of the output, if uneven), the output of reduce_scatter, one block
  // of all_to_all (0, if uneven); of broadcast's and all_reduce's data; of an exchange all that is sent.
  int64_t count = 0;
  uint64_t counts_hash = 0;  // of an uneven all_gather's counts; 1 for an uneven all_to_all; else 0
  int32_t root = -1;         // of a broadcast
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

// Who a rank of a group is: "rank 2 (host a, pid 123)"; "rank 1 (rank 2 of the job, host a, pid 123)" where
// its place in the group is another one.
std::string rank_text(int rank, int job_rank, const std::string& host, int64_t pid);

// "rank 3", "ranks 0, 2, 3"
std::string ranks_text(std::span<const int> ranks);

// The calls of a group of `size` ranks, from arguments that were checked: defined, contiguous,
// matching counts and dtypes, no overlap but the documented one, no average of integers.
// Throw InvalidArgument.
CollectiveCall check_all_reduce(const Tensor& data, ReduceOp op);
CollectiveCall check_reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op, int rank,
                                    int size);
CollectiveCall check_all_gather(const Tensor& input, const Tensor& output, std::span<const int64_t> counts,
                                int rank, int size);
CollectiveCall check_broadcast(const Tensor& data, int root, int size);
CollectiveCall check_all_to_all(const Tensor& input, const Tensor& output,
                                std::span<const int64_t> send_counts, std::span<const int64_t> receive_counts,
                                int size);
CollectiveCall check_exchange(std::span<const Transfer> transfers, int rank, int size);

}  // namespace polyreme
