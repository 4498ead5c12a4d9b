// How the threads share C: a grid of row parts by column parts. Private to the gemm kernels; compiled once
// per instruction set.
#pragma once

#include "device/cpu/thread_pool.h"
#include "ops/cpu/kernels/gemm.h"

namespace polyreme::cpu::POLYREME_ISA {
namespace {

inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

inline const void* advance(Element type, const void* p, int64_t count) {
  return static_cast<const char*>(p) + count * (type == Element::kF32 ? 4 : 2);
}
inline void* advance(Element type, void* p, int64_t count) {
  return static_cast<char*>(p) + count * (type == Element::kF32 ? 4 : 2);
}

struct Partition {
  const GemmArgs* args;
  ThreadPool* pool;
  void (*serial)(const GemmArgs& args, void* scratch);
  int64_t (*scratch_bytes)(const GemmArgs& args);
  int64_t rows, cols;  // of a part
  int64_t grid_cols;
};

inline void run_part(void* context, int64_t task, int thread) {
  const Partition& part = *static_cast<const Partition*>(context);
  GemmArgs g = *part.args;
  const int64_t i = task / part.grid_cols * part.rows;
  const int64_t j = task % part.grid_cols * part.cols;
  if (i >= g.m || j >= g.n) return;
  g.m = part.rows < g.m - i ? part.rows : g.m - i;
  g.n = part.cols < g.n - j ? part.cols : g.n - j;
  g.a = advance(g.a_type, g.a, i * g.a_row_stride);
  g.b = advance(g.b_type, g.b, j * g.b_col_stride);
  g.c = advance(g.c_type, g.c, i * g.c_row_stride + j);
  if (g.bias != nullptr) g.bias += j;
  part.serial(g, part.pool->scratch(thread, static_cast<size_t>(part.scratch_bytes(g))));
}

// Runs parts of whole tiles of tile_rows x tile_cols on the pool; on one thread below `min_work`
// multiply-adds, where waking another costs more than it brings.
inline void run_partition(Partition part, int64_t tile_rows, int64_t tile_cols, double min_work) {
  const GemmArgs& g = *part.args;
  const int64_t threads = part.pool->num_threads();
  const double work = static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k);
  part.rows = g.m;
  part.cols = g.n;
  part.grid_cols = 1;
  int64_t grid_rows = 1;
  if (threads > 1 && work > min_work) {
    // The grid with the least time: the largest part, plus what packing its operands costs.
    double best = 1.0e300;
    for (int64_t r = 1; r <= threads; ++r) {
      const int64_t c = threads / r;
      const int64_t rows = round_up((g.m + r - 1) / r, tile_rows);
      const int64_t cols = round_up((g.n + c - 1) / c, tile_cols);
      const double cost =
          static_cast<double>(rows) * static_cast<double>(cols) + 16.0 * static_cast<double>(rows + cols);
      if (cost < best) {
        best = cost;
        grid_rows = r;
        part.rows = rows;
        part.cols = cols;
        part.grid_cols = c;
      }
    }
  }
  part.pool->run(grid_rows * part.grid_cols, run_part, &part);
}

}  // namespace
}  // namespace polyreme::cpu::POLYREME_ISA
