#include "comm/hierarchical/hierarchical_transport.h"

#include <algorithm>
#include <cstring>

#include "comm/messages/slices.h"

namespace polyreme {
namespace {

// What the inner groups do: the levels of the tree below the last one, in partial_dtype.
CollectiveCall inner_call(CollectiveOp op, const Reduction& inner, int64_t count) {
  return {.count = count, .op = op, .dtype = inner.out, .reduce = inner.op};
}

struct Levels {
  explicit Levels(const CollectiveCall& call, int size)
      : inner(Reduction::whole(call.reduce, call.dtype, size).partial(partial_dtype(call.dtype))),
        widen{ReduceOp::kSum, call.dtype, inner.out},
        finish{call.reduce, inner.out, call.dtype, size},
        each(static_cast<int64_t>(dtype_size(call.dtype))),
        wide(static_cast<int64_t>(dtype_size(inner.out))) {}

  // Whether user memory can hold partial results.
  bool in_place() const { return inner.out == finish.out; }

  Reduction inner, widen, finish;
  int64_t each, wide;  // bytes
};

void convert(const Reduction& how, const void* from, int64_t count, void* to) {
  if (from != to || how.op == ReduceOp::kAverage) tree_reduce(how, &from, 1, count, to);
}

// Runs `body` as a call of a group that no CpuCommunicator drives: numbers it.
template <typename Body>
void run_numbered(Transport& group, CollectiveCall call, const Body& body) {
  CallLedger::Line& line = group.ledger().of(call.op);
  call.sequence = CallLedger::sequence_of(line.posted) + 1;
  line.posted = CallLedger::mark_of(call);
  body(call);
  line.completed = CallLedger::mark_of(call);
}

void attach(Transport& group) {
  run_numbered(group, {.op = CollectiveOp::kAttach},
               [&](const CollectiveCall& call) { group.run(call, {}, group.timeout()); });
}

FailureKind kind_of(const CommError& failure) {
  if (dynamic_cast<const Timeout*>(&failure) != nullptr) return FailureKind::kTimeout;
  if (dynamic_cast<const CollectiveMismatch*>(&failure) != nullptr) return FailureKind::kMismatch;
  return FailureKind::kPeerLost;
}

}  // namespace

std::unique_ptr<HierarchicalTransport> HierarchicalTransport::make(std::unique_ptr<MessageTransport> flat,
                                                                   std::unique_ptr<Transport> host,
                                                                   std::vector<int> hosts) {
  std::unique_ptr<HierarchicalTransport> group(new HierarchicalTransport());
  group->flat_ = std::move(flat);
  group->hosts_ = std::move(hosts);
  group->grid_ = host_grid(group->hosts_);
  if (!group->grid_) return group;
  const HostGrid grid = *group->grid_;
  const int rank = group->rank();
  group->host_ = std::move(host);
  group->guard([&] {
    run_numbered(*group->flat_, {.op = CollectiveOp::kSplit}, [&](const CollectiveCall& call) {
      group->cross_ =
          group->flat_->split(call, grid.local(rank), grid.host(rank), group->name() + " (hosts)");
    });
    attach(*group->host_);
    attach(*group->cross_);
  });
  return group;
}

void HierarchicalTransport::guard(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError& failure) {
    fail(kind_of(failure), failure.what());
    flat_->throw_if_failed();
    throw;
  }
}

void HierarchicalTransport::run(const CollectiveCall& call, const CallMemory& memory,
                                std::chrono::milliseconds limit) {
  limit_ = limit;
  guard([&] { dispatch(call, memory); });
}

void HierarchicalTransport::dispatch(const CollectiveCall& call, const CallMemory& memory) {
  const bool in_levels = call.op == CollectiveOp::kAllReduce || call.op == CollectiveOp::kReduceScatter ||
                         call.op == CollectiveOp::kAllGather || call.op == CollectiveOp::kBroadcast;
  // Whatever way a rank takes, it opens the call in the same way: calls that differ are found.
  if (!grid_ || !in_levels || flat_->rides(call)) return flat_->run(call, memory, limit_);
  flat_->open(call, limit_);
  switch (call.op) {
    case CollectiveOp::kAllReduce:
      return all_reduce(call, static_cast<char*>(memory.output));
    case CollectiveOp::kReduceScatter:
      return reduce_scatter(call, static_cast<const char*>(memory.input), static_cast<char*>(memory.output));
    case CollectiveOp::kAllGather:
      return all_gather(call, memory);
    default:
      return broadcast(call, static_cast<char*>(memory.output));
  }
}

