#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/cpu_communicator.h"
#include "comm/nccl/nccl_family.h"

namespace polyreme {

struct NcclOptions {
  // Memory of an ordered reduction in flight: what does not fit is done in rounds.
  int64_t staging_bytes = int64_t{64} << 20;
  // Compares every call between the ranks, through the store, before it is issued. NCCL does not, and hangs
  // or mixes up data where calls differ. For debugging: each call waits for all ranks, and its keys stay in
  // the store.
  bool check_calls = false;
};

// A communicator over NCCL, for tensors and streams of one CUDA device. The host never waits in the middle:
// the first calls wait until NCCL has its connections, the later ones only enqueue.
//
// As `Communicator` says, with these differences: calls are compared between ranks with check_calls only; any
// failure breaks the whole family, parents and subgroups alike, since NCCL's communicators of a device can
// only be aborted together; a peer of another host that dies is noticed by NCCL where it uses the network,
// else by the timeout. A thread per family looks after what is in flight, so that streams end also if nobody
// waits for a Work. After an abort the outputs of what was in flight are undefined, and streams do not report
// it: calls do.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<NcclFamily> family, std::shared_ptr<NcclGroup> group, ReduceMode mode,
                   const NcclOptions& options, GroupJournal journal);
  ~NcclCommunicator() override;

  int rank() const override { return group_->rank; }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->name; }
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
  void fail(const std::string& text) noexcept override { family_->break_all(FailureKind::kPeerLost, text); }
  void set_label(const std::string& label) override;

 private:
  struct Wish;
  // Before any use. Throws InvalidArgument for a second thread and in a fork.
  SingleUser::Guard enter();
  std::unique_ptr<Work> issue(CollectiveCall call, const CallMemory& memory,
                              const std::vector<Tensor>& tensors, Stream& stream);
  void enqueue(const CollectiveCall& call, const CallMemory& memory, const std::vector<Tensor>& tensors,
               CudaStream& stream);
  // Runs `body` as a call of the host's thread, after all collectives that were issued before.
  void run_on_host(CollectiveOp op, const std::function<void(const CollectiveCall&)>& body);
  // Runs `body`, which uses the store: a rank that loses it has lost the family.
  void talk(const std::function<void()>& body);
  // What another rank sets in the store.
  std::string await_key(const std::string& key, const CollectiveCall& call);
  void compare(const CollectiveCall& call, const CallMemory& memory);
  void compare_exchange(const CollectiveCall& call, const CallMemory& memory);
  std::vector<Wish> exchange_wishes(const CollectiveCall& call, int color, int key, const std::string& name);

  std::shared_ptr<NcclFamily> family_;
  std::shared_ptr<NcclGroup> group_;
  ReduceMode mode_;
  NcclOptions options_;
  int exceptions_at_birth_;
  GroupJournal journal_;
  SingleUser single_user_;
  ForkGuard fork_guard_;
  int64_t num_barriers_ = 0;
  std::vector<uint64_t> num_sent_, num_received_;  // by peer, in exchanges that were compared
};

// This process, or thread, as rank `rank` of `size` with a GPU each. Collective: the ranks meet in the store,
// which must outlive the communicator as the device must, and compare versions and GPUs before NCCL is
// called. Throws InvalidArgument if two ranks use one GPU or their versions differ, NotAvailable, PeerLost,
// Timeout.
std::unique_ptr<Communicator> make_nccl_communicator(const PolyremeNcclTable& table, Store& store, int rank,
                                                     int size, CudaDevice& device, const CommOptions& options,
                                                     const NcclOptions& nccl_options = {});

}  // namespace polyreme
