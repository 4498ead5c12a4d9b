#pragma once

#include <array>
#include <cstring>
#include <mutex>

#include "base/exact_sum.h"
#include "ops/cpu/ranges.h"

namespace polyreme {

inline ExactSum load_sum(const int64_t* limbs) {
  return ExactSum(std::span<const int64_t, ExactSum::kLimbs>(limbs, ExactSum::kLimbs));
}

// Adds to `limbs`, those of kSums sums, what add_range(sums, begin, end) adds for pieces of [0, count).
// Pieces are added as threads finish them: an exact sum has no order.
template <int kSums, typename AddRange>
void add_exactly(ThreadPool& pool, int64_t count, int64_t grain, int64_t* limbs, AddRange&& add_range) {
  std::array<ExactSum, kSums> totals;
  for (int i = 0; i < kSums; ++i) totals[static_cast<size_t>(i)] = load_sum(limbs + i * ExactSum::kLimbs);
  std::mutex mutex;
  for_ranges(pool, count, grain, [&](int64_t begin, int64_t end) {
    std::array<ExactSum, kSums> piece;
    add_range(piece, begin, end);
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < kSums; ++i) totals[i].add(piece[i]);
  });
  for (int i = 0; i < kSums; ++i) {
    const ExactSum::Limbs canonical = totals[static_cast<size_t>(i)].canonical_limbs();
    std::memcpy(limbs + i * ExactSum::kLimbs, canonical.data(), sizeof(canonical));
  }
}

}  // namespace polyreme
