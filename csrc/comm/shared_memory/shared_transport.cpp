#include "comm/shared_memory/shared_transport.h"

#include "comm/shared_memory/algorithms.h"

namespace polyreme {

void SharedTransport::run(const CollectiveCall& call, const CallMemory& memory,
                          std::chrono::milliseconds limit) {
  group_->begin(call, limit);
  switch (call.op) {
    case CollectiveOp::kAllReduce:
      return run_all_reduce(*group_, call, memory.output);
    case CollectiveOp::kReduceScatter:
      return run_reduce_scatter(*group_, call, memory.input, memory.output);
    case CollectiveOp::kAllGather:
      return run_all_gather(*group_, call, memory);
    case CollectiveOp::kBroadcast:
      return run_broadcast(*group_, call, memory.output);
    case CollectiveOp::kAttach:
      group_->meet();
      return group_->choose_waiting();
    case CollectiveOp::kBarrier:
      return group_->meet();
    case CollectiveOp::kAllToAll:
      return run_all_to_all(*group_, call, memory);
    case CollectiveOp::kExchange:
      return exchange_.run(memory.parts);
    case CollectiveOp::kNone:
    case CollectiveOp::kSplit:
      break;
  }
  throw InvalidArgument(concat("a transport does not run ", call.to_string()));
}

}  // namespace polyreme
