#include "comm/tree.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#include "comm/half.h"
#include "comm/stream_copy.h"

namespace polyreme {
namespace {

// Up to this many terms are reduced in registers; more are reduced in blocks that stay in L1.
constexpr int kMaxTermsInRegisters = 4;
constexpr int64_t kBlockElements = 512;
// Terms that do not fit in the cache are asked for this far ahead: the hardware's prefetchers stop at the end
// of a page. Measured in place, two ranks at once, on a Xeon with 2 MiB of L2: 10-30 % less time from 1 MiB
// on.
constexpr int64_t kLargeTermBytes = 1 << 20;
constexpr int64_t kPrefetchBytes = 4096;

// Bools as bytes: any value but 0 is true.
enum class Truth : uint8_t {};

template <typename T, ReduceOp kOp>
T combine(T a, T b) {
  if constexpr (std::is_same_v<T, Truth>) {
    constexpr bool kAll = kOp == ReduceOp::kProduct || kOp == ReduceOp::kMin;
    const bool x = a != Truth{0}, y = b != Truth{0};
    return static_cast<Truth>(kAll ? x & y : x | y);
  } else if constexpr (kOp == ReduceOp::kMax) {
    return (a > b || a != a) ? a : b;
  } else if constexpr (kOp == ReduceOp::kMin) {
    return (a < b || a != a) ? a : b;
  } else if constexpr (std::is_integral_v<T>) {
    // Unsigned, and no narrower than unsigned int: signed overflow is undefined.
    using Same = std::make_unsigned_t<T>;
    using U = std::common_type_t<Same, unsigned>;
    const U x{static_cast<Same>(a)}, y{static_cast<Same>(b)};
    return static_cast<T>(kOp == ReduceOp::kSum ? x + y : x * y);
  } else {
    return kOp == ReduceOp::kSum ? a + b : a * b;
  }
}

constexpr int left_terms(int num_terms) {
  return static_cast<int>(std::bit_floor(static_cast<unsigned>(num_terms - 1)));
}

template <typename T, ReduceOp kOp, int kTerms>
[[gnu::always_inline]] inline T reduce_element(const T* const* terms, int64_t i) {
  if constexpr (kTerms == 1) {
    return terms[0][i];
  } else {
    constexpr int kLeft = left_terms(kTerms);
    return combine<T, kOp>(reduce_element<T, kOp, kLeft>(terms, i),
                           reduce_element<T, kOp, kTerms - kLeft>(terms + kLeft, i));
  }
}

template <typename T, ReduceOp kOp, int kTerms>
void reduce_few(const T* const* terms, int64_t count, T* out) {
  std::array<const T*, kTerms> local;
  std::copy_n(terms, kTerms, local.begin());
  // `out` equals a term or is apart from all of them: no element depends on another one.
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) out[i] = reduce_element<T, kOp, kTerms>(local.data(), i);
}

template <typename T>
using Reducer = void (*)(const T* const*, int64_t, T*);
template <typename T>
using Reducers = std::array<Reducer<T>, kMaxTermsInRegisters + 1>;

template <typename T, ReduceOp kOp>
constexpr Reducers<T> kReducers = {nullptr, reduce_few<T, kOp, 1>, reduce_few<T, kOp, 2>,
                                   reduce_few<T, kOp, 3>, reduce_few<T, kOp, 4>};

template <typename T>
const Reducers<T>& reducers_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kProduct:
      return kReducers<T, ReduceOp::kProduct>;
    case ReduceOp::kMax:
      return kReducers<T, ReduceOp::kMax>;
    case ReduceOp::kMin:
      return kReducers<T, ReduceOp::kMin>;
    default:  // an average is a sum first
      return kReducers<T, ReduceOp::kSum>;
  }
}

void prefetch(const void* const* terms, int num_terms, int64_t begin_byte, int64_t bytes) {
  for (int t = 0; t < num_terms; ++t) {
    const char* at = static_cast<const char*>(terms[t]) + begin_byte;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
  }
}

// The terms of a block. T: what is computed in. Terms of 16 bits are widened on their way.
template <typename T>
struct Source {
  const void* const* terms;
  DType dtype;
  int64_t first;  // element

  const T* block(int term, int64_t count, T* room) const {
    const auto* begin =
        static_cast<const char*>(terms[term]) + first * static_cast<int64_t>(dtype_size(dtype));
    if constexpr (std::is_same_v<T, float>) {
      if (dtype != DType::kF32) {
        widen(dtype, begin, count, room);
        return room;
      }
    }
    return reinterpret_cast<const T*>(begin);
  }
  Source from(int term) const { return {terms + term, dtype, first}; }
};

// count <= kBlockElements.
template <typename T>
void reduce_block(const Reducers<T>& reducers, const Source<T>& source, int num_terms, int64_t count,
                  T* out) {
  if (num_terms <= kMaxTermsInRegisters) {
    std::array<std::array<T, kBlockElements>, kMaxTermsInRegisters> rooms;
    std::array<const T*, kMaxTermsInRegisters> terms;
    for (int t = 0; t < num_terms; ++t)
      terms[static_cast<size_t>(t)] = source.block(t, count, rooms[static_cast<size_t>(t)].data());
    return reducers[static_cast<size_t>(num_terms)](terms.data(), count, out);
  }
  std::array<T, kBlockElements> left, right;
  const int num_left = left_terms(num_terms);
  reduce_block<T>(reducers, source, num_left, count, left.data());
  reduce_block<T>(reducers, source.from(num_left), num_terms - num_left, count, right.data());
  const std::array<const T*, 2> halves = {left.data(), right.data()};
  reducers[2](halves.data(), count, out);
}

