#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "comm/communicator.h"
#include "comm/journal.h"
#include "comm/transport.h"
#include "device/cpu/cpu_device.h"
#include "device/cuda/cuda_device.h"

namespace polyreme {

// Finds two threads that use one object at once. Nested use by one thread is fine: a device may run
// an operation while it is enqueued.
class SingleUser {
 public:
  class Guard {
   public:
    // Throws InvalidArgument, if another thread is inside. `group` has a name() and a rank().
    template <typename Group>
    Guard(SingleUser& owner, const Group& group) : Guard(owner, group.name(), group.rank()) {}
    ~Guard() {
      if (outermost_) user_.store(std::thread::id{}, std::memory_order_release);
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    Guard(SingleUser& owner, const std::string& group, int rank);

    std::atomic<std::thread::id>& user_;
    bool outermost_ = false;
  };

 private:
  std::atomic<std::thread::id> user_{};
};

// The order in which one rank's collectives run, over a communicator and those split from it. It is the same
// on all ranks only if one thread issues them.
struct IssueOrder;

// A collective that was issued.
struct PendingCall;

// A communicator on the CPU device: what all transports share. It checks arguments, gives calls their place
// in streams and their sequence numbers, and hands them to the transport one by one. Tensors of a GPU go over
// memory of the host (StagedCall).
class CpuCommunicator final : public Communicator {
 public:
  // `order`: null for a group that was not split from another.
  explicit CpuCommunicator(std::shared_ptr<Transport> transport, GroupJournal journal = {},
                           std::shared_ptr<IssueOrder> order = nullptr);
  ~CpuCommunicator() override;

  int rank() const override { return transport_->rank(); }
  int size() const override { return transport_->size(); }
  const std::string& name() const override { return transport_->name(); }
  Tensor allocate(Device& device, DType dtype, const Shape& shape, const char* label) override;
  std::unique_ptr<Work> all_reduce(const Tensor& data, ReduceOp op, Stream& stream) override;
  std::unique_ptr<Work> reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op,
                                       Stream& stream) override;
  std::unique_ptr<Work> all_gather(const Tensor& input, const Tensor& output, Stream& stream,
                                   std::span<const int64_t> counts) override;
  std::unique_ptr<Work> broadcast(const Tensor& data, int root, Stream& stream) override;
  std::unique_ptr<Work> all_to_all(const Tensor& input, const Tensor& output, Stream& stream,
                                   std::span<const int64_t> send_counts,
                                   std::span<const int64_t> receive_counts) override;
  std::unique_ptr<Work> exchange(std::span<const Transfer> transfers, Stream& stream) override;
  void barrier(std::chrono::milliseconds limit) override;
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override;
  void abort(const std::string& reason) noexcept override;
  void fail(const std::string& text) noexcept override {
    if (!fork_guard_.is_inherited()) transport_->abort(text);
  }
  void set_label(const std::string& label) override;

  // The first call of a group whose ranks join one by one. Throws as barrier does.
  void attach();

 private:
  struct Use {
    const Tensor& tensor;
    bool write;
  };
  std::unique_ptr<Work> issue(CollectiveCall call, CallMemory memory, std::span<const Use> uses,
                              Stream& stream);
  std::unique_ptr<Work> issue(CollectiveCall call, CallMemory memory, std::initializer_list<Use> uses,
                              Stream& stream) {
    return issue(call, std::move(memory), std::span(uses.begin(), uses.size()), stream);
  }
  // On tensors of a GPU: blocks the host, unless the group is of one rank.
  std::unique_ptr<Work> issue_on_gpu(CollectiveCall call, CallMemory memory, std::span<const Use> uses,
                                     CudaStream& stream);
  void enqueue(CpuStream& stream, const OpInfo& info, std::span<const Use> uses,
               const std::shared_ptr<PendingCall>& pending);
  // Before any use. Throws InvalidArgument for a second thread and in a fork.
  SingleUser::Guard enter();
  // Runs `body` as a call of the host's thread, after all collectives that were issued before.
  void run_on_host(CollectiveOp op, const std::function<void(const CollectiveCall&)>& body);

  std::shared_ptr<Transport> transport_;
  GroupJournal journal_;
  std::shared_ptr<IssueOrder> order_;
  std::shared_ptr<PendingCall> spare_;  // of a call that has run, for the next one
  int exceptions_at_birth_;
  ForkGuard fork_guard_;
};

}  // namespace polyreme
