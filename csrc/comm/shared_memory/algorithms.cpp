#include "comm/shared_memory/algorithms.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "comm/blocks.h"
#include "comm/shared_memory/direct.h"
#include "comm/shared_memory/slices.h"
#include "comm/stream_copy.h"
#include "comm/tree.h"

namespace polyreme {
namespace {

// Below this many bytes over all ranks every rank reduces everything itself: one meeting less.
constexpr int64_t kOneShotBytes = 32 << 10;

// The blocks of a tensor that has one for each rank, of counts[r] elements, or of call.count without counts.
class Blocks {
 public:
  Blocks(const CollectiveCall& call, const std::vector<int64_t>& counts, int size)
      : even_bytes_(call.count * static_cast<int64_t>(dtype_size(call.dtype))), longest_(even_bytes_) {
    if (counts.empty()) return;  // so that small calls need no memory
    longest_ = 0;
    for (int r = 0; r < size; ++r) {
      const int64_t begin = r == 0 ? 0 : uneven_.back().begin + uneven_.back().bytes;
      const auto element = static_cast<int64_t>(dtype_size(call.dtype));
      uneven_.push_back({begin, counts[static_cast<size_t>(r)] * element});
      longest_ = std::max(longest_, uneven_.back().bytes);
    }
  }
  Range operator[](int rank) const {
    return uneven_.empty() ? Range{rank * even_bytes_, even_bytes_} : uneven_[static_cast<size_t>(rank)];
  }
  int64_t longest() const { return longest_; }
  int64_t total(int size) const { return (*this)[size - 1].begin + (*this)[size - 1].bytes; }