void HierarchicalTransport::run_inner(Transport& group, const CollectiveCall& call,
                                      const CallMemory& memory) {
  run_numbered(group, call, [&](const CollectiveCall& numbered) { group.run(numbered, memory, limit_); });
}

char* HierarchicalTransport::scratch(int64_t bytes) {
  if (std::ssize(scratch_) < bytes) scratch_.resize(static_cast<size_t>(bytes));
  return scratch_.data();
}

// Reduce-scatter inside the host, all-reduce of the slice between hosts, all-gather inside the host. As one
// piece where user memory can hold partial results, else in pieces; what does not fill a slice for every rank
// of the host is a last piece, padded.
void HierarchicalTransport::all_reduce(const CollectiveCall& call, char* data) {
  const Levels levels(call, size());
  const int64_t num_local = grid_->ranks_per_host, local = grid_->local(rank());
  const int64_t longest = num_local * std::max<int64_t>(flat_->options().chunk_bytes / levels.wide, 1);
  for (int64_t begin = 0; begin < call.count;) {
    const int64_t rest = call.count - begin, whole_slices = rest - rest % num_local;
    const bool in_place = levels.in_place() && whole_slices > 0;
    const int64_t count = whole_slices == 0 ? rest
                          : in_place        ? whole_slices
                                            : std::min(longest, whole_slices);
    const Slices slices = Slices::of(static_cast<int>(num_local), count);
    const int64_t slice = slices.max_count();
    char* user = data + begin * levels.each;
    char* vector = in_place ? user : scratch(num_local * slice * levels.wide);
    if (!in_place) {
      convert(levels.widen, user, count, vector);
      std::memset(vector + count * levels.wide, 0,
                  static_cast<size_t>((num_local * slice - count) * levels.wide));
    }
    char* own = vector + local * slice * levels.wide;
    run_inner(*host_, inner_call(CollectiveOp::kReduceScatter, levels.inner, slice),
              {.input = vector, .output = own});
    run_inner(*cross_, inner_call(CollectiveOp::kAllReduce, levels.inner, slice),
              {.input = own, .output = own});
    const int me = static_cast<int>(local);
    char* result = user + slices.begin(me) * levels.each;
    convert(levels.finish, own, slices.count(me), result);
    CollectiveCall gather{.count = slice, .op = CollectiveOp::kAllGather, .dtype = call.dtype};
    CallMemory memory{.input = result, .output = user};
    if (count % num_local != 0) {
      gather.count = count;
      gather.counts_hash = 1;  // every rank of the host has the same counts
      for (int r = 0; r < num_local; ++r) memory.receive_counts.push_back(slices.count(r));
    }
    run_inner(*host_, gather, memory);
    begin += count;
  }
}

// For each host a reduce-scatter of its slices inside this one, then a reduce-scatter of those sums between
// hosts.
void HierarchicalTransport::reduce_scatter(const CollectiveCall& call, const char* input, char* output) {
  const Levels levels(call, size());
  const int64_t num_local = grid_->ranks_per_host, num_hosts = grid_->num_hosts;
  const int64_t longest = std::max<int64_t>(flat_->options().chunk_bytes / levels.wide, 1);
  for (int64_t begin = 0; begin < call.count; begin += longest) {
    const int64_t count = std::min(longest, call.count - begin);
    char* vector = scratch((num_local + num_hosts) * count * levels.wide);
    char* sums = vector + num_local * count * levels.wide;
    for (int host = 0; host < num_hosts; ++host) {
      for (int local = 0; local < num_local; ++local)
        convert(levels.widen, input + (grid_->rank_of(host, local) * call.count + begin) * levels.each, count,
                vector + local * count * levels.wide);
      run_inner(*host_, inner_call(CollectiveOp::kReduceScatter, levels.inner, count),
                {.input = vector, .output = sums + host * count * levels.wide});
    }
    char* own = sums + grid_->host(rank()) * count * levels.wide;
    run_inner(*cross_, inner_call(CollectiveOp::kReduceScatter, levels.inner, count),
              {.input = sums, .output = own});
    convert(levels.finish, own, count, output + begin * levels.each);
  }
}

