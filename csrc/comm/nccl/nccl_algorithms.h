#pragma once

#include <cstdint>
#include <functional>

#include "comm/collective.h"
#include "comm/transport.h"

struct PolyremeCudaTable;
struct PolyremeNcclTable;
struct PolyremeNcclStatus;

namespace polyreme {

// What the data movement of one collective needs. All of it is enqueued on `stream` and returns.
struct NcclPlace {
  const PolyremeNcclTable& nccl;
  const PolyremeCudaTable& cuda;
  void* comm;
  void* stream;
  int rank;
  int size;
  int cuda_index;
  std::function<void(const PolyremeNcclStatus&)> check;  // throws unless good or in progress
  std::function<void()> settle;                          // waits until NCCL has taken the calls
};

// Bytes of staging that an ordered reduction uses, of at most `limit` (at least one element per rank).
int64_t ordered_staging_bytes(const CollectiveCall& call, int size, int64_t limit);

// Ordered reductions. In rounds, as much as fits the staging: every rank gets its slice of all ranks (grouped
// sends and receives), adds the slices in the tree of comm/tree.h by a kernel, and, in all_reduce, gives the
// sum to all. Bytes on the wire are those of a ring. `memory` as in comm/transport.h.
void ordered_all_reduce(const NcclPlace& place, const CollectiveCall& call, const CallMemory& memory,
                        void* staging, int64_t staging_bytes);
void ordered_reduce_scatter(const NcclPlace& place, const CollectiveCall& call, const CallMemory& memory,
                            void* staging, int64_t staging_bytes);

// Everything else: NCCL's own collectives, or one group of sends and receives where it has none.
void run_nccl(const NcclPlace& place, const CollectiveCall& call, const CallMemory& memory);

}  // namespace polyreme
