#pragma once

#include <algorithm>

#include "base/math.h"
#include "device/cpu/thread_pool.h"

namespace polyreme {

// Elements of one task: long enough to hide the cost of handing it out, short enough to share the work.
inline constexpr int64_t kGrain = int64_t{1} << 15;

// Calls body(begin, end) for pieces of [0, count) of `grain` each, the last one maybe shorter.
template <typename Body>
void for_ranges(ThreadPool& pool, int64_t count, int64_t grain, Body&& body) {
  parallel_for(pool, ceil_div(count, grain),
               [&](int64_t task, int) { body(task * grain, std::min(count, (task + 1) * grain)); });
}

// Pieces of rows of `cols` elements.
template <typename Body>
void for_row_ranges(ThreadPool& pool, int64_t rows, int64_t cols, Body&& body) {
  for_ranges(pool, rows, std::max<int64_t>(1, kGrain / cols), body);
}

// Pieces of columns for sums over rows: whole lanes, and few enough that the sums stay in the L1 cache.
template <typename Body>
void for_column_ranges(ThreadPool& pool, int64_t cols, Body&& body) {
  constexpr int64_t kMaxColumns = 2048;
  for_ranges(pool, cols, std::min(kMaxColumns, round_up(ceil_div(cols, pool.num_threads()), 16)), body);
}

}  // namespace polyreme
