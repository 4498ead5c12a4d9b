#pragma once

#include <algorithm>
#include <cstdint>

#include "base/math.h"

namespace polyreme {

struct Range {
  int64_t begin = 0;  // in bytes
  int64_t bytes = 0;
};

// The part of a chunk of `bytes` bytes that `rank` reduces. Cut at cache lines; may be empty.
inline Range slice_of(int64_t bytes, int rank, int size) {
  const int64_t step = round_up(ceil_div(bytes, size), 64);
  const int64_t begin = std::min(rank * step, bytes);
  return {begin, std::min(step, bytes - begin)};
}

}  // namespace polyreme
