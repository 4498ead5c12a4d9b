#pragma once

#include "comm/shared_memory/group.h"

namespace polyreme {

// The data movement of each collective, between SharedGroup::begin and end. All of them copy chunks
// through staging, with one meeting per chunk (see SharedGroup). The addresses are user memory;
// counts and dtypes come from the call.
//
// Bytes that one rank moves per byte of data, N ranks: all_reduce and reduce_scatter read and write
// user memory once; staging and results, which stay in the cache, take (N-1)/N of a copy each.

void run_all_reduce(SharedGroup& group, const CollectiveCall& call, void* data);
void run_reduce_scatter(SharedGroup& group, const CollectiveCall& call, const void* input, void* output);
void run_all_gather(SharedGroup& group, const CollectiveCall& call, const CallMemory& memory);
void run_broadcast(SharedGroup& group, const CollectiveCall& call, void* data);
void run_all_to_all(SharedGroup& group, const CollectiveCall& call, const CallMemory& memory);

}  // namespace polyreme
