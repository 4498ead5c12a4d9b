#include "comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>

#include "comm/nccl/nccl_algorithms.h"
#include "comm/nccl/nccl_table.h"
#include "comm/split.h"

namespace polyreme {
namespace {

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclFamily> family, std::shared_ptr<NcclCall> call)
      : family_(std::move(family)), call_(std::move(call)) {}
  void wait() override { family_->wait(*call_); }
  void wait_on(Stream& stream) override { stream.wait(*call_->done); }

 private:
  std::shared_ptr<NcclFamily> family_;
  std::shared_ptr<NcclCall> call_;
};

std::vector<int64_t> to_vector(std::span<const int64_t> values) { return {values.begin(), values.end()}; }

// A call as it crosses the store: its bytes, and the counts that say what it sends to whom and expects.
std::string record_of(const CollectiveCall& call, const CallMemory& memory) {
  std::string text(sizeof call, '\0');
  std::memcpy(text.data(), static_cast<const void*>(&call), sizeof call);
  for (const auto* counts : {&memory.send_counts, &memory.receive_counts})
    text.append(reinterpret_cast<const char*>(counts->data()), counts->size() * sizeof(int64_t));
  return text;
}

int64_t count_in(const std::string& record, size_t index) {
  int64_t count = 0;
  std::memcpy(&count, record.data() + sizeof(CollectiveCall) + index * sizeof count, sizeof count);
  return count;
}

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclFamily> family, std::shared_ptr<NcclGroup> group,
                                   ReduceMode mode, const NcclOptions& options, GroupJournal journal)
    : family_(std::move(family)),
      group_(std::move(group)),
      mode_(mode),
      options_(options),
      exceptions_at_birth_(std::uncaught_exceptions()),
      journal_(std::move(journal)),
      num_sent_(group_->members.size()),
      num_received_(group_->members.size()) {}

NcclCommunicator::~NcclCommunicator() {
  if (std::uncaught_exceptions() > exceptions_at_birth_ && !fork_guard_.is_inherited())
    family_->break_all(FailureKind::kPeerLost, concat("group '", name(), "': ", family_->who(*group_, rank()),
                                                      " left: an exception ended its use"));
  family_->retire(group_);
}

SingleUser::Guard NcclCommunicator::enter() {
  fork_guard_.require_own("this communicator");
  return {single_user_, *this};
}

// ---- collectives -----------------------------------------------------------------------------------

std::unique_ptr<Work> NcclCommunicator::issue(CollectiveCall call, const CallMemory& memory,
                                              const std::vector<Tensor>& tensors, Stream& stream) {
  family_->throw_if_failed();
  CudaStream& cuda_stream = as_cuda(stream);
  require(&stream.device() == &family_->device(), "group '", name(), "', rank ", rank(), " is of ",
          family_->device().description(), "; the stream is of ", stream.device().description());
  CallLedger::Line& line = group_->ledger.of(call.op);
  call.sequence = CallLedger::sequence_of(line.posted) + 1;
  auto pending = std::make_shared<NcclCall>();
  pending->group = group_;
  pending->call = call;
  pending->started = family_->device().create_event();
  pending->done = family_->device().create_event();
  pending->entry = journal_.enqueue(call, call.count * static_cast<int64_t>(dtype_size(call.dtype)));
  line.posted = CallLedger::mark_of(call);
  if (options_.check_calls) talk([&] { compare(call, memory); });
  const NcclFamily::Issuing issuing(*family_);
  try {
    family_->put_in_order(stream);
    stream.record(*pending->started);
    enqueue(call, memory, tensors, cuda_stream);
    stream.record(*pending->done);
  } catch (const std::exception& failure) {
    // What was enqueued so far cannot be taken back, and the others would wait for the rest.
    pending->entry.end(true);
    family_->break_all(FailureKind::kPeerLost, concat(family_->where(*group_, call), ": ", failure.what()));
    throw;
  }
  family_->add_in_flight(pending);
  return std::make_unique<NcclWork>(family_, std::move(pending));
}

