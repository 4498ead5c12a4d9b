#pragma once

#include <cstdint>

namespace polyreme {

// Copies like memcpy (nothing onto itself), in the way that is the fastest for `total_bytes`, of all that the
// caller is about to write. Others that are told of it afterwards, by an atomic, see what was copied.
void stream_copy(void* to, const void* from, int64_t bytes, int64_t total_bytes);

// From here on what is written is better written past the cache.
inline constexpr int64_t kStreamedFromBytes = 24 << 20;
inline constexpr int64_t kStreamedLine = 64;
// Whole lines, from the cache past it. After the last of them comes stream_end(), and then whoever tells
// others.
void stream_lines(void* to, const void* from, int64_t bytes);
void stream_end();

}  // namespace polyreme