// The blocks of the ranks of equal number between hosts, then for each host its blocks inside this one.
void HierarchicalTransport::all_gather(const CollectiveCall& call, const CallMemory& memory) {
  const auto each = static_cast<int64_t>(dtype_size(call.dtype));
  const bool even = memory.receive_counts.empty();
  const Slices blocks = even ? Slices::equal(size(), call.count) : Slices::of_counts(memory.receive_counts);
  auto* output = static_cast<char*>(memory.output);
  const auto place = [&](int r) { return output + blocks.begin(r) * each; };
  const int local = grid_->local(rank()), own_host = grid_->host(rank());
  copy_bytes(place(rank()), memory.input, blocks.count(rank()) * each);
  CallMemory between;
  for (int host = 0; host < grid_->num_hosts; ++host) {
    if (host == own_host) continue;
    const int peer = grid_->rank_of(host, local);
    between.parts.push_back({Transfer::Kind::kSend, host, place(rank()), blocks.count(rank()), call.dtype});
    between.parts.push_back({Transfer::Kind::kReceive, host, place(peer), blocks.count(peer), call.dtype});
  }
  run_inner(*cross_, {.count = blocks.count(rank()) * each, .op = CollectiveOp::kExchange}, between);
  for (int host = 0; host < grid_->num_hosts; ++host) {
    const int first = grid_->rank_of(host, 0), end = grid_->rank_of(host + 1, 0);
    CollectiveCall inside = call;
    CallMemory part{.input = place(grid_->rank_of(host, local)), .output = place(first)};
    if (!even) {
      inside.count = blocks.begin(end) - blocks.begin(first);
      part.receive_counts = {memory.receive_counts.begin() + first, memory.receive_counts.begin() + end};
    }
    run_inner(*host_, inside, part);
  }
}

void HierarchicalTransport::broadcast(const CollectiveCall& call, char* data) {
  CollectiveCall inner = call;
  if (grid_->local(rank()) == grid_->local(call.root)) {
    inner.root = grid_->host(call.root);
    run_inner(*cross_, inner, {.input = data, .output = data});
  }
  inner.root = grid_->local(call.root);
  run_inner(*host_, inner, {.input = data, .output = data});
}

std::unique_ptr<Transport> HierarchicalTransport::split(const CollectiveCall& call, int color, int key,
                                                        const std::string& name) {
  std::unique_ptr<Transport> child;
  limit_ = timeout();
  guard([&] {
    std::unique_ptr<MessageTransport> flat = flat_->split_messages(call, color, key, name);
    if (!grid_) {
      if (flat) child = std::move(flat);
      return;
    }
    std::unique_ptr<Transport> host;
    int32_t possible = 1;
    std::string text = "another rank could not make its part of the group";
    run_numbered(*host_, {.op = CollectiveOp::kSplit}, [&](const CollectiveCall& inside) {
      try {
        host = host_->split(inside, color, key, name + " (host)");
      } catch (const OutOfMemory& failure) {
        possible = 0;
        text = failure.what();
      }
    });
    const CollectiveCall agree{.sequence = call.sequence,
                               .count = 1,
                               .op = CollectiveOp::kAllReduce,
                               .dtype = DType::kI32,
                               .reduce = ReduceOp::kMin};
    flat_->run(agree, {.input = &possible, .output = &possible}, limit_);
    require<OutOfMemory>(possible == 1, text);
    if (!flat) return;
    std::vector<int> hosts;
    for (const int parent : flat->parent_ranks()) hosts.push_back(hosts_[static_cast<size_t>(parent)]);
    child = make(std::move(flat), std::move(host), std::move(hosts));
  });
  return child;
}

void HierarchicalTransport::fail(FailureKind kind, const std::string& text) noexcept {
  flat_->fail(kind, text);
  if (host_) host_->fail(kind, text);
  if (cross_) cross_->fail(kind, text);
}

void HierarchicalTransport::abort(const std::string& text) noexcept {
  flat_->abort(text);  // `cross` was split from it
  if (host_) host_->abort(text);
}

void HierarchicalTransport::leave(const std::string& why) noexcept { flat_->leave(why); }

}  // namespace polyreme
