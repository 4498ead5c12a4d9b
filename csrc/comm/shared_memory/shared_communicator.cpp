#include "comm/shared_memory/shared_communicator.h"

#include <exception>
#include <thread>

#include "comm/shared_memory/algorithms.h"
#include "device/cpu/cpu_device.h"
#include "tensor/access.h"

namespace polyreme {
namespace {

// A collective that was issued. Shared by the stream, the Work and the order; only the stream's
// share keeps the group, so that a group is left when its last collective has run or was dropped.
struct PendingCall {
  enum class State { kWaiting, kDone, kFailed };
  CollectiveCall call;
  State state = State::kWaiting;
  std::exception_ptr error;

  template <typename Run>
  void execute(SharedGroup& group, const Run& run) {
    try {
      group.begin(call, group.options().timeout);
      run(group, call);
      group.end();
      state = State::kDone;
    } catch (const std::exception& failure) {
      state = State::kFailed;
      error = std::current_exception();
      group.fail(FailureKind::kPeerLost,
                 concat(group.who(group.rank()), " failed in ", call.to_string(), ": ", failure.what()));
      throw;
    }
  }
};

class SharedWork final : public Work {
 public:
  SharedWork(std::weak_ptr<SharedGroup> group, std::shared_ptr<PendingCall> pending,
             std::shared_ptr<Event> done, Stream& stream)
      : group_(std::move(group)), pending_(std::move(pending)), done_(std::move(done)), stream_(stream) {}

  void wait() override {
    done_->synchronize();
    if (pending_->state == PendingCall::State::kDone) return;
    try {
      stream_.synchronize();  // has the root cause, unless somebody took it already
    } catch (const std::exception& cause) {
      if (const auto group = group_.lock())
        group->fail(FailureKind::kPeerLost, concat(group->who(group->rank()), " failed before ",
                                                   pending_->call.to_string(), " ran: ", cause.what()));
      throw;
    }
    if (pending_->error) std::rethrow_exception(pending_->error);
    throw CommError(concat(pending_->call.to_string(), ", sequence ", pending_->call.sequence,
                           ", did not run because an earlier operation of its stream failed"));
  }
  void wait_on(Stream& stream) override { stream.wait(*done_); }

 private:
  std::weak_ptr<SharedGroup> group_;
  std::shared_ptr<PendingCall> pending_;
  std::shared_ptr<Event> done_;
  Stream& stream_;
};

}  // namespace

// Without it two collectives on two streams could run in different orders on two ranks, and each
// wait for the other. A device that runs streams at its own pace needs the edges; the immediate CPU
// device has none to wait for.
struct IssueOrder {
  std::shared_ptr<PendingCall> last;
  std::shared_ptr<Event> done;
  Device* device = nullptr;

