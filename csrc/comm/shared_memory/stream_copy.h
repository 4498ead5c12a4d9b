#pragma once

#include <cstdint>

namespace polyreme {

// Copies like memcpy (nothing onto itself), in the way that is the fastest for `total_bytes`, of all that the
// caller is about to write. Others that are told of it afterwards, by an atomic, see what was copied.
void stream_copy(void* to, const void* from, int64_t bytes, int64_t total_bytes);

}  // namespace polyreme
