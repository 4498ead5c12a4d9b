#include "comm/messages/reduce.h"

#include <bit>

#include "comm/tree.h"

namespace polyreme {
namespace {

// Elements of `bytes_each` bytes that fit into `bytes`; whole cache lines of them, if it is so many.
int64_t elements_in(int64_t bytes, int64_t bytes_each) {
  const int64_t count = std::max<int64_t>(bytes / bytes_each, 1);
  return count < 64 ? count : count / 64 * 64;
}

// Every rank gets its slice from all others, a part at a time, and reduces it.
void reduce_by_exchange(MessageGroup& group, const CollectiveCall& call, const Slices& slices,
                        const char* input, char* output) {
  const int rank = group.rank(), size = group.size();
  const auto each = static_cast<int64_t>(dtype_size(call.dtype));
  const std::span<char> staging = group.staging();
  const int64_t part = elements_in(std::ssize(staging) / size, each);
  std::vector<const void*> terms(static_cast<size_t>(size));
  Batch batch;
  for (int64_t from = 0; from < slices.max_count(); from += part) {
    const int64_t own_count = slices.count_within(rank, from, part);
    for (int i = 0; i < size; ++i) {
      const int to = (rank + i) % size, source = (rank - i + size) % size;
      const char* mine = input + (slices.begin(to) + from) * each;
      char* staged = staging.data() + source * part * each;
      terms[static_cast<size_t>(source)] = i == 0 ? mine : staged;
      if (i == 0) continue;
      batch.send(to, mine, slices.count_within(to, from, part) * each);
      batch.receive(source, staged, own_count * each);
    }
    batch.run(group);
    if (own_count > 0) reduce_terms(call, terms, own_count, output + from * each);
  }
}

// The lowest num_bits bits of `value`, in reverse.
int reversed(int value, int num_bits) {
  int result = 0;
  for (int bit = 0; bit < num_bits; ++bit) result |= (value >> bit & 1) << (num_bits - 1 - bit);
  return result;
}

// The vector of a part of every slice lies in `vector`, in order of the reversed bits of the slice's rank:
// then the half that goes on, of slices whose bit k equals the rank's, is contiguous in every step.
void reduce_by_halving(MessageGroup& group, const CollectiveCall& call, const Slices& slices,
                       const char* input, char* output) {
  const int rank = group.rank(), size = group.size();
  const int num_steps = std::countr_zero(static_cast<unsigned>(size));
  const Reduction whole = Reduction::whole(call.reduce, call.dtype, size);
  const Reduction inner = whole.partial(partial_dtype(call.dtype));
  const Reduction copy = {ReduceOp::kSum, call.dtype, inner.out};
  const Reduction last = {call.reduce, inner.out, call.dtype, size};
  const auto each = static_cast<int64_t>(dtype_size(call.dtype));
  const auto wide = static_cast<int64_t>(dtype_size(inner.out));
  const std::span<char> staging = group.staging();
  const int64_t longest = elements_in(std::ssize(staging) * 2 / (3 * size), wide);
  Batch batch;
  for (int64_t from = 0; from < slices.max_count(); from += longest) {
    const int64_t part = std::min(longest, slices.max_count() - from);
    char* vector = staging.data();
    char* received = vector + size * part * wide;
    for (int r = 0; r < size; ++r) {
      const void* term = input + (slices.begin(r) + from) * each;
      tree_reduce(copy, &term, 1, slices.count_within(r, from, part),
                  vector + reversed(r, num_steps) * part * wide);
    }
    for (int k = 0; k < num_steps; ++k) {
      const int64_t half = (size >> (k + 1)) * part;
      const bool is_upper = (rank >> k & 1) != 0;
      char* own = vector + (is_upper ? half * wide : 0);
      batch.send(rank ^ 1 << k, vector + (is_upper ? 0 : half * wide), half * wide);
      batch.receive(rank ^ 1 << k, received, half * wide);
      batch.run(group);
      const void* terms[2] = {is_upper ? received : own, is_upper ? own : received};
      if (k + 1 < num_steps) {
        tree_reduce(inner, terms, 2, half, own);
      } else {
        tree_reduce(last, terms, 2, slices.count_within(rank, from, part), output + from * each);
      }
      vector = own;
    }
  }
}

}  // namespace

bool halves(const MessageGroup& group, int64_t slice_bytes) {
  return group.size() >= group.options().min_halving_ranks &&
         std::has_single_bit(static_cast<unsigned>(group.size())) &&
         slice_bytes <= group.options().max_halving_bytes;
}

void reduce_terms(const CollectiveCall& call, const std::vector<const void*>& terms, int64_t count,
                  void* out) {
  const int num_terms = static_cast<int>(terms.size());
  tree_reduce(Reduction::whole(call.reduce, call.dtype, num_terms), terms.data(), num_terms, count, out);
}

void reduce_slices(MessageGroup& group, const CollectiveCall& call, const Slices& slices, const void* input,
                   void* output) {
  const bool by_halving =
      group.size() > 1 && halves(group, slices.max_count() * static_cast<int64_t>(dtype_size(call.dtype)));
  (by_halving ? reduce_by_halving : reduce_by_exchange)(group, call, slices, static_cast<const char*>(input),
                                                        static_cast<char*>(output));
}

}  // namespace polyreme
