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

// Whether tree_reduce takes the dtype: fp32, fp64, int32, int64.
bool is_reducible(DType dtype);

// out[i] = the terms' elements i, reduced by tree_order(num_terms), for i in [0, count). `out` may
// be one of the terms; no other overlap. Integer sums wrap; max and min pass NaN on; of two zeros
// of different sign, max and min take the later term. Bits do not depend on the CPU.
// Throws InvalidArgument for other dtypes.
void tree_reduce(DType dtype, ReduceOp op, const void* const* terms, int num_terms, int64_t count, void* out);

}  // namespace polyreme
