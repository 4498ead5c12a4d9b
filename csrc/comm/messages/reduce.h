#pragma once

#include <vector>

#include "comm/messages/group.h"
#include "comm/messages/slices.h"

namespace polyreme {

// Whether slices of `slice_bytes` bytes are reduced by halving (and gathered by doubling).
bool halves(const MessageGroup& group, int64_t slice_bytes);

// The reduction of one term from each rank, in rank order. `out` may be one of them.
void reduce_terms(const CollectiveCall& call, const std::vector<const void*>& terms, int64_t count,
                  void* out);

// Reduces the slices of `input` over all ranks; this rank's into `output`, which may be that slice itself.
void reduce_slices(MessageGroup& group, const CollectiveCall& call, const Slices& slices, const void* input,
                   void* output);

}  // namespace polyreme
