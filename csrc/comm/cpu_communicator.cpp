#include "comm/cpu_communicator.h"

#include <exception>

#include "comm/split.h"
#include "comm/staged.h"
#include "device/cpu/cpu_device.h"
#include "tensor/access.h"

namespace polyreme {
namespace {

// Runs `body` as `call`, which was posted, and completes it.
template <typename Body>
void run_posted(Transport& group, const CollectiveCall& call, const JournalEntry& entry, bool at_once,
                const Body& body) {
  struct Ending {  // of the entry, by an exception too
    const JournalEntry& entry;
    bool failed = true;
    ~Ending() { entry.end(failed); }
  } ending{entry};
  entry.start(at_once);
  group.throw_if_failed();
  CallLedger::Line& line = group.ledger().of(call.op);
  if (call.sequence != CallLedger::sequence_of(line.completed) + 1) {
    group.fail(FailureKind::kPeerLost,
               concat(group.who(group.rank()), " skipped the call after ", mark_text(line.completed),
                      ": an earlier operation of its stream failed"));
    group.throw_if_failed();
  }
  body();
  line.completed.store(CallLedger::mark_of(call), std::memory_order_relaxed);
  ending.failed = false;
}

}  // namespace

// Shared by the stream, the Work and the order; only the stream's share keeps the group, so that a group is
// left when its last collective has run or was dropped.
struct PendingCall {
  enum class State { kWaiting, kDone, kFailed };
  CollectiveCall call;
  CallMemory memory;
  JournalEntry entry;
  std::atomic<State> state = State::kWaiting;  // written by the thread that runs the stream
  std::exception_ptr error;                    // before kFailed
  bool at_once = false;                        // of its stream

  // Of a new one, or of one that has run and that nobody else holds.
  void set(const CollectiveCall& issued, CallMemory issued_memory) {
    call = issued;
    memory = std::move(issued_memory);
    state.store(State::kWaiting, std::memory_order_relaxed);
  }
  void execute(Transport& group) {
    try {
      run_posted(group, call, entry, at_once, [&] { group.run(call, memory, group.timeout()); });
      state.store(State::kDone, std::memory_order_release);
    } catch (const std::exception& failure) {
      error = std::current_exception();
      state = State::kFailed;
      group.fail(FailureKind::kPeerLost,
                 concat(group.who(group.rank()), " failed in ", call.to_string(), ": ", failure.what()));
      throw;
    }
  }
};

namespace {

// Of a collective that the device ran while it was enqueued.
class CompletedWork final : public Work {
  void wait() override {}
  void wait_on(Stream&) override {}
};

class CpuWork final : public Work {
 public:
  CpuWork(std::weak_ptr<Transport> group, std::shared_ptr<PendingCall> pending, std::shared_ptr<Event> done,
          Stream& stream)
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
  std::weak_ptr<Transport> group_;
  std::shared_ptr<PendingCall> pending_;
  std::shared_ptr<Event> done_;
  Stream& stream_;
};

// Of a collective that was run by the host, or has nothing to wait for, but whose results are still on their
// way to a GPU.
class CopiedWork final : public Work {
 public:
  explicit CopiedWork(Stream& stream) : done_(stream.device().create_event()) { stream.record(*done_); }
  void wait() override { done_->synchronize(); }
  void wait_on(Stream& stream) override { stream.wait(*done_); }

