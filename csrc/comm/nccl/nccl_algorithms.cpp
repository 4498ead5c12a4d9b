#include "comm/nccl/nccl_algorithms.h"

#include <algorithm>
#include <numeric>

#include "base/math.h"
#include "comm/nccl/nccl_table.h"
#include "device/cuda/cuda_table.h"

namespace polyreme {
namespace {

static_assert(static_cast<int>(ReduceOp::kSum) == 0 && static_cast<int>(ReduceOp::kProduct) == 1 &&
              static_cast<int>(ReduceOp::kMax) == 2 && static_cast<int>(ReduceOp::kMin) == 3 &&
              static_cast<int>(ReduceOp::kAverage) == 4);  // as kernels/ and nccl_table.cpp read it

// Slices start at multiples of it, so that the kernel's loads do.
constexpr int64_t kAlignment = 64;

int64_t element_bytes(const CollectiveCall& call) { return static_cast<int64_t>(dtype_size(call.dtype)); }
char* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }
const char* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }

// Calls of `body` that run as one. The group is closed also when one of them is refused: it is a state of the
// thread.
template <typename Body>
void grouped(const NcclPlace& place, const Body& body) {
  place.check(place.nccl.group_start());
  try {
    body();
  } catch (...) {
    place.nccl.group_end();
    throw;
  }
  place.check(place.nccl.group_end());
  place.settle();
}

void send(const NcclPlace& place, const void* data, int64_t count, DType dtype, int peer) {
  if (count == 0) return;
  place.check(place.nccl.send(data, static_cast<uint64_t>(count), static_cast<int32_t>(dtype), peer,
                              place.comm, place.stream));
}
void receive(const NcclPlace& place, void* data, int64_t count, DType dtype, int peer) {
  if (count == 0) return;
  place.check(place.nccl.receive(data, static_cast<uint64_t>(count), static_cast<int32_t>(dtype), peer,
                                 place.comm, place.stream));
}

void check_cuda(const NcclPlace& place, const PolyremeCudaStatus& status, const char* what) {
  require<DeviceError>(status.code == 0, "cuda:", place.cuda_index, ": ", what, " failed: ", status.text);
}

void copy(const NcclPlace& place, void* to, const void* from, int64_t bytes) {
  if (bytes == 0 || to == from) return;
  check_cuda(place, place.cuda.copy(to, from, static_cast<uint64_t>(bytes), place.stream), "cudaMemcpyAsync");
}

// The slice of rank r of `count` elements that are cut into slices of `slice`: [begin, end).
struct Slice {
  int64_t begin, count;
};
Slice slice_of(int r, int64_t slice, int64_t count) {
  const int64_t begin = std::min(r * slice, count);
  return {begin, std::min(slice, count - begin)};
}

void reduce(const NcclPlace& place, const CollectiveCall& call, const void* staging, int64_t stride,
            const void* own, int64_t count, void* out) {
  const PolyremeTreeReduce reduction{.dtype = static_cast<int32_t>(call.dtype),
                                     .reduce = static_cast<int32_t>(call.reduce),
                                     .num_terms = place.size,
                                     .own = place.rank,
                                     .terms = staging,
                                     .own_term = own,
                                     .stride_bytes = static_cast<uint64_t>(stride * element_bytes(call)),
                                     .count = count,
                                     .out = out};
  check_cuda(place, place.cuda.tree_reduce(&reduction, place.stream), "the kernel tree_reduce");
}

// Elements of one rank's slice that a round can take.
int64_t slice_elements(const CollectiveCall& call, int size, int64_t staging_bytes) {
  return std::max<int64_t>(staging_bytes / size / kAlignment * kAlignment / element_bytes(call), 1);
}

// [data, data + count elements) of all ranks, in place.
void all_reduce_round(const NcclPlace& place, const CollectiveCall& call, char* data, int64_t count,
                      void* staging) {
  const int64_t bytes = element_bytes(call);
  const int64_t slice = std::min(round_up(ceil_div(count, place.size), kAlignment / bytes), count);
  const Slice own = slice_of(place.rank, slice, count);
  grouped(place, [&] {
    for (int r = 0; r < place.size; ++r) {
      if (r == place.rank) continue;
      const Slice theirs = slice_of(r, slice, count);
      send(place, data + theirs.begin * bytes, theirs.count, call.dtype, r);
      receive(place, at(staging, r * own.count * bytes), own.count, call.dtype, r);
    }
  });
  char* const mine = data + own.begin * bytes;
  if (own.count > 0) reduce(place, call, staging, own.count, mine, own.count, mine);
  grouped(place, [&] {
    for (int r = 0; r < place.size; ++r) {
      if (r == place.rank) continue;
      const Slice theirs = slice_of(r, slice, count);
      send(place, mine, own.count, call.dtype, r);
      receive(place, data + theirs.begin * bytes, theirs.count, call.dtype, r);
    }
  });
}

