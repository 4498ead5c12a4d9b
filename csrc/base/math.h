#pragma once

#include <cstddef>
#include <cstdint>

namespace polyreme {

// Rounds `value` up to a multiple of `multiple`.
constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace polyreme
