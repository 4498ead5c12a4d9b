#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "comm/communicator.h"

namespace polyreme {

// One node of the reduction tree: term `into` becomes (term `into`) op (term `from`).
struct TreeStep {
  int into;
  int from;
  bool operator==(const TreeStep&) const = default;
};

// The one definition of the order in which terms are reduced: neighbours are paired, level by
// level; with an odd number at a level the last one moves up as it is. The result is in term 0.
//
// Hence the tree of n > 1 terms is tree(first p) op tree(rest), p the largest power of two below n,
// and a contiguous block of 2^k terms that starts at a multiple of 2^k is a subtree.
// Throws InvalidArgument for num_terms < 1.
std::vector<TreeStep> tree_order(int num_terms);

// A reduction, or one node of a tree that is reduced over several levels. Such a tree has the bits of a
// single call if every level but the last is a `partial` one: nothing is rounded nor divided before the end.
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  DType terms = DType::kF32;
  DType out = DType::kF32;   // equal to `terms`, or one of both is partial_dtype of the other
  int64_t average_over = 0;  // kAverage: the number of all terms of the tree

  // The whole reduction of `num_terms` terms.
  static Reduction whole(ReduceOp op, DType dtype, int num_terms) { return {op, dtype, dtype, num_terms}; }
  // The lower levels of this one: from `terms_dtype`, this reduction's `terms` or already partial.
  Reduction partial(DType terms_dtype) const;
};
// What partial results are kept in: float32 for float16 and bfloat16, else the dtype itself.
DType partial_dtype(DType dtype);

// Whether op takes the dtype: kAverage takes floating-point numbers only, the others every dtype.
bool is_reducible(ReduceOp op, DType dtype);

// out[i] = the terms' elements i, reduced by tree_order(num_terms), for i in [0, count). `out` may
// be one of the terms if the dtypes are equal; no other overlap. What each operation does to which dtype
// stands at Communicator. Of two zeros of different sign max and min take the later term; which NaN of
// several is passed on is not defined. A single term that is not averaged is copied as it is. An average is
// sum / average_over, divided in float32 (float64) and, in 16 bits, rounded once after that. Bits do not
// depend on the CPU. Throws InvalidArgument for what is_reducible refuses and for dtypes that do not go
// together.
void tree_reduce(const Reduction& reduction, const void* const* terms, int num_terms, int64_t count,
                 void* out);

}  // namespace polyreme