void NcclCommunicator::enqueue(const CollectiveCall& call, const CallMemory& memory,
                               const std::vector<Tensor>& tensors, CudaStream& stream) {
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (const Tensor& tensor : tensors) buffers.push_back(tensor.buffer());
  const bool reduces = call.op == CollectiveOp::kAllReduce || call.op == CollectiveOp::kReduceScatter;
  const bool ordered = reduces && mode_ == ReduceMode::kOrdered && call.count > 0;
  void* staging = nullptr;
  int64_t staging_bytes = 0;
  if (ordered) {
    staging_bytes = ordered_staging_bytes(call, size(), options_.staging_bytes);
    buffers.push_back(
        family_->device().allocate(static_cast<size_t>(staging_bytes), "staging of a reduction"));
    staging = buffers.back()->address();
  }
  stream.enqueue(std::move(buffers), [&](void* handle) {
    const NcclPlace place{
        .nccl = family_->table(),
        .cuda = family_->device().table(),
        .comm = group_->comm,
        .stream = handle,
        .rank = rank(),
        .size = size(),
        .cuda_index = family_->device().index(),
        .check = [&](const PolyremeNcclStatus& status) { family_->check(status, *group_, call); },
        .settle = [&] { family_->settle(group_->comm, *group_, call, group_->timeout); }};
    if (!ordered) {
      run_nccl(place, call, memory);
    } else if (call.op == CollectiveOp::kAllReduce) {
      ordered_all_reduce(place, call, memory, staging, staging_bytes);
    } else {
      ordered_reduce_scatter(place, call, memory, staging, staging_bytes);
    }
  });
}

std::unique_ptr<Work> NcclCommunicator::all_reduce(const Tensor& data, ReduceOp op, Stream& stream) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_all_reduce(data, op);
  return issue(call, {.input = data.raw_address(), .output = data.raw_address()}, {data}, stream);
}

std::unique_ptr<Work> NcclCommunicator::reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op,
                                                       Stream& stream) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_reduce_scatter(input, output, op, rank(), size());
  return issue(call, {.input = input.raw_address(), .output = output.raw_address()}, {input, output}, stream);
}

std::unique_ptr<Work> NcclCommunicator::all_gather(const Tensor& input, const Tensor& output, Stream& stream,
                                                   std::span<const int64_t> counts) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_all_gather(input, output, counts, rank(), size());
  return issue(
      call,
      {.input = input.raw_address(), .output = output.raw_address(), .receive_counts = to_vector(counts)},
      {input, output}, stream);
}

std::unique_ptr<Work> NcclCommunicator::broadcast(const Tensor& data, int root, Stream& stream) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_broadcast(data, root, size());
  return issue(call, {.input = data.raw_address(), .output = data.raw_address()}, {data}, stream);
}

std::unique_ptr<Work> NcclCommunicator::all_to_all(const Tensor& input, const Tensor& output, Stream& stream,
                                                   std::span<const int64_t> send_counts,
                                                   std::span<const int64_t> receive_counts) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_all_to_all(input, output, send_counts, receive_counts, size());
  return issue(call,
               {.input = input.raw_address(),
                .output = output.raw_address(),
                .send_counts = to_vector(send_counts),
                .receive_counts = to_vector(receive_counts)},
               {input, output}, stream);
}

std::unique_ptr<Work> NcclCommunicator::exchange(std::span<const Transfer> transfers, Stream& stream) {
  const SingleUser::Guard guard = enter();
  const CollectiveCall call = check_exchange(transfers, rank(), size());
  CallMemory memory;
  std::vector<Tensor> tensors;
  for (const Transfer& transfer : transfers) {
    const Tensor& tensor = transfer.tensor;
    tensors.push_back(tensor);
    memory.parts.push_back(
        {transfer.kind, transfer.peer, tensor.raw_address(), tensor.numel(), tensor.dtype()});
  }
  return issue(call, memory, tensors, stream);
}

std::string NcclCommunicator::await_key(const std::string& key, const CollectiveCall& call) {
  std::optional<std::string> value;
  family_->await([&] { return (value = family_->store().try_get(key)).has_value(); }, group_->timeout,
                 *group_, call);
  return *value;
}

// ---- calls compared through the store ----------------------------------------------------------------

