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
// "sum", "max", "min"
const char* reduce_op_name(ReduceOp op);

// One collective in flight. Used while its stream lives; destroying it without waiting is allowed.
class Work {
 public:
  virtual ~Work() = default;
  // Blocks the host until the result is in place. Throws Timeout, PeerLost or CollectiveMismatch;
  // the group is unusable after any of them. If the collective never ran because an earlier
  // operation of its stream failed, throws that error and tells it to the other ranks.
  virtual void wait() = 0;
  // Operations that are enqueued on `stream` after this call start after the collective.
  virtual void wait_on(Stream& stream) = 0;
};

// A fixed set of ranks over one transport. Collectives are asynchronous: they take their place in
// `stream` and return. Every rank calls the same ones in the same order, one thread per group at a
// time (two at once: InvalidArgument). The collectives of a group and of the groups that were split
// from it run in the order of their calls on each rank, on whichever streams they are; the streams
// must live until those collectives have run.
//
// Reductions are ordered: the terms are added in a balanced binary tree over ranks (`tree_order`),
// so the bits are the same on every transport and equal those of `lane_sum` on one rank. Integer
// sums wrap around; max and min of floating-point numbers pass NaN on.
//
// Before user memory is written the group compares (sequence number, operation, dtype, count, root,
// reduction) of all ranks; a difference is CollectiveMismatch on every rank, naming who issued what.
//
// Arguments that break the contract throw InvalidArgument at the call; nothing was sent then, and
// the group stays usable. After PeerLost, Timeout or CollectiveMismatch every later call throws the
// same error again, and outputs of collectives in flight are undefined. README.md has the table.
//
// The destructor does not wait for anybody. The other ranks get PeerLost, naming this one, when
// they need it again; at once if an exception is passing or a collective was issued and never ran.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;

  // In place over contiguous `data` of fp32, fp64, int32 or int64; other dtypes are NotAvailable.
  // A zero count is allowed.
  virtual std::unique_ptr<Work> all_reduce(const Tensor& data, ReduceOp op, Stream& stream) = 0;
  // input: size()*n elements; output: the n elements of this rank's slice, reduced. `output` may be
  // this rank's slice of `input`; any other overlap is refused. Dtypes as for all_reduce.
  virtual std::unique_ptr<Work> reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op,
                                               Stream& stream) = 0;
  // input: n elements; output: size()*n, in rank order. `input` may be this rank's slice of
  // `output`; any other overlap is refused. Any dtype.
  virtual std::unique_ptr<Work> all_gather(const Tensor& input, const Tensor& output, Stream& stream) = 0;
  // Any dtype.
  virtual std::unique_ptr<Work> broadcast(const Tensor& data, int root, Stream& stream) = 0;
  // Blocks the host until every rank has called it; collectives that this rank issued before have
  // run by then. Throws Timeout naming the missing ranks after `limit`, whatever CommOptions says.
  virtual void barrier(std::chrono::milliseconds limit) = 0;
  // A new group of the ranks that pass the same `color` (>= 0), in order of (key, rank); null for a
  // negative color. Collective over this group; blocks the host. If the memory of a new group
  // cannot be had, throws OutOfMemory on every rank, and this group stays usable; after any other
  // error it does not.
  virtual std::unique_ptr<Communicator> split(int color, int key, const std::string& name) = 0;
  // Marks the group, and those that were split from it, broken on every rank that can be reached: their
  // calls throw PeerLost with `reason`. From any thread. Without effect on a group that is broken already.
  virtual void abort(const std::string& reason) noexcept = 0;
};

struct CommOptions {
  std::string name = "world";
  // How long a rank waits for others that are alive, without any progress, in one collective.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  // Staging of one rank, twice for double buffering; small in tests, to reach many chunks. The same
  // on all ranks. Rounded up to a multiple of 64 bytes times the number of ranks. Larger chunks
  // measured no faster: these stay in the cache.
  int64_t chunk_bytes = int64_t{256} << 10;
};

}  // namespace polyreme
