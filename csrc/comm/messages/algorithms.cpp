#include "comm/messages/algorithms.h"

#include "comm/messages/reduce.h"
#include "comm/messages/slices.h"

namespace polyreme {
namespace {

int64_t element_bytes(const CollectiveCall& call) { return static_cast<int64_t>(dtype_size(call.dtype)); }

// Opens a call in which `bytes_for(peer)` (address and size) goes to each peer. Whether it went along.
template <typename BytesFor>
bool open_with(MessageGroup& group, int64_t max_bytes, const BytesFor& bytes_for) {
  const bool rides = group.rides(max_bytes);
  if (rides)
    for (int r = 0; r < group.size(); ++r) {
      const std::span<const char> block = bytes_for(r);
      if (r != group.rank()) copy_bytes(group.outgoing(r), block.data(), std::ssize(block));
    }
  group.open();
  return rides;
}

std::span<const char> bytes_at(const void* data, int64_t offset, int64_t count) {
  return {static_cast<const char*>(data) + offset, static_cast<size_t>(count)};
}

// Every rank has its slice of `data` in place and gets the others. Directly, or, where few bytes would
// make many messages, by doubling: in step k rank r has the slices of its aligned block of 2^k ranks.
void gather_slices(MessageGroup& group, const Slices& slices, int64_t bytes_each, void* data) {
  const int rank = group.rank(), size = group.size();
  auto* all = static_cast<char*>(data);
  Batch batch;
  if (!halves(group, slices.max_count() * bytes_each)) {
    for (int i = 1; i < size; ++i) {
      const int to = (rank + i) % size, from = (rank - i + size) % size;
      batch.send(to, all + slices.begin(rank) * bytes_each, slices.count(rank) * bytes_each);
      batch.receive(from, all + slices.begin(from) * bytes_each, slices.count(from) * bytes_each);
    }
    return batch.run(group);
  }
  const auto block = [&](int first, int count) {
    const int64_t begin = slices.begin(first) * bytes_each;
    return std::pair(all + begin, slices.begin(first + count) * bytes_each - begin);
  };
  for (int width = 1; width < size; width *= 2) {
    const int peer = rank ^ width;
    const auto [own, own_bytes] = block(rank & ~(width - 1), width);
    const auto [other, other_bytes] = block(peer & ~(width - 1), width);
    batch.send(peer, own, own_bytes);
    batch.receive(peer, other, other_bytes);
    batch.run(group);
  }
}

}  // namespace

void run_all_reduce(MessageGroup& group, const CollectiveCall& call, void* data) {
  const int rank = group.rank(), size = group.size();
  const int64_t bytes = call.count * element_bytes(call);
  if (open_with(group, bytes, [&](int) { return bytes_at(data, 0, bytes); })) {
    std::vector<const void*> terms;
    for (int r = 0; r < size; ++r) terms.push_back(r == rank ? data : group.incoming(r));
    return reduce_terms(call, terms, call.count, data);
  }
  const Slices slices = Slices::of(size, call.count);
  auto* own = static_cast<char*>(data) + slices.begin(rank) * element_bytes(call);
  reduce_slices(group, call, slices, data, own);
  gather_slices(group, slices, element_bytes(call), data);
}

void run_reduce_scatter(MessageGroup& group, const CollectiveCall& call, const void* input, void* output) {
  const int rank = group.rank(), size = group.size();
  const int64_t bytes = call.count * element_bytes(call);
  if (open_with(group, bytes, [&](int r) { return bytes_at(input, r * bytes, bytes); })) {
    std::vector<const void*> terms;
    for (int r = 0; r < size; ++r)
      terms.push_back(r == rank ? bytes_at(input, r * bytes, bytes).data() : group.incoming(r));
    return reduce_terms(call, terms, call.count, output);
  }
  reduce_slices(group, call, Slices::equal(size, call.count), input, output);
}

void run_all_gather(MessageGroup& group, const CollectiveCall& call, const void* input, void* output,
                    std::span<const int64_t> counts) {
  const int rank = group.rank(), size = group.size();
  const int64_t each = element_bytes(call);
  const Slices slices = counts.empty() ? Slices::equal(size, call.count) : Slices::of_counts(counts);
  const int64_t own_bytes = slices.count(rank) * each;
  const bool rode =
      open_with(group, slices.max_count() * each, [&](int) { return bytes_at(input, 0, own_bytes); });
  auto* out = static_cast<char*>(output);
  copy_bytes(out + slices.begin(rank) * each, input, own_bytes);
  if (!rode) return gather_slices(group, slices, each, output);
  for (int r = 0; r < size; ++r)
    if (r != rank) copy_bytes(out + slices.begin(r) * each, group.incoming(r), slices.count(r) * each);
}

// A binomial tree: counted from the root, rank v gets the data from v less its lowest bit, and gives it to
// v + b for each power of two b below that bit. In chunks: one is received while the last one is sent on.
void run_broadcast(MessageGroup& group, const CollectiveCall& call, void* data) {
  const int size = group.size();
  const int64_t bytes = call.count * element_bytes(call);
  const bool is_root = group.rank() == call.root;
  if (open_with(group, bytes, [&](int) { return bytes_at(data, 0, is_root ? bytes : 0); }))
    return is_root ? void() : copy_bytes(data, group.incoming(call.root), bytes);

  const int place = (group.rank() - call.root + size) % size;
  const int lowest = is_root ? size : place & -place;
  const auto rank_at = [&](int v) { return (v + call.root) % size; };
  const int64_t chunk = group.options().chunk_bytes;
  auto* all = static_cast<char*>(data);
  Batch batch;
  for (int64_t begin = 0; begin < bytes + chunk; begin += chunk) {  // the last round only sends
    if (!is_root && begin < bytes)
      batch.receive(rank_at(place - lowest), all + begin, std::min(chunk, bytes - begin));
    for (int b = 1; b < lowest && begin > 0; b *= 2)
      if (place + b < size)
        batch.send(rank_at(place + b), all + begin - chunk, std::min(chunk, bytes - begin + chunk));
    batch.run(group);
  }
}

namespace {

// What every rank sends and expects, all against all: counts that differ are found by everybody, before
// memory is written.
void compare_counts(MessageGroup& group, const CallMemory& memory) {
  const auto size = static_cast<size_t>(group.size());
  std::vector<int64_t> counts(2 * size * size);
  const auto of_rank = [&](size_t r) { return std::span(counts).subspan(2 * size * r, 2 * size); };
  const std::span<int64_t> own = of_rank(static_cast<size_t>(group.rank()));
  std::copy(memory.send_counts.begin(), memory.send_counts.end(), own.begin());
  std::copy(memory.receive_counts.begin(), memory.receive_counts.end(), own.begin() + std::ssize(own) / 2);
  group.gather(counts.data(), static_cast<int64_t>(own.size_bytes()));
  const std::string mismatch = find_count_mismatch(
      group.size(),
      [&](int from, int to) { return of_rank(static_cast<size_t>(from))[static_cast<size_t>(to)]; },
      [&](int from, int to) { return of_rank(static_cast<size_t>(to))[size + static_cast<size_t>(from)]; });
  if (!mismatch.empty()) group.fail_and_throw(FailureKind::kMismatch, mismatch);
}

}  // namespace

void run_all_to_all(MessageGroup& group, const CollectiveCall& call, const CallMemory& memory) {
  const int rank = group.rank(), size = group.size();
  const int64_t each = element_bytes(call);
  const bool even = memory.send_counts.empty();
  const Slices sent = even ? Slices::equal(size, call.count) : Slices::of_counts(memory.send_counts);
  const Slices received = even ? sent : Slices::of_counts(memory.receive_counts);
  const auto block = [&](int r) {
    return bytes_at(memory.input, sent.begin(r) * each, sent.count(r) * each);
  };
  const auto place = [&](int r) { return static_cast<char*>(memory.output) + received.begin(r) * each; };
  bool rode = false;
  if (even) {
    rode = open_with(group, call.count * each, block);
  } else {
    group.open();
    compare_counts(group, memory);
  }
  copy_bytes(place(rank), block(rank).data(), std::ssize(block(rank)));
  Batch batch;
  for (int i = 1; i < size; ++i) {
    const int to = (rank + i) % size, from = (rank - i + size) % size;
    if (rode) {
      copy_bytes(place(from), group.incoming(from), received.count(from) * each);
    } else {
      batch.send(to, block(to).data(), std::ssize(block(to)));
      batch.receive(from, place(from), received.count(from) * each);
    }
  }
  batch.run(group);
}

}  // namespace polyreme
