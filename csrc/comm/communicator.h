#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "tensor/tensor.h"

namespace polyreme {

enum class ReduceOp : uint8_t { kSum, kProduct, kMax, kMin, kAverage };
// "sum", "product", "max", "min", "average"
const char* reduce_op_name(ReduceOp op);

// How the terms of a reduction are combined.
// kOrdered: in the tree of `tree_order`, so bits are equal on every transport and layout.
// kFast: as the transport likes best; bits may depend on the transport and the number of ranks, but
//   are equal on all ranks. Sums of integers, max and min are exact either way.
enum class ReduceMode : uint8_t { kOrdered, kFast };

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

// One tensor to or from another rank of the group, in Communicator::exchange.
struct Transfer {
  enum class Kind : uint8_t { kSend, kReceive };
  Kind kind = Kind::kSend;
  Tensor tensor;
  int peer = 0;
};

// A fixed set of ranks over one transport. Collectives are asynchronous: they take their place in
// `stream` and return. Every rank calls the same ones in the same order, one thread per group at a
// time (two at once: InvalidArgument). The collectives of a group and of the groups that were split
// from it run in the order of their calls on each rank, on whichever streams they are; the streams
// must live until those collectives have run.
//
// Reductions are ordered: the terms are added in a balanced binary tree over ranks (`tree_order`),
// so the bits are the same on every transport and equal those of `lane_sum` on one rank. float16 and
// bfloat16 are reduced in float32 and rounded once. Integer sums and products wrap around; max and min
// of floating-point numbers pass NaN on; bool is reduced by product and min (all) and sum and max (any).
// kAverage divides the sum by size(), and is refused for integers and bool.
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

  // Uninitialised memory of `device`, as `empty` gives it, for tensors that are often in this group's
  // collectives: where the ranks share memory, they read it of each other in place (large messages move twice
  // as fast), provided that all ranks pass such memory. Counts in Device::memory(). Not collective; every
  // kind of memory gives the same bits.
  virtual Tensor allocate(Device& device, DType dtype, const Shape& shape, const char* label) {
    return empty(device, dtype, shape, label);
  }
  // In place over contiguous `data` of any dtype. A zero count is allowed.
  virtual std::unique_ptr<Work> all_reduce(const Tensor& data, ReduceOp op, Stream& stream) = 0;
  // input: size()*n elements; output: the n elements of this rank's slice, reduced. `output` may be
  // this rank's slice of `input`; any other overlap is refused.
  virtual std::unique_ptr<Work> reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op,
                                               Stream& stream) = 0;
  // input: n elements; output: size()*n, in rank order. `input` may be this rank's slice of
  // `output`; any other overlap is refused. If `counts` is given, rank r's input has counts[r] elements,
  // and the output their sum; the same counts on all ranks.
  virtual std::unique_ptr<Work> all_gather(const Tensor& input, const Tensor& output, Stream& stream,
                                           std::span<const int64_t> counts = {}) = 0;
  virtual std::unique_ptr<Work> broadcast(const Tensor& data, int root, Stream& stream) = 0;
  // `input` and `output`, apart, hold one block for (from) each rank, in rank order: equal blocks, or of
  // send_counts[r] and receive_counts[r] elements if both are given. A block that its receiver expects to be
  // of another size is a CollectiveMismatch.
  virtual std::unique_ptr<Work> all_to_all(const Tensor& input, const Tensor& output, Stream& stream,
                                           std::span<const int64_t> send_counts = {},
                                           std::span<const int64_t> receive_counts = {}) = 0;
  // Sends and receives that run at once; all of what depends on each other belongs into one call. Called by
  // the ranks concerned alone. The n-th tensor sent from rank a to rank b is the n-th that b receives from a,
  // of the same dtype and count (CollectiveMismatch otherwise); a peer is another rank of the group. Tensors
  // that are received must not overlap any other.
  virtual std::unique_ptr<Work> exchange(std::span<const Transfer> transfers, Stream& stream) = 0;
  std::unique_ptr<Work> send(const Tensor& tensor, int to, Stream& stream) {
    const Transfer transfer{Transfer::Kind::kSend, tensor, to};
    return exchange({&transfer, 1}, stream);
  }
  std::unique_ptr<Work> receive(const Tensor& tensor, int from, Stream& stream) {
    const Transfer transfer{Transfer::Kind::kReceive, tensor, from};
    return exchange({&transfer, 1}, stream);
  }
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
  // The same for a failure that all ranks learn, with `text` as it is: it already names the culprit.
  virtual void fail(const std::string& text) noexcept = 0;
  // Goes into the journal with the collectives that are issued from now on; cut to 32 bytes.
  virtual void set_label(const std::string& label) = 0;
};

class Journal;

struct CommOptions {
  std::string name = "world";
  // How long a rank waits for others that are alive, without any progress, in one collective.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  // Staging of one rank, twice for double buffering; small in tests, to reach many chunks. The same
  // on all ranks. Rounded up to a multiple of 64 bytes times the number of ranks. Larger chunks
  // measured no faster: these stay in the cache.
  int64_t chunk_bytes = int64_t{256} << 10;
  ReduceMode reduce_mode = ReduceMode::kOrdered;
  // Records the calls of the group and of those that are split from it; may be null.
  std::shared_ptr<Journal> journal;
};

}  // namespace polyreme
