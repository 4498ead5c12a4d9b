#include "comm/messages/message_transport.h"

#include "comm/messages/algorithms.h"
#include "comm/split.h"

namespace polyreme {

void MessageTransport::run(const CollectiveCall& call, const CallMemory& memory,
                           std::chrono::milliseconds limit) {
  group_->begin(call, limit);
  switch (call.op) {
    case CollectiveOp::kAllReduce:
      return run_all_reduce(*group_, call, memory.output);
    case CollectiveOp::kReduceScatter:
      return run_reduce_scatter(*group_, call, memory.input, memory.output);
    case CollectiveOp::kAllGather:
      return run_all_gather(*group_, call, memory.input, memory.output, memory.receive_counts);
    case CollectiveOp::kBroadcast:
      return run_broadcast(*group_, call, memory.output);
    case CollectiveOp::kAllToAll:
      return run_all_to_all(*group_, call, memory);
    case CollectiveOp::kExchange:
      return run_exchange(*group_, call, memory.parts);
    case CollectiveOp::kAttach:
    case CollectiveOp::kBarrier:
      return group_->open();
    default:
      throw NotAvailable(concat(call.to_string(), " over messages"));
  }
}

void MessageTransport::open(const CollectiveCall& call, std::chrono::milliseconds limit) {
  group_->begin(call, limit);
  group_->open();
}

bool MessageTransport::rides(const CollectiveCall& call) const {
  return group_->rides(call.count * static_cast<int64_t>(dtype_size(call.dtype)));
}

std::unique_ptr<MessageTransport> MessageTransport::split_messages(const CollectiveCall& call, int color,
                                                                   int key, const std::string& name) {
  open(call, timeout());
  std::vector<SplitWish> wishes(static_cast<size_t>(size()));
  wishes[static_cast<size_t>(rank())] = SplitWish::of(color, key, name);
  group_->gather(wishes.data(), sizeof(SplitWish));
  for (SplitWish& wish : wishes) wish.name[SplitWish::kMaxNameBytes] = '\0';
  const auto members = members_by_color(wishes);
  if (const std::string conflict = name_conflict(wishes, members); !conflict.empty())
    group_->fail_and_throw(FailureKind::kMismatch, conflict);
  if (color < 0) return nullptr;

  MessageOptions options = group_->options();
  options.name = name;
  const std::vector<int>& ranks = members.at(color);
  auto child = std::make_unique<MessageTransport>(group_->make_subgroup(ranks, name), options, ranks);
  group_->add_subgroup(child->group_);
  return child;
}

}  // namespace polyreme