  bool is_pending() const { return last && last->state == PendingCall::State::kWaiting; }
  void put_before(Stream& stream) {
    if (!is_pending()) return;
    if (device == &stream.device()) {
      stream.wait(*done);
    } else {
      done->synchronize();  // events do not reach over devices
    }
  }
  void drain() {
    if (is_pending()) done->synchronize();
  }
};

std::shared_ptr<IssueOrder> make_issue_order() { return std::make_shared<IssueOrder>(); }

SingleUser::Guard::Guard(SingleUser& owner, const SharedGroup& group) : user_(owner.user_) {
  std::thread::id nobody{};
  const std::thread::id self = std::this_thread::get_id();
  outermost_ = user_.compare_exchange_strong(nobody, self);
  require(outermost_ || nobody == self, "group '", group.options().name, "', rank ", group.rank(),
          ": concurrent use by two threads; give each thread a group of its own (split)");
}

SharedCommunicator::SharedCommunicator(std::shared_ptr<SharedGroup> group,
                                       std::shared_ptr<SharedMemorySource> source,
                                       std::shared_ptr<IssueOrder> order, int64_t chunk_bytes)
    : group_(std::move(group)),
      source_(std::move(source)),
      order_(std::move(order)),
      chunk_bytes_(chunk_bytes),
      exceptions_at_birth_(std::uncaught_exceptions()) {}

// Otherwise the group is left when the last collective that is still in a stream has run.
SharedCommunicator::~SharedCommunicator() {
  if (std::uncaught_exceptions() > exceptions_at_birth_) group_->leave("an exception ended its use");
}

template <typename Run>
std::unique_ptr<Work> SharedCommunicator::issue(CollectiveCall call, const std::vector<Tensor>& inputs,
                                                const std::vector<Tensor>& outputs, Stream& stream, Run run) {
  group_->throw_if_failed();
  CpuStream& cpu_stream = as_cpu(stream);
  std::vector<Access> accesses;
  for (const Tensor& tensor : inputs) accesses.push_back(reads(tensor));
  for (const Tensor& tensor : outputs) accesses.push_back(writes(tensor));
  call.sequence = group_->next_sequence();
  auto pending = std::make_shared<PendingCall>(PendingCall{.call = call});
  std::shared_ptr<Event> done = stream.device().create_event();

  const OpInfo info{.name = collective_name(call.op),
                    .kind = OpKind::kCollective,
                    .bytes = call.count * static_cast<int64_t>(dtype_size(call.dtype))};
  order_->put_before(stream);
  const uint64_t before = group_->post(call);
  try {
    cpu_stream.enqueue(info, std::move(accesses),
                       [group = group_, pending, run = std::move(run)](const CpuContext&) {
                         pending->execute(*group, run);
                       });
  } catch (...) {
    group_->withdraw(before);  // the device refused it: it was never issued
    throw;
  }
  stream.record(*done);
  order_->last = pending;
  order_->done = done;
  order_->device = &stream.device();
  return std::make_unique<SharedWork>(group_, std::move(pending), std::move(done), stream);
}

std::unique_ptr<Work> SharedCommunicator::all_reduce(const Tensor& data, ReduceOp op, Stream& stream) {
  const SingleUser::Guard guard(single_user_, *group_);
  void* address = data.defined() ? data.raw_address() : nullptr;
  return issue(
      check_all_reduce(data, op), {}, {data}, stream,
      [address](SharedGroup& group, const CollectiveCall& call) { run_all_reduce(group, call, address); });
}

std::unique_ptr<Work> SharedCommunicator::reduce_scatter(const Tensor& input, const Tensor& output,
                                                         ReduceOp op, Stream& stream) {
  const SingleUser::Guard guard(single_user_, *group_);
  const CollectiveCall call = check_reduce_scatter(input, output, op, rank(), size());
  return issue(
      call, {input}, {output}, stream,
      [from = input.raw_address(), to = output.raw_address()](
          SharedGroup& group, const CollectiveCall& issued) { run_reduce_scatter(group, issued, from, to); });
}

std::unique_ptr<Work> SharedCommunicator::all_gather(const Tensor& input, const Tensor& output,
                                                     Stream& stream) {
  const SingleUser::Guard guard(single_user_, *group_);
  const CollectiveCall call = check_all_gather(input, output, rank(), size());
  return issue(
      call, {input}, {output}, stream,
      [from = input.raw_address(), to = output.raw_address()](
          SharedGroup& group, const CollectiveCall& issued) { run_all_gather(group, issued, from, to); });
}

std::unique_ptr<Work> SharedCommunicator::broadcast(const Tensor& data, int root, Stream& stream) {
  const SingleUser::Guard guard(single_user_, *group_);
  const CollectiveCall call = check_broadcast(data, root, size());
  std::vector<Tensor> inputs, outputs;
  (root == rank() ? inputs : outputs).push_back(data);
  return issue(call, inputs, outputs, stream,
               [address = data.raw_address()](SharedGroup& group, const CollectiveCall& issued) {
                 run_broadcast(group, issued, address);
               });
}

void SharedCommunicator::run_on_host(CollectiveOp op, std::chrono::milliseconds limit,
                                     const std::function<void()>& meetings) {
  group_->throw_if_failed();
  order_->drain();
  const CollectiveCall call{.sequence = group_->next_sequence(), .op = op};
  group_->post(call);
  group_->begin(call, limit);
  meetings();
  group_->end();
}

void SharedCommunicator::barrier(std::chrono::milliseconds limit) {
  const SingleUser::Guard guard(single_user_, *group_);
  require(limit.count() > 0, "barrier: the limit is ", limit.count(), " ms; expected a positive one");
  run_on_host(CollectiveOp::kBarrier, limit, [this] { group_->meet(); });
}

void SharedCommunicator::attach() {
  const SingleUser::Guard guard(single_user_, *group_);
  run_on_host(CollectiveOp::kAttach, group_->options().timeout, [this] { group_->meet(); });
  group_->choose_waiting();
}

void SharedCommunicator::abort(const std::string& reason) noexcept {
  try {
    group_->abort(concat(group_->who(rank()), " aborted the group: ", reason));
  } catch (const std::exception&) {
    group_->abort("a rank aborted the group");  // out of memory for the text
  }
}

}  // namespace polyreme
