#include "comm/transport.h"

namespace polyreme {

std::string mark_text(const std::atomic<uint64_t>& mark) {
  const uint64_t value = mark.load(std::memory_order_relaxed);
  if (value == 0) return "nothing";
  return concat(collective_name(static_cast<CollectiveOp>(value & 0xff)), " (sequence ", value >> 8, ")");
}

}  // namespace polyreme
