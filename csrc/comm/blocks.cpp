#include "comm/blocks.h"

#include "base/error.h"

namespace polyreme {

std::string find_count_mismatch(int size, const std::function<int64_t(int, int)>& sent,
                                const std::function<int64_t(int, int)>& expected) {
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to)
      if (sent(from, to) != expected(from, to))
        return concat("rank ", from, " sends ", sent(from, to), " elements to rank ", to, ", which expects ",
                      expected(from, to), " from it");
  return "";
}

}  // namespace polyreme