template <typename T>
void reduce_typed(const Reduction& reduction, const void* const* terms, int num_terms, int64_t count,
                  void* out) {
  const Reducers<T>& reducers = reducers_of<T>(reduction.op);
  const bool narrows = partial_dtype(reduction.out) != reduction.out;
  const auto term_bytes = static_cast<int64_t>(dtype_size(reduction.terms));
  const bool large = count * term_bytes >= kLargeTermBytes;
  const bool streams = !narrows && count * static_cast<int64_t>(sizeof(T)) >= kStreamedFromBytes &&
                       reinterpret_cast<uintptr_t>(out) % kStreamedLine == 0 &&
                       std::find(terms, terms + num_terms, out) == terms + num_terms;
  for (int64_t first = 0; first < count; first += kBlockElements) {
    const int64_t length = std::min(kBlockElements, count - first);
    if (large) prefetch(terms, num_terms, first * term_bytes + kPrefetchBytes, length * term_bytes);
    std::array<T, kBlockElements> room;
    const bool is_streamed = streams && length == kBlockElements;
    T* block = narrows || is_streamed ? room.data() : static_cast<T*>(out) + first;
    reduce_block<T>(reducers, {terms, reduction.terms, first}, num_terms, length, block);
    if constexpr (std::is_floating_point_v<T>) {
      const T divisor = static_cast<T>(reduction.average_over);
      if (reduction.op == ReduceOp::kAverage)
        for (int64_t i = 0; i < length; ++i) block[i] = block[i] / divisor;
    }
    if constexpr (std::is_same_v<T, float>) {
      if (narrows) narrow(reduction.out, block, length, static_cast<uint16_t*>(out) + first);
    }
    if (is_streamed) stream_lines(static_cast<T*>(out) + first, block, length * int64_t{sizeof(T)});
  }
  if (streams) stream_end();
}

void check(const Reduction& reduction, int num_terms) {
  require(num_terms >= 1, "a reduction tree needs at least one term, got ", num_terms);
  require(reduction.terms == reduction.out || partial_dtype(reduction.terms) == reduction.out ||
              reduction.terms == partial_dtype(reduction.out),
          "a reduction of ", dtype_name(reduction.terms), " into ", dtype_name(reduction.out));
  require(is_reducible(reduction.op, reduction.out), "no ", reduce_op_name(reduction.op), " of ",
          dtype_name(reduction.out));
  require(reduction.op != ReduceOp::kAverage || reduction.average_over >= 1, "an average over ",
          reduction.average_over, " terms");
}

}  // namespace

std::vector<TreeStep> tree_order(int num_terms) {
  require(num_terms >= 1, "a reduction tree needs at least one term, got ", num_terms);
  std::vector<TreeStep> steps;
  steps.reserve(static_cast<size_t>(num_terms - 1));
  // At the level of `stride` the living terms are the multiples of it.
  for (int64_t stride = 1; stride < num_terms; stride *= 2)
    for (int64_t into = 0; into + stride < num_terms; into += 2 * stride)
      steps.push_back({static_cast<int>(into), static_cast<int>(into + stride)});
  return steps;
}

Reduction Reduction::partial(DType terms_dtype) const {
  return {op == ReduceOp::kAverage ? ReduceOp::kSum : op, terms_dtype, partial_dtype(out)};
}

DType partial_dtype(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16 ? DType::kF32 : dtype;
}

bool is_reducible(ReduceOp op, DType dtype) {
  const DType partial = partial_dtype(dtype);
  return op != ReduceOp::kAverage || partial == DType::kF32 || partial == DType::kF64;
}

void tree_reduce(const Reduction& reduction, const void* const* terms, int num_terms, int64_t count,
                 void* out) {
  check(reduction, num_terms);
  if (num_terms == 1 && reduction.op != ReduceOp::kAverage && reduction.terms == reduction.out) {
    if (count > 0 && terms[0] != out)
      std::memcpy(out, terms[0], static_cast<size_t>(count) * dtype_size(reduction.out));
    return;
  }
  switch (partial_dtype(reduction.out)) {
    case DType::kF64:
      return reduce_typed<double>(reduction, terms, num_terms, count, out);
    case DType::kI8:
      return reduce_typed<int8_t>(reduction, terms, num_terms, count, out);
    case DType::kU8:
      return reduce_typed<uint8_t>(reduction, terms, num_terms, count, out);
    case DType::kI32:
      return reduce_typed<int32_t>(reduction, terms, num_terms, count, out);
    case DType::kI64:
      return reduce_typed<int64_t>(reduction, terms, num_terms, count, out);
    case DType::kBool:
      return reduce_typed<Truth>(reduction, terms, num_terms, count, out);
    default:
      return reduce_typed<float>(reduction, terms, num_terms, count, out);
  }
}

}  // namespace polyreme
