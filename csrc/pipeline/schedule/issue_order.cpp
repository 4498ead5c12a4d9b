#include "pipeline/schedule/issue_order.h"

#include <algorithm>

namespace polyreme::pipeline {
namespace {

bool makes_what_is_sent(const Action& computation, const Action& transfer) {
  if (!is_send(transfer.kind) || transfer.chunk != computation.chunk ||
      transfer.micro_batch != computation.micro_batch)
    return false;
  const bool is_forward = computation.kind == ActionKind::kForward;
  return is_forward == (transfer.kind == ActionKind::kSendActivation);
}

}  // namespace

std::vector<Action> issue_order(const std::vector<Action>& list) {
  std::vector<Action> order;
  order.reserve(list.size());
  for (size_t i = 0; i < list.size();) {
    const Action& computation = list[i++];
    const size_t first = i;
    while (is_compute(computation.kind) && i < list.size() && is_transfer(list[i].kind)) {
      const size_t end = batch_end(list, i);
      const auto waits = [&](const Action& transfer) { return makes_what_is_sent(computation, transfer); };
      if (std::any_of(&list[i], &list[0] + end, waits)) break;
      i = end;
    }
    order.insert(order.end(), &list[0] + first, &list[0] + i);
    order.push_back(computation);
  }
  return order;
}

}  // namespace polyreme::pipeline