void NcclCommunicator::compare(const CollectiveCall& call, const CallMemory& memory) {
  if (call.op == CollectiveOp::kExchange) return compare_exchange(call, memory);
  const std::string prefix = concat(group_->base, "/call/", call.sequence, "/");
  family_->store().set(concat(prefix, rank()), record_of(call, memory));
  std::vector<CollectiveCall> calls;
  std::vector<std::string> records;
  for (int r = 0; r < size(); ++r) {
    records.push_back(await_key(concat(prefix, r), call));
    calls.emplace_back();
    std::memcpy(static_cast<void*>(&calls.back()), records.back().data(), sizeof(CollectiveCall));
  }
  std::string conflict;
  if (std::adjacent_find(calls.begin(), calls.end(), std::not_equal_to<>()) != calls.end())
    conflict = mismatch_text(calls);
  const auto n = static_cast<size_t>(size());
  if (conflict.empty() && call.op == CollectiveOp::kAllToAll && call.counts_hash != 0)
    for (size_t from = 0; from < n; ++from)
      for (size_t to = 0; to < n; ++to) {
        const int64_t sent = count_in(records[from], to), expected = count_in(records[to], n + from);
        if (sent != expected && conflict.empty())
          conflict = concat("all_to_all: rank ", from, " sends ", sent, " elements to rank ", to,
                            ", which expects ", expected);
      }
  if (!conflict.empty())
    family_->fail(FailureKind::kMismatch,
                  concat("group '", name(), "', sequence ", call.sequence, ": ", conflict));
}

// Both sides of each pair say what the n-th tensor between them is.
void NcclCommunicator::compare_exchange(const CollectiveCall& call, const CallMemory& memory) {
  std::vector<std::pair<std::string, std::string>> awaited;  // the other side's key, and what it should hold
  for (const CallMemory::Part& part : memory.parts) {
    const bool sends = part.kind == Transfer::Kind::kSend;
    const auto peer = static_cast<size_t>(part.peer);
    const uint64_t n = sends ? num_sent_[peer]++ : num_received_[peer]++;
    const std::string pair = sends ? concat(rank(), "-", part.peer) : concat(part.peer, "-", rank());
    const std::string base = concat(group_->base, "/pair/", pair, "/", n),
                      own = concat(dtype_name(part.dtype), "[", part.count, "]");
    family_->store().set(base + (sends ? "/sent" : "/expected"), own);
    awaited.emplace_back(base + (sends ? "/expected" : "/sent"), own);
  }
  for (size_t i = 0; i < awaited.size(); ++i) {
    const auto& [key, own] = awaited[i];
    const std::string other = await_key(key, call);
    const CallMemory::Part& part = memory.parts[i];
    const bool sends = part.kind == Transfer::Kind::kSend;
    if (other != own)
      family_->fail(FailureKind::kMismatch,
                    concat("group '", name(), "', exchange: rank ", sends ? rank() : part.peer, " sends ",
                           sends ? own : other, ", rank ", sends ? part.peer : rank(), " expects ",
                           sends ? other : own));
  }
}

// ---- calls of the host -------------------------------------------------------------------------------

void NcclCommunicator::talk(const std::function<void()>& body) {
  try {
    body();
  } catch (const PeerLost& lost) {
    family_->fail_without_store(lost.what());
  }
}

void NcclCommunicator::run_on_host(CollectiveOp op, const std::function<void(const CollectiveCall&)>& body) {
  family_->throw_if_failed();
  family_->drain();
  CallLedger::Line& line = group_->ledger.of(op);
  const CollectiveCall call{.sequence = CallLedger::sequence_of(line.posted) + 1, .op = op};
  line.posted = CallLedger::mark_of(call);
  const JournalEntry entry = journal_.enqueue(call, 0);
  entry.start();
  try {
    talk([&] { body(call); });
  } catch (...) {
    entry.end(true);
    throw;
  }
  entry.end(false);
  line.completed = CallLedger::mark_of(call);
}