 private:
  std::unique_ptr<Event> done_;
};

int64_t bytes_of(const CollectiveCall& call) {
  return call.count * static_cast<int64_t>(dtype_size(call.dtype));
}

CallMemory in_place(const Tensor& data) {
  return {.input = data.raw_address(), .output = data.raw_address()};
}

}  // namespace

// Without it two collectives on two streams could run in different orders on two ranks, and each
// wait for the other. A device that runs streams at its own pace needs the edges; the immediate CPU
// device has none to wait for.
struct IssueOrder {
  SingleUser single_user;
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

SingleUser::Guard::Guard(SingleUser& owner, const std::string& group, int rank) : user_(owner.user_) {
  std::thread::id nobody{};
  const std::thread::id self = std::this_thread::get_id();
  outermost_ = user_.compare_exchange_strong(nobody, self);
  require(outermost_ || nobody == self, "group '", group, "', rank ", rank,
          ": concurrent use by two threads; the collectives of a group and of those split from it must come "
          "in one "
          "order on all ranks: issue them from one thread");
}

CpuCommunicator::CpuCommunicator(std::shared_ptr<Transport> transport, GroupJournal journal,
                                 std::shared_ptr<IssueOrder> order)
    : transport_(std::move(transport)),
      journal_(std::move(journal)),
      order_(order ? std::move(order) : std::make_shared<IssueOrder>()),
      exceptions_at_birth_(std::uncaught_exceptions()) {}

// Otherwise the group is left when the last collective that is still in a stream has run.
CpuCommunicator::~CpuCommunicator() {
  if (std::uncaught_exceptions() > exceptions_at_birth_) transport_->leave("an exception ended its use");
}

SingleUser::Guard CpuCommunicator::enter() {
  fork_guard_.require_own("this communicator");
  return {order_->single_user, *transport_};
}

std::unique_ptr<Work> CpuCommunicator::issue(CollectiveCall call, CallMemory memory,
                                             std::span<const Use> uses, Stream& stream) {
  transport_->throw_if_failed();
  if (stream.device().kind() == DeviceKind::kCuda)
    return issue_on_gpu(call, std::move(memory), uses, as_cuda(stream));
  CpuStream& cpu_stream = as_cpu(stream);
  CallLedger::Line& line = transport_->ledger().of(call.op);
  call.sequence = CallLedger::sequence_of(line.posted) + 1;
  JournalParts parts;
  for (const CallMemory::Part& part : memory.parts) parts.add(part.kind == Transfer::Kind::kSend, part.peer);
  std::shared_ptr<PendingCall> pending = std::exchange(spare_, nullptr);
  if (!pending) pending = std::make_shared<PendingCall>();
  pending->set(call, std::move(memory));
  journal_.enqueue(pending->entry, call, bytes_of(call), parts);
  const OpInfo info{.name = collective_name(call.op), .kind = OpKind::kCollective, .bytes = bytes_of(call)};
  order_->put_before(stream);
  const uint64_t before = line.posted.load(std::memory_order_relaxed);  // written by this thread alone
  line.posted.store(CallLedger::mark_of(call), std::memory_order_relaxed);
  try {
    enqueue(cpu_stream, info, uses, pending);
  } catch (...) {
    line.posted.store(before, std::memory_order_relaxed);  // the device refused it: it was never issued
    pending->entry.withdraw();
    throw;
  }
  if (pending->state == PendingCall::State::kDone) {
    if (pending.use_count() == 1) spare_ = std::move(pending);
    return std::make_unique<CompletedWork>();
  }
  std::shared_ptr<Event> done = stream.device().create_event();
  stream.record(*done);
  order_->last = pending;
  order_->done = done;
  order_->device = &stream.device();
  return std::make_unique<CpuWork>(transport_, pending, std::move(done), stream);
}

std::unique_ptr<Work> CpuCommunicator::issue_on_gpu(CollectiveCall call, CallMemory memory,
                                                    std::span<const Use> uses, CudaStream& stream) {
  std::vector<StagedTensor> tensors;
  for (const Use& use : uses) tensors.push_back({use.tensor, use.write});
  if (size() == 1) {
    enqueue_alone(stream, tensors);
    return std::make_unique<CopiedWork>(stream);
  }
  StagedCall staged(stream, std::move(memory), tensors);
  order_->drain();
  CallLedger::Line& line = transport_->ledger().of(call.op);
  call.sequence = CallLedger::sequence_of(line.posted) + 1;
  line.posted.store(CallLedger::mark_of(call), std::memory_order_relaxed);
  PendingCall pending;
  pending.set(call, staged.memory());
  journal_.enqueue(pending.entry, call, bytes_of(call));
  pending.at_once = true;
  pending.execute(*transport_);
  staged.copy_back();
  return std::make_unique<CopiedWork>(stream);
}

void CpuCommunicator::enqueue(CpuStream& stream, const OpInfo& info, std::span<const Use> uses,
                              const std::shared_ptr<PendingCall>& pending) {
  pending->at_once = stream.runs_at_once();
  if (pending->at_once)  // the common case of small calls: no memory, no counting of owners
    return stream.enqueue(info, {}, [group = transport_.get(), call = pending.get()](const CpuContext&) {
      call->execute(*group);
    });
  std::vector<Access> accesses;
  for (const Use& use : uses) accesses.push_back(use.write ? writes(use.tensor) : reads(use.tensor));
  stream.enqueue(info, std::move(accesses),
                 [group = transport_, pending](const CpuContext&) { pending->execute(*group); });
}

Tensor CpuCommunicator::allocate(Device& device, DType dtype, const Shape& shape, const char* label) {
  const size_t size_bytes = static_cast<size_t>(shape.numel()) * dtype_size(dtype);
  std::shared_ptr<void> memory =
      device.kind() == DeviceKind::kCpu ? transport_->allocate(size_bytes) : nullptr;
  if (!memory) return empty(device, dtype, shape, label);
  void* address = memory.get();
  const auto bytes = static_cast<int64_t>(size_bytes);
  device.count_host_memory(bytes);
  std::shared_ptr<void> counted(address, [&device, bytes, kept = std::move(memory)](void*) mutable {
    device.count_host_memory(-bytes);
    kept.reset();
  });
  return Tensor(device.wrap_host(address, size_bytes, counted), dtype, shape);
}

std::unique_ptr<Work> CpuCommunicator::all_reduce(const Tensor& data, ReduceOp op, Stream& stream) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_all_reduce(data, op);
  return issue(call, in_place(data), {{data, true}}, stream);
}

std::unique_ptr<Work> CpuCommunicator::reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op,
                                                      Stream& stream) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_reduce_scatter(input, output, op, rank(), size());
  return issue(call, {.input = input.raw_address(), .output = output.raw_address()},
               {{input, false}, {output, true}}, stream);
}

