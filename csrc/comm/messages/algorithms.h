#pragma once

#include "comm/messages/group.h"

namespace polyreme {

// The data movement of each collective, after MessageGroup::begin; each of them opens the call. What is small
// enough rides with the opening messages, and the call is one step then.
//
// Bytes that one rank sends per byte of data, N ranks: reduce_scatter, all_gather and all_to_all (N-1)/N,
// all_reduce twice that, broadcast at most log2(N).
//
// Reductions form the tree of tree_order in one of two ways. By *exchange*: every rank gets its slice
// from all and reduces it. By *halving*, of small slices in large groups of 2^k ranks: in step k ranks r and
// r ^ 2^k share the vector that both hold a partial sum of, and each goes on with one half of it. Neighbours
// come first, so this is the same tree; its partial results travel in partial_dtype.

void run_all_reduce(MessageGroup& group, const CollectiveCall& call, void* data);
void run_reduce_scatter(MessageGroup& group, const CollectiveCall& call, const void* input, void* output);
// counts: as in CallMemory.
void run_all_gather(MessageGroup& group, const CollectiveCall& call, const void* input, void* output,
                    std::span<const int64_t> counts);
void run_broadcast(MessageGroup& group, const CollectiveCall& call, void* data);
void run_all_to_all(MessageGroup& group, const CollectiveCall& call, const CallMemory& memory);
void run_exchange(MessageGroup& group, const CollectiveCall& call, std::span<const CallMemory::Part> parts);

}  // namespace polyreme