// In the store, where a Timeout finds who is missing: the counter says how often all ranks together have
// come.
void NcclCommunicator::barrier(std::chrono::milliseconds limit) {
  const SingleUser::Guard guard = enter();
  require(limit.count() > 0, "barrier: the limit is ", limit.count(), " ms; expected a positive one");
  run_on_host(CollectiveOp::kBarrier, [&](const CollectiveCall& call) {
    Store& store = family_->store();
    const std::string key = group_->base + "/barrier";
    const int64_t wanted = ++num_barriers_ * size();
    if (store.add(key, 1) < wanted)
      family_->await([&] { return store.add(key, 0) >= wanted; }, limit, *group_, call);
  });
}

struct NcclCommunicator::Wish {
  int color = -1;
  int key = 0;
  std::string name;
};

std::vector<NcclCommunicator::Wish> NcclCommunicator::exchange_wishes(const CollectiveCall& call, int color,
                                                                      int key, const std::string& name) {
  const std::string prefix = concat(group_->base, "/split/", call.sequence, "/");
  family_->store().set(concat(prefix, rank()), concat(color, " ", key, " ", name));
  std::vector<Wish> wishes;
  for (int r = 0; r < size(); ++r) {
    std::istringstream text(await_key(concat(prefix, r), call));
    Wish wish;
    text >> wish.color >> wish.key;
    text.get();
    std::getline(text, wish.name, '\0');
    wishes.push_back(std::move(wish));
  }
  return wishes;
}

std::unique_ptr<Communicator> NcclCommunicator::split(int color, int key, const std::string& name) {
  const SingleUser::Guard guard = enter();
  constexpr size_t kMaxNameBytes = SplitWish::kMaxNameBytes;
  require(name.size() <= kMaxNameBytes && name.find('\0') == std::string::npos,
          "split: the name of a group has at most ", kMaxNameBytes, " characters, none of them NUL; got ",
          name.size());
  auto child = std::make_shared<NcclGroup>();
  uint64_t sequence = 0;
  run_on_host(CollectiveOp::kSplit, [&](const CollectiveCall& call) {
    sequence = call.sequence;
    const std::vector<Wish> wishes = exchange_wishes(call, color, key, name);
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r)
      if (color >= 0 && wishes[static_cast<size_t>(r)].color == color) ranks.push_back(r);
    std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
      return wishes[static_cast<size_t>(a)].key < wishes[static_cast<size_t>(b)].key;
    });
    for (const int r : ranks)
      if (const Wish& other = wishes[static_cast<size_t>(r)]; other.name != name)
        family_->fail(FailureKind::kMismatch,
                      concat("group '", group_->name, "', split: the group of color ", color, " is '", name,
                             "' on rank ", rank(), " and '", other.name, "' on rank ", r));
    child->name = name;
    child->base = concat(group_->base, "/split/", call.sequence, "/color", color);
    child->timeout = group_->timeout;
    for (const int r : ranks) child->members.push_back(group_->members[static_cast<size_t>(r)]);
    child->rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());

    const NcclFamily::Issuing issuing(*family_);
    if (color >= 0) family_->add(child);
    family_->check(
        family_->table().split(group_->comm, color, child->rank, child->name.c_str(), &child->comm), *group_,
        call);
    family_->settle(group_->comm, *group_, call, group_->timeout);
    if (color < 0) return;
    require<CommError>(child->comm != nullptr, family_->where(*group_, call), ": NCCL made no communicator");
    family_->settle(child->comm, *group_, call, group_->timeout);
  });
  if (color < 0) return nullptr;
  GroupJournal journal = journal_.subgroup(name, child->rank, child->size(), color, sequence);
  return std::make_unique<NcclCommunicator>(family_, std::move(child), mode_, options_, std::move(journal));
}

void NcclCommunicator::abort(const std::string& reason) noexcept {
  std::string text = "a rank aborted the group";
  try {
    text = concat("group '", name(), "': ", family_->who(*group_, rank()), " aborted the group: ", reason);
  } catch (const std::exception&) {  // out of memory for the text
  }
  family_->break_all(FailureKind::kPeerLost, text);
}

void NcclCommunicator::set_label(const std::string& label) {
  const SingleUser::Guard guard = enter();
  journal_.set_label(label);
}

}  // namespace polyreme
