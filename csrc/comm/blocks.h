#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

namespace polyreme {

// What the algorithms of all transports share.

inline void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// The first block of an uneven all_to_all that its sender and its receiver take for different sizes, as text;
// empty if there is none. Every rank looks at the counts of all, so that all find the same one before memory
// is written. sent(a, b): what rank a sends to rank b; expected(a, b): what b expects from a.
std::string find_count_mismatch(int size, const std::function<int64_t(int, int)>& sent,
                                const std::function<int64_t(int, int)>& expected);

}  // namespace polyreme