 private:
  int64_t even_bytes_, longest_;
  std::vector<Range> uneven_;
};

// The opening meeting of an uneven all_to_all. Every rank looks at what all of them send and expect, so that
// all find the same difference, if any, before one of them writes. Returns the bytes of the largest block,
// and the byte at which the block for this rank begins in the input of each rank.
int64_t compare_counts(SharedGroup& group, const CollectiveCall& call, const CallMemory& memory,
                       std::vector<int64_t>& offsets) {
  const auto size = static_cast<size_t>(group.size());
  const int slot = group.slot();
  std::vector<const int64_t*> counts;  // by rank: to each rank, then from each rank
  std::vector<int64_t> mine = memory.send_counts;
  mine.insert(mine.end(), memory.receive_counts.begin(), memory.receive_counts.end());
  if (size > 1) std::memcpy(group.staging(group.rank(), slot), mine.data(), mine.size() * sizeof(int64_t));
  group.meet();
  for (int r = 0; r < group.size(); ++r)
    counts.push_back(size > 1 ? reinterpret_cast<const int64_t*>(group.staging(r, slot)) : mine.data());
  const std::string mismatch = find_count_mismatch(
      group.size(), [&](int from, int to) { return counts[static_cast<size_t>(from)][to]; },
      [&](int from, int to) { return counts[static_cast<size_t>(to)][group.size() + from]; });
  if (!mismatch.empty()) group.fail_and_throw(FailureKind::kMismatch, mismatch);
  const auto element = static_cast<int64_t>(dtype_size(call.dtype));
  int64_t longest = 0;
  for (size_t from = 0; from < size; ++from) {
    offsets[from] = element * std::accumulate(counts[from], counts[from] + group.rank(), int64_t{0});
    longest = std::max(longest, *std::max_element(counts[from], counts[from] + size));
  }
  return longest * element;
}

// Reduces `bytes` bytes: this rank's term is `own`, those of the others lie at `offset` in their
// staging.
void reduce_from_staging(SharedGroup& group, const CollectiveCall& call, int slot, int64_t offset,
                         int64_t bytes, const void* own, void* out) {
  std::vector<const void*>& terms = group.terms();
  for (int r = 0; r < group.size(); ++r)
    terms[static_cast<size_t>(r)] = r == group.rank() ? own : group.staging(r, slot) + offset;
  tree_reduce(Reduction::whole(call.reduce, call.dtype, group.size()), terms.data(), group.size(),
              bytes / static_cast<int64_t>(dtype_size(call.dtype)), out);
}

void all_reduce_one_shot(SharedGroup& group, const CollectiveCall& call, char* data, int64_t bytes) {
  const int slot = group.slot();
  copy_bytes(group.staging(group.rank(), slot, bytes), data, bytes);
  group.meet();
  std::vector<const void*>& terms = group.terms();
  for (int r = 0; r < group.size(); ++r)
    terms[static_cast<size_t>(r)] = r == group.rank() ? data : group.staging(r, slot, bytes);
  tree_reduce(Reduction::whole(call.reduce, call.dtype, group.size()), terms.data(), group.size(), call.count,
              data);
}

}  // namespace

// Chunk k is staged and met; then each rank reduces its slice of it, of which the others learn at
// the next meeting, where chunk k+1 is met as well.
void run_all_reduce(SharedGroup& group, const CollectiveCall& call, void* data) {
  const int rank = group.rank(), size = group.size();
  auto* bytes = static_cast<char*>(data);
  const int64_t total = call.count * static_cast<int64_t>(dtype_size(call.dtype));
  const int64_t chunk = group.chunk_bytes();
  if (size == 1) return group.meet();
  if (total <= chunk && total * size <= kOneShotBytes) return all_reduce_one_shot(group, call, bytes, total);

  if (DirectCall::pays(group, total)) {
    DirectCall direct(group, data, total);
    if (direct.everywhere()) return direct.all_reduce(call, bytes, total);
  }

  const auto chunk_of = [&](int64_t begin) { return std::min(chunk, total - begin); };
  const auto others = [&](int64_t length, auto&& visit) {
    for (int r = 0; r < size; ++r)
      if (r != rank) visit(r, slice_of(length, r, size));
  };
  for (int64_t begin = 0; begin < total + chunk; begin += chunk) {  // the last round only fetches results
    const int slot = group.slot();
    const bool reduces = begin < total;
    if (reduces)
      others(chunk_of(begin), [&](int, Range slice) {
        copy_bytes(group.staging(rank, slot) + slice.begin, bytes + begin + slice.begin, slice.bytes);
      });
    group.meet();
    if (begin > 0) {
      char* previous = bytes + begin - chunk;
      others(chunk_of(begin - chunk), [&](int r, Range slice) {
        copy_bytes(previous + slice.begin, group.result(r, slot), slice.bytes);
      });
    }
    if (!reduces) break;
    const Range slice = slice_of(chunk_of(begin), rank, size);
    char* own = bytes + begin + slice.begin;
    char* result = group.result(rank, group.slot());
    reduce_from_staging(group, call, slot, slice.begin, slice.bytes, own, result);
    copy_bytes(own, result, slice.bytes);
  }
}

// A chunk holds one piece for every other rank, in the order of the ranks; its own stays in user memory.
void run_reduce_scatter(SharedGroup& group, const CollectiveCall& call, const void* input, void* output) {
  const int rank = group.rank(), size = group.size();
  const auto* in = static_cast<const char*>(input);
  auto* out = static_cast<char*>(output);
  const auto element = static_cast<int64_t>(dtype_size(call.dtype));
  const int64_t total = call.count * element;
  if (total == 0 || size == 1) {
    group.meet();
    return copy_bytes(out, in, total);
  }
  if (DirectCall::pays(group, total)) {
    DirectCall direct(group, in, total * size);
    if (direct.everywhere()) return direct.reduce_scatter(call, out, total);
  }
  std::vector<const void*>& terms = group.terms();
  const int64_t chunk = std::min(group.chunk_bytes() / size, total);
  const Reduction reduction = Reduction::whole(call.reduce, call.dtype, size);
  for (int64_t begin = 0; begin < total; begin += chunk) {
    const int64_t length = std::min(chunk, total - begin);
    const int slot = group.slot();
    const auto piece = [&](int from, int to) {
      return group.staging(from, slot, chunk * (size - 1)) + (to < from ? to : to - 1) * chunk;
    };
    for (int r = 0; r < size; ++r)
      if (r != rank) copy_bytes(piece(rank, r), in + r * total + begin, length);
    group.meet();
    for (int r = 0; r < size; ++r)
      terms[static_cast<size_t>(r)] = r == rank ? in + rank * total + begin : piece(r, rank);
    tree_reduce(reduction, terms.data(), size, length / element, out + begin);
  }
}

void run_all_gather(SharedGroup& group, const CollectiveCall& call, const CallMemory& memory) {
  const int rank = group.rank(), size = group.size();
  const auto* in = static_cast<const char*>(memory.input);
  auto* out = static_cast<char*>(memory.output);
  const Blocks blocks(call, memory.receive_counts, size);
  const Range own = blocks[rank];
  const int64_t longest = blocks.longest();
  if (longest == 0 || size == 1) {
    group.meet();
    return copy_bytes(out + own.begin, in, own.bytes);
  }
  if (DirectCall::pays(group, longest)) {
    DirectCall direct(group, in, own.bytes);
    if (direct.everywhere()) {
      const int64_t total = blocks.total(size);
      stream_copy(out + own.begin, in, own.bytes, total);
      for (int i = 1; i < size; ++i) {
        const Range block = blocks[(rank + i) % size];
        direct.read(out + block.begin, (rank + i) % size, 0, block.bytes, total);
      }
      return direct.end();
    }
  }
  const int64_t chunk = std::min(group.chunk_bytes(), longest);
  for (int64_t begin = 0; begin < longest; begin += chunk) {
    const int slot = group.slot();
    copy_bytes(group.staging(rank, slot, chunk), in + begin, std::min(chunk, own.bytes - begin));
    group.meet();
    for (int i = 0; i < size; ++i) {
      const int r = (rank + i) % size;  // not all ranks read the same staging at once
      const Range block = blocks[r];
      copy_bytes(out + block.begin + begin, r == rank ? in + begin : group.staging(r, slot, chunk),
                 std::min(chunk, block.bytes - begin));
    }
  }
}

void run_broadcast(SharedGroup& group, const CollectiveCall& call, void* data) {
  auto* bytes = static_cast<char*>(data);
  const int64_t total = call.count * static_cast<int64_t>(dtype_size(call.dtype));
  const bool is_root = group.rank() == call.root;
  if (total == 0 || group.size() == 1) return group.meet();
  if (DirectCall::pays(group, total)) {
    DirectCall direct(group, bytes, is_root ? total : 0);
    if (direct.everywhere()) {
      if (!is_root) direct.read(bytes, call.root, 0, total, total);
      return direct.end();
    }
  }
  const int64_t chunk = std::min(group.chunk_bytes(), total);
  for (int64_t begin = 0; begin < total; begin += chunk) {
    const int64_t length = std::min(chunk, total - begin);
    const int slot = group.slot();
    if (is_root) copy_bytes(group.staging(call.root, slot, chunk), bytes + begin, length);
    group.meet();
    if (!is_root) copy_bytes(bytes + begin, group.staging(call.root, slot, chunk), length);
  }
}

void run_all_to_all(SharedGroup& group, const CollectiveCall& call, const CallMemory& memory) {
  const int rank = group.rank(), size = group.size();
  const auto* in = static_cast<const char*>(memory.input);
  auto* out = static_cast<char*>(memory.output);
  const bool uneven = call.counts_hash != 0;
  const Blocks to(call, memory.send_counts, size), from(call, memory.receive_counts, size);
  // Where the block for this rank begins in the input of each rank.
  std::vector<int64_t> offsets(static_cast<size_t>(size),
                               rank * call.count * static_cast<int64_t>(dtype_size(call.dtype)));
  const int64_t longest = uneven ? compare_counts(group, call, memory, offsets) : to.longest();
  if (!uneven && (longest == 0 || size == 1)) group.meet();
  if (DirectCall::pays(group, longest)) {
    DirectCall direct(group, in, to.total(size));
    if (direct.everywhere()) {
      const int64_t total = from.total(size);
      stream_copy(out + from[rank].begin, in + to[rank].begin, to[rank].bytes, total);
      for (int i = 1; i < size; ++i) {
        const int r = (rank + i) % size;
        direct.read(out + from[r].begin, r, offsets[static_cast<size_t>(r)], from[r].bytes, total);
      }
      return direct.end();
    }
  }
  const int64_t piece = group.chunk_bytes() / size;
  for (int64_t begin = 0; begin < longest && size > 1; begin += piece) {
    const int slot = group.slot();
    for (int r = 0; r < size; ++r) {
      const Range block = to[r];
      if (r != rank)
        copy_bytes(group.staging(rank, slot) + r * piece, in + block.begin + begin,
                   std::min(piece, block.bytes - begin));
    }
    group.meet();
    for (int i = 1; i < size; ++i) {
      const int r = (rank + i) % size;
      const Range block = from[r];
      copy_bytes(out + block.begin + begin, group.staging(r, slot) + rank * piece,
                 std::min(piece, block.bytes - begin));
    }
  }
  copy_bytes(out + from[rank].begin, in + to[rank].begin, to[rank].bytes);
}

}  // namespace polyreme
