#include "comm/tree.h"

#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>

namespace polyreme {
namespace {

// Up to this many terms are reduced in registers; more are reduced in blocks that stay in L1.
constexpr int kMaxTermsInRegisters = 8;
constexpr int64_t kBlockElements = 512;

template <typename T, ReduceOp kOp>
T combine(T a, T b) {
  if constexpr (kOp == ReduceOp::kMax) return (a > b || a != a) ? a : b;
  if constexpr (kOp == ReduceOp::kMin) return (a < b || a != a) ? a : b;
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
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

template <typename T, ReduceOp kOp>
constexpr std::array<Reducer<T>, kMaxTermsInRegisters + 1> kReducers = {nullptr,
                                                                        reduce_few<T, kOp, 1>,
                                                                        reduce_few<T, kOp, 2>,
                                                                        reduce_few<T, kOp, 3>,
                                                                        reduce_few<T, kOp, 4>,
                                                                        reduce_few<T, kOp, 5>,
                                                                        reduce_few<T, kOp, 6>,
                                                                        reduce_few<T, kOp, 7>,
                                                                        reduce_few<T, kOp, 8>};

// count <= kBlockElements.
template <typename T, ReduceOp kOp>
void reduce_block(const T* const* terms, int num_terms, int64_t first, int64_t count, T* out) {
  if (num_terms <= kMaxTermsInRegisters) {
    std::array<const T*, kMaxTermsInRegisters> local;
    for (int t = 0; t < num_terms; ++t) local[static_cast<size_t>(t)] = terms[t] + first;
    return kReducers<T, kOp>[static_cast<size_t>(num_terms)](local.data(), count, out);
  }
  std::array<T, kBlockElements> left, right;
  const int num_left = left_terms(num_terms);
  reduce_block<T, kOp>(terms, num_left, first, count, left.data());
  reduce_block<T, kOp>(terms + num_left, num_terms - num_left, first, count, right.data());
  const std::array<const T*, 2> halves = {left.data(), right.data()};
  reduce_few<T, kOp, 2>(halves.data(), count, out);
}

template <typename T, ReduceOp kOp>
void reduce_typed(const void* const* terms, int num_terms, int64_t count, void* out) {
  const auto* typed = reinterpret_cast<const T* const*>(terms);
  auto* result = static_cast<T*>(out);
  if (num_terms <= kMaxTermsInRegisters)
    return kReducers<T, kOp>[static_cast<size_t>(num_terms)](typed, count, result);
  for (int64_t first = 0; first < count; first += kBlockElements)
    reduce_block<T, kOp>(typed, num_terms, first, std::min(kBlockElements, count - first), result + first);
}

template <typename T>
void reduce_by_op(ReduceOp op, const void* const* terms, int num_terms, int64_t count, void* out) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_typed<T, ReduceOp::kSum>(terms, num_terms, count, out);
    case ReduceOp::kMax:
      return reduce_typed<T, ReduceOp::kMax>(terms, num_terms, count, out);
    case ReduceOp::kMin:
      return reduce_typed<T, ReduceOp::kMin>(terms, num_terms, count, out);
    default:
      throw NotAvailable(concat("no reduction by ", reduce_op_name(op)));
  }
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

bool is_reducible(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kI32 || dtype == DType::kI64;
}

void tree_reduce(DType dtype, ReduceOp op, const void* const* terms, int num_terms, int64_t count,
                 void* out) {
  require(num_terms >= 1, "a reduction tree needs at least one term, got ", num_terms);
  switch (dtype) {
    case DType::kF32:
      return reduce_by_op<float>(op, terms, num_terms, count, out);
    case DType::kF64:
      return reduce_by_op<double>(op, terms, num_terms, count, out);
    case DType::kI32:
      return reduce_by_op<int32_t>(op, terms, num_terms, count, out);
    case DType::kI64:
      return reduce_by_op<int64_t>(op, terms, num_terms, count, out);
    default:
      throw InvalidArgument(concat("no reduction of ", dtype_name(dtype)));
  }
}

}  // namespace polyreme
