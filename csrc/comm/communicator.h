#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "tensor/tensor.h"

namespace polyreme {

enum class ReduceOp : uint8_t { kSum, kMax, kMin };
const char* reduce_op_name(ReduceOp op);

// One collective in flight. Destroying it without waiting is allowed.
class Work {
 public:
  virtual ~Work() = default;
  // Blocks the host until the result is in place. Throws Timeout, PeerLost or CollectiveMismatch;
  // the group is unusable after any of them.
  virtual void wait() = 0;
  // Operations that are enqueued on `stream` after this call start after the collective.
  virtual void wait_on(Stream& stream) = 0;
};

// A fixed set of ranks over one transport. Collectives are asynchronous: they take their place in
// `stream` and return. Every rank calls the same ones in the same order, one thread per group.
//
// Reductions are ordered: the terms are added in a balanced binary tree over ranks (neighbours
// first; with an odd number at a level the last one moves up as it is), so the bits are the same on
// every transport and equal those of `lane_sum` on one rank.
//
// Before user memory is written the group compares (sequence number, operation, dtype, count, root,
// reduction) of all ranks; a difference is CollectiveMismatch on every rank, naming who issued what.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;

  // In place over contiguous `data` of fp32, fp64, int32 or int64. A zero count is allowed.
  virtual std::unique_ptr<Work> all_reduce(const Tensor& data, ReduceOp op, Stream& stream) = 0;
  // input: size()*n elements; output: the n elements of this rank's slice, reduced.
  virtual std::unique_ptr<Work> reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op,
                                               Stream& stream) = 0;
  // input: n elements; output: size()*n, in rank order. input may be its own slice of output. Any dtype.
  virtual std::unique_ptr<Work> all_gather(const Tensor& input, const Tensor& output, Stream& stream) = 0;
  // Any dtype.
  virtual std::unique_ptr<Work> broadcast(const Tensor& data, int root, Stream& stream) = 0;
  // Blocks the host until every rank has called it. Throws Timeout naming the missing ranks.
  virtual void barrier(std::chrono::milliseconds limit) = 0;
  // A new group of the ranks that pass the same `color` (>= 0), in order of (key, rank); null for a
  // negative color. Collective over this group.
  virtual std::unique_ptr<Communicator> split(int color, int key, const std::string& name) = 0;
  // Marks the group broken on every rank that can be reached: their calls throw PeerLost with
  // `reason`. From any thread.
  virtual void abort(const std::string& reason) noexcept = 0;
};

struct CommOptions {
  std::string name = "world";
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};  // of one operation among live peers
  int64_t chunk_bytes = int64_t{1} << 20;                       // staging; small in tests, to reach many chunks
};

}  // namespace polyreme
