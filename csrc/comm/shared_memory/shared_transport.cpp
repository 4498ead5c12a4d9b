#include "comm/shared_memory/shared_transport.h"

#include <algorithm>
#include <cstring>

#include "comm/shared_memory/algorithms.h"
#include "comm/shared_memory/heap.h"
#include "comm/shared_memory/notes.h"

namespace polyreme {

void SharedTransport::run(const CollectiveCall& call, const CallMemory& memory,
                          std::chrono::milliseconds limit) {
  group_->begin(call, limit);
  try {
    move(call, memory);
  } catch (const std::exception& failure) {
    // Known first: after it nobody begins to read what the caller may free.
    group_->fail(FailureKind::kPeerLost,
                 concat(who(rank()), " failed in ", call.to_string(), ": ", failure.what()));
    group_->wait_for_readers();
    throw;
  }
}

void SharedTransport::move(const CollectiveCall& call, const CallMemory& memory) {
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
      group_->choose_waiting();
      if (size() > 1 && group_->peer_memory() == nullptr) share_heap();
      return;
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

// Every rank makes an arena and maps those of all others. Where one of them cannot (no addresses left, say),
// there is no heap: everything is staged then. A rank that is killed meanwhile leaves the name of its arena.
void SharedTransport::share_heap() {
  struct Name {
    char text[kNoteBytes] = {};
  } name;
  std::shared_ptr<SharedArena> own;
  std::vector<std::shared_ptr<SharedMemory>> arenas;
  std::string text;
  try {
    own = source_->create_arena(&text);
  } catch (const Error&) {
    text.clear();
  }
  const SharedName forgotten_at_the_end{source_, text};
  std::memcpy(name.text, text.c_str(), std::min(text.size(), sizeof(name.text) - 1));
  const std::vector<Name> names = exchange_notes(*group_, name);
  char complete = own ? 1 : 0;
  try {
    for (int r = 0; r < size() && complete; ++r)
      arenas.push_back(r == rank() ? own : source_->attach_arena(names[static_cast<size_t>(r)].text));
  } catch (const Error&) {
    complete = 0;
  }
  for (const char each : exchange_notes(*group_, complete)) complete = complete && each;
  if (complete) group_->set_peer_memory(std::make_shared<SharedHeap>(std::move(own), std::move(arenas)));
}

}  // namespace polyreme