void all_gather(const NcclPlace& place, const CollectiveCall& call, const CallMemory& memory) {
  const auto dtype = static_cast<int32_t>(call.dtype);
  if (memory.receive_counts.empty()) {
    place.check(place.nccl.all_gather(memory.input, memory.output, static_cast<uint64_t>(call.count), dtype,
                                      place.comm, place.stream));
    return place.settle();
  }
  const int64_t own_count = memory.receive_counts[static_cast<size_t>(place.rank)];
  int64_t begin = 0;
  grouped(place, [&] {
    for (int r = 0; r < place.size; ++r) {
      const int64_t count = memory.receive_counts[static_cast<size_t>(r)];
      if (r != place.rank) {
        send(place, memory.input, own_count, call.dtype, r);
        receive(place, at(memory.output, begin * element_bytes(call)), count, call.dtype, r);
      }
      begin += count;
    }
  });
  const auto first = memory.receive_counts.begin();
  const int64_t before = std::accumulate(first, first + place.rank, int64_t{0});
  copy(place, at(memory.output, before * element_bytes(call)), memory.input, own_count * element_bytes(call));
}

void all_to_all(const NcclPlace& place, const CollectiveCall& call, const CallMemory& memory) {
  const int64_t bytes = element_bytes(call);
  const auto count_of = [&](const std::vector<int64_t>& counts, int r) {
    return counts.empty() ? call.count : counts[static_cast<size_t>(r)];
  };
  const char* from = at(memory.input, 0);
  char* to = at(memory.output, 0);
  const char* own_from = from;
  char* own_to = to;
  grouped(place, [&] {
    for (int r = 0; r < place.size; ++r) {
      const int64_t send_count = count_of(memory.send_counts, r),
                    receive_count = count_of(memory.receive_counts, r);
      if (r == place.rank) {
        own_from = from;
        own_to = to;
      } else {
        send(place, from, send_count, call.dtype, r);
        receive(place, to, receive_count, call.dtype, r);
      }
      from += send_count * bytes;
      to += receive_count * bytes;
    }
  });
  copy(place, own_to, own_from, count_of(memory.send_counts, place.rank) * bytes);
}

void exchange(const NcclPlace& place, const CallMemory& memory) {
  grouped(place, [&] {
    for (const CallMemory::Part& part : memory.parts) {
      if (part.kind == Transfer::Kind::kSend) {
        send(place, part.data, part.count, part.dtype, part.peer);
      } else {
        receive(place, part.data, part.count, part.dtype, part.peer);
      }
    }
  });
}

}  // namespace

int64_t ordered_staging_bytes(const CollectiveCall& call, int size, int64_t limit) {
  const int64_t elements = call.op == CollectiveOp::kAllReduce ? ceil_div(call.count, size) : call.count;
  const int64_t wanted = round_up(elements * element_bytes(call), kAlignment) * size;
  return std::min(wanted, std::max(limit, size * kAlignment));
}

void ordered_all_reduce(const NcclPlace& place, const CollectiveCall& call, const CallMemory& memory,
                        void* staging, int64_t staging_bytes) {
  const int64_t round = slice_elements(call, place.size, staging_bytes) * place.size;
  for (int64_t begin = 0; begin < call.count; begin += round)
    all_reduce_round(place, call, at(memory.output, begin * element_bytes(call)),
                     std::min(round, call.count - begin), staging);
}

void ordered_reduce_scatter(const NcclPlace& place, const CollectiveCall& call, const CallMemory& memory,
                            void* staging, int64_t staging_bytes) {
  const int64_t bytes = element_bytes(call), round = slice_elements(call, place.size, staging_bytes);
  for (int64_t begin = 0; begin < call.count; begin += round) {
    const int64_t count = std::min(round, call.count - begin);
    const auto slice = [&](int r) { return at(memory.input, (r * call.count + begin) * bytes); };
    grouped(place, [&] {
      for (int r = 0; r < place.size; ++r) {
        if (r == place.rank) continue;
        send(place, slice(r), count, call.dtype, r);
        receive(place, at(staging, r * count * bytes), count, call.dtype, r);
      }
    });
    reduce(place, call, staging, count, slice(place.rank), count, at(memory.output, begin * bytes));
  }
}

void run_nccl(const NcclPlace& place, const CollectiveCall& call, const CallMemory& memory) {
  const auto count = static_cast<uint64_t>(call.count);
  const auto dtype = static_cast<int32_t>(call.dtype), op = static_cast<int32_t>(call.reduce);
  switch (call.op) {
    case CollectiveOp::kAllReduce:
      place.check(
          place.nccl.all_reduce(memory.input, memory.output, count, dtype, op, place.comm, place.stream));
      return place.settle();
    case CollectiveOp::kReduceScatter:
      place.check(
          place.nccl.reduce_scatter(memory.input, memory.output, count, dtype, op, place.comm, place.stream));
      return place.settle();
    case CollectiveOp::kBroadcast:
      place.check(place.nccl.broadcast(memory.output, count, dtype, call.root, place.comm, place.stream));
      return place.settle();
    case CollectiveOp::kAllGather:
      return all_gather(place, call, memory);
    case CollectiveOp::kAllToAll:
      return all_to_all(place, call, memory);
    case CollectiveOp::kExchange:
      return exchange(place, memory);
    default:
      throw InvalidArgument(concat(collective_name(call.op), " moves no data"));
  }
}

}  // namespace polyreme
