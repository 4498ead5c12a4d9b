#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/shared_memory/group.h"
#include "comm/shared_memory/memory.h"

namespace polyreme {

// The order in which one rank's collectives run, over a communicator and those split from it.
struct IssueOrder;
std::shared_ptr<IssueOrder> make_issue_order();

// Finds two threads that use one object at once. Nested use by one thread is fine: a device may run
// an operation while it is enqueued.
class SingleUser {
 public:
  class Guard {
   public:
    // Throws InvalidArgument, if another thread is inside.
    Guard(SingleUser& owner, const SharedGroup& group);
    ~Guard() {
      if (outermost_) user_.store(std::thread::id{});
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    std::atomic<std::thread::id>& user_;
    bool outermost_ = false;
  };

 private:
  std::atomic<std::thread::id> user_{};
};

// A communicator whose ranks share memory: threads of one process, or processes of one host.
class SharedCommunicator final : public Communicator {
 public:
  SharedCommunicator(std::shared_ptr<SharedGroup> group, std::shared_ptr<SharedMemorySource> source,
                     std::shared_ptr<IssueOrder> order, int64_t chunk_bytes);
  ~SharedCommunicator() override;

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->options().name; }
  std::unique_ptr<Work> all_reduce(const Tensor& data, ReduceOp op, Stream& stream) override;
  std::unique_ptr<Work> reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op,
                                       Stream& stream) override;
  std::unique_ptr<Work> all_gather(const Tensor& input, const Tensor& output, Stream& stream) override;
  std::unique_ptr<Work> broadcast(const Tensor& data, int root, Stream& stream) override;
  void barrier(std::chrono::milliseconds limit) override;
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override;
  void abort(const std::string& reason) noexcept override;

  // The first call of a group whose ranks attached one by one. Throws as barrier does.
  void attach();
  // See SharedGroup. Part of attach.
  void choose_waiting() { group_->choose_waiting(); }

 private:
  template <typename Run>
  std::unique_ptr<Work> issue(CollectiveCall call, const std::vector<Tensor>& inputs,
                              const std::vector<Tensor>& outputs, Stream& stream, Run run);
  // Runs `meetings` as one call, after all collectives that were issued before.
  void run_on_host(CollectiveOp op, std::chrono::milliseconds limit, const std::function<void()>& meetings);
  std::unique_ptr<Communicator> split_members(int color, int key, const std::string& name);
  std::unique_ptr<Communicator> join_child(const std::string& segment_name, const std::vector<int>& members,
                                           const std::string& name);

  std::shared_ptr<SharedGroup> group_;
  std::shared_ptr<SharedMemorySource> source_;
  std::shared_ptr<IssueOrder> order_;
  int64_t chunk_bytes_;
  int exceptions_at_birth_;
  SingleUser single_user_;
};

}  // namespace polyreme