std::unique_ptr<Work> CpuCommunicator::all_gather(const Tensor& input, const Tensor& output, Stream& stream,
                                                  std::span<const int64_t> counts) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_all_gather(input, output, counts, rank(), size());
  return issue(call,
               {.input = input.raw_address(),
                .output = output.raw_address(),
                .receive_counts = {counts.begin(), counts.end()}},
               {{input, false}, {output, true}}, stream);
}

std::unique_ptr<Work> CpuCommunicator::broadcast(const Tensor& data, int root, Stream& stream) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_broadcast(data, root, size());
  return issue(call, in_place(data), {{data, root != rank()}}, stream);
}

std::unique_ptr<Work> CpuCommunicator::all_to_all(const Tensor& input, const Tensor& output, Stream& stream,
                                                  std::span<const int64_t> send_counts,
                                                  std::span<const int64_t> receive_counts) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_all_to_all(input, output, send_counts, receive_counts, size());
  return issue(call,
               {.input = input.raw_address(),
                .output = output.raw_address(),
                .send_counts = {send_counts.begin(), send_counts.end()},
                .receive_counts = {receive_counts.begin(), receive_counts.end()}},
               {{input, false}, {output, true}}, stream);
}

std::unique_ptr<Work> CpuCommunicator::exchange(std::span<const Transfer> transfers, Stream& stream) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_exchange(transfers, rank(), size());
  CallMemory memory;
  std::vector<Use> uses;
  for (const Transfer& transfer : transfers) {
    const Tensor& tensor = transfer.tensor;
    uses.push_back({tensor, transfer.kind == Transfer::Kind::kReceive});
    memory.parts.push_back(
        {transfer.kind, transfer.peer, tensor.raw_address(), tensor.numel(), tensor.dtype()});
  }
  return issue(call, std::move(memory), uses, stream);
}

void CpuCommunicator::run_on_host(CollectiveOp op, const std::function<void(const CollectiveCall&)>& body) {
  transport_->throw_if_failed();
  order_->drain();
  CallLedger::Line& line = transport_->ledger().of(op);
  const CollectiveCall call{.sequence = CallLedger::sequence_of(line.posted) + 1, .op = op};
  line.posted.store(CallLedger::mark_of(call), std::memory_order_relaxed);
  run_posted(*transport_, call, journal_.enqueue(call, 0), true, [&] { body(call); });
}

void CpuCommunicator::barrier(std::chrono::milliseconds limit) {
  const SingleUser::Guard guard = enter();
  require(limit.count() > 0, "barrier: the limit is ", limit.count(), " ms; expected a positive one");
  run_on_host(CollectiveOp::kBarrier, [&](const CollectiveCall& call) { transport_->run(call, {}, limit); });
}

void CpuCommunicator::attach() {
  const SingleUser::Guard guard = enter();
  run_on_host(CollectiveOp::kAttach,
              [&](const CollectiveCall& call) { transport_->run(call, {}, transport_->timeout()); });
}

std::unique_ptr<Communicator> CpuCommunicator::split(int color, int key, const std::string& name) {
  const SingleUser::Guard guard = enter();
  require(name.size() <= SplitWish::kMaxNameBytes && name.find('\0') == std::string::npos,
          "split: the name of a group has at most ", SplitWish::kMaxNameBytes,
          " characters, none of them NUL; got ", name.size());
  std::unique_ptr<Transport> child;
  std::exception_ptr no_memory;
  uint64_t sequence = 0;
  run_on_host(CollectiveOp::kSplit, [&](const CollectiveCall& call) {
    sequence = call.sequence;
    try {
      child = transport_->split(call, color, key, name);
    } catch (const OutOfMemory&) {
      no_memory = std::current_exception();  // on every rank: the call ends in good order
    } catch (const std::exception& failure) {
      transport_->fail(FailureKind::kPeerLost,
                       concat(transport_->who(rank()), " failed in split: ", failure.what()));
      throw;
    }
  });
  if (no_memory) std::rethrow_exception(no_memory);
  if (!child) return nullptr;
  GroupJournal journal = journal_.subgroup(name, child->rank(), child->size(), color, sequence);
  auto communicator = std::make_unique<CpuCommunicator>(std::move(child), std::move(journal), order_);
  communicator->attach();
  return communicator;
}

void CpuCommunicator::abort(const std::string& reason) noexcept {
  if (fork_guard_.is_inherited()) return;
  try {
    transport_->abort(concat(transport_->who(rank()), " aborted the group: ", reason));
  } catch (const std::exception&) {
    transport_->abort("a rank aborted the group");  // out of memory for the text
  }
}

void CpuCommunicator::set_label(const std::string& label) {
  const SingleUser::Guard guard = enter();
  journal_.set_label(label);
}

}  // namespace polyreme
