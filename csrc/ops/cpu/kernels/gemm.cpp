// Matrix multiplication with one fixed fp32 chain over k per element of C; contract in gemm.h.
//
// The structure is that of Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, ACM
// TOMS 2008) as arranged by BLIS (Van Zee and van de Geijn, ACM TOMS 2015): operands are packed into panels,
// a micro-kernel keeps a tile of C in registers. It differs in that a tile starts from C instead of being
// added to it, which makes the sum over all steps of k one chain.
//
//   panel   kTileRows rows of A or kTileCols columns of B, k-major
//   slab    up to kSlabCols columns of B and C; the packed B of one slab and one step streams from L3
//   step    up to kDepth values of k
//   block   up to kBlockRows rows of A and C; the packed A of one block and one step stays in L2
//
// Scratch memory is that one packed B and that one packed A, per thread; for a narrow C also its fp32
// sums: those of one block, or where there are several steps, those of one slab of a round.
//
//   round   up to kRoundRows rows of A and of a narrow C
#include "ops/cpu/kernels/gemm.h"

#include "device/cpu/thread_pool.h"
#include "ops/cpu/kernels/gemm_micro.h"
#include "ops/cpu/kernels/gemm_pack.h"
#include "ops/cpu/kernels/lanes.h"

namespace polyreme::cpu::POLYREME_ISA {
namespace {

// Sized for 32-48 KiB of L1 and 512 KiB to 2 MiB of L2, which covers the machines at hand; speed is flat
// around these values. Deeper steps spare passes over C, but a packed B of more than about 8 MiB falls out of
// L3 and costs 10 %.
#if defined(__AVX512F__)
constexpr int64_t kDepth = 768;
constexpr int64_t kBlockRows = 8 * kTileRows;
constexpr int64_t kSlabCols = 48 * kTileCols;
#else
constexpr int64_t kDepth = 384;
constexpr int64_t kBlockRows = 28 * kTileRows;
constexpr int64_t kSlabCols = 96 * kTileCols;
#endif
constexpr int64_t kRoundRows = 2048;
constexpr int64_t kDepthUnit = 16;  // cuts of k keep whole registers for the transposing copy
// B is read in place, not packed, for up to kDirectRows rows, and for up to kDirectShortRows where
// the sum is so short that a column of panels stays in L2 whatever the leading dimension.
constexpr int64_t kDirectRows = 4 * kTileRows;
constexpr int64_t kDirectShortRows = 20 * kTileRows;
constexpr int64_t kDirectDepth = 256;
constexpr int64_t kAlignFloats = 16;
// Loads and stores of whole registers may reach past a packed operand's last panel.
constexpr int64_t kSlackFloats = 64;

int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

typedef void (*MicroKernel)(const Tile&);

// Whole tiles by rows; tiles with fewer columns by registers and rows.
struct KernelTable {
  MicroKernel whole[kTileRows + 1];
  MicroKernel partial[kTileVecs + 1][kTileRows + 1];
};

template <int kRows, int kVecs>
constexpr void fill_kernels(KernelTable& table) {
  if constexpr (kVecs == kTileVecs) table.whole[kRows] = micro_kernel<kRows, kVecs, false>;
  table.partial[kVecs][kRows] = micro_kernel<kRows, kVecs, true>;
  if constexpr (kRows > 1)
    fill_kernels<kRows - 1, kVecs>(table);
  else if constexpr (kVecs > 1)
    fill_kernels<kTileRows, kVecs - 1>(table);
}

constexpr KernelTable make_kernels() {
  KernelTable table = {};
  fill_kernels<kTileRows, kTileVecs>(table);
  return table;
}

constexpr KernelTable kKernels = make_kernels();

MicroKernel find_kernel(int rows, int cols) {
  if (cols == kTileCols) return kKernels.whole[rows];
  return kKernels.partial[(cols + kWidth - 1) / kWidth][rows];
}

// The B of one slab as the micro-kernels see it: packed panels, or the matrix itself.
struct Panels {
  const float* data;
  int64_t panel_stride;  // from a panel of kTileCols columns to the next
  int64_t row_stride;    // from one k to the next
};

// C [m, n] from panels of A, a_panel_stride apart, and of B.
void multiply_block(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_panel_stride,
                    const Panels& panels, float* c, int64_t c_stride, bool accumulate, const float* bias) {
  const float* b = panels.data;
  Tile tile;
  tile.k = k;
  tile.b_stride = panels.row_stride;
  tile.c_stride = c_stride;
  tile.accumulate = accumulate;
  for (int64_t j = 0; j < n; j += kTileCols, b += panels.panel_stride) {
    tile.cols = static_cast<int>(smaller(n - j, kTileCols));
    tile.b = b;
    tile.bias = bias == nullptr ? nullptr : bias + j;
    tile.a = a;
    for (int64_t i = 0; i < m; i += kTileRows, tile.a += a_panel_stride) {
      const int rows = static_cast<int>(smaller(m - i, kTileRows));
      tile.c = c + i * c_stride + j;
      tile.next_c = i + kTileRows < m ? tile.c + kTileRows * c_stride : c + j + kTileCols;
      find_kernel(rows, tile.cols)(tile);
    }
  }
}

// k = 0: the chain is empty.
void finish_empty_sum(const GemmArgs& g) {
  with_element(g.c_type, [&](auto t) {
    for (int64_t i = 0; i < g.m; ++i) {
      auto* const row = static_cast<decltype(t)*>(g.c) + i * g.c_row_stride;
      for (int64_t j = 0; j < g.n; ++j) {
        const float start = g.accumulate ? widen(row[j]) : 0.0f;
        narrow(g.bias == nullptr ? start : start + g.bias[j], row + j);
      }
    }
  });
}

int64_t packed_b_floats(int64_t k, int64_t n) {
  return round_up(round_up(n, kTileCols) * k + kSlackFloats, kAlignFloats);
}

int64_t packed_a_floats(int64_t m, int64_t k) {
  return round_up(round_up(m, kTileRows) * k + kSlackFloats, kAlignFloats);
}

// An extent cut into the fewest parts of at most `most` units each, as equal as units allow: a short
// last part would pay for a whole pass over the other operand.
struct Cut {
  int64_t extent, unit, units, parts;
  Cut(int64_t extent_in, int64_t unit_in, int64_t most)
      : extent(extent_in),
        unit(unit_in),
        units((extent_in + unit_in - 1) / unit_in),
        parts((units * unit_in + most - 1) / most) {}
  int64_t begin(int64_t part) const { return smaller(units * part / parts * unit, extent); }
};

int64_t narrow_sums_floats(int64_t m, int64_t n, int64_t k) {
  const int64_t rows = k <= kDepth ? kBlockRows : kRoundRows;
  return smaller(m, rows) * round_up(smaller(n, kSlabCols), kAlignFloats);
}

// C [m, n] of narrow elements = rounded sums.
void store_narrow(const float* sums, int64_t sums_stride, int64_t m, int64_t n, Element type, void* c,
                  int64_t c_offset, int64_t c_stride) {
  with_element(type, [=](auto t) {
    auto* to = static_cast<decltype(t)*>(c) + c_offset;
    for (int64_t i = 0; i < m; ++i, to += c_stride) {
      const float* from = sums + i * sums_stride;
      for_lanes(n, [=](int64_t j, auto lanes) { store(to + j, load(from + j, lanes), lanes); });
    }
  });
}

void multiply_serial(const GemmArgs& g, float* packed_b, float* packed_a, float* narrow_sums) {
  const Cut slabs(g.n, kTileCols, kSlabCols), depths(g.k, kDepthUnit, kDepth),
      blocks(g.m, kTileRows, kBlockRows);
  const bool direct = g.b_type == Element::kF32 && g.b_col_stride == 1 &&
                      (g.m <= kDirectRows || (g.m <= kDirectShortRows && g.k <= kDirectDepth));
  for (int64_t slab = 0; slab < slabs.parts; ++slab) {
    const int64_t j = slabs.begin(slab), cols = slabs.begin(slab + 1) - j;
    for (int64_t step = 0; step < depths.parts; ++step) {
      const int64_t p = depths.begin(step), depth = depths.begin(step + 1) - p;
      const int64_t b_offset = j * g.b_col_stride + p * g.b_row_stride;
      Panels panels = {static_cast<const float*>(g.b) + b_offset, kTileCols, g.b_row_stride};
      if (!direct) {
        pack<kTileCols>(g.b_type, g.b, b_offset, g.b_col_stride, g.b_row_stride, cols, depth, packed_b,
                        depth * kTileCols);
        panels = {packed_b, depth * kTileCols, kTileCols};
      }
      const float* const bias = g.bias != nullptr && p + depth == g.k ? g.bias + j : nullptr;
      for (int64_t block = 0; block < blocks.parts; ++block) {
        const int64_t i = blocks.begin(block), rows = blocks.begin(block + 1) - i;
        pack<kTileRows>(g.a_type, g.a, i * g.a_row_stride + p * g.a_col_stride, g.a_row_stride,
                        g.a_col_stride, rows, depth, packed_a, depth * kTileRows);
        const int64_t c_offset = i * g.c_row_stride + j;
        const bool is_narrow = g.c_type != Element::kF32;
        const int64_t c_stride = is_narrow ? round_up(cols, kAlignFloats) : g.c_row_stride;
        float* const sums = is_narrow ? narrow_sums + (depths.parts > 1 ? i * c_stride : 0)
                                      : static_cast<float*>(g.c) + c_offset;
        multiply_block(rows, cols, depth, packed_a, depth * kTileRows, panels, sums, c_stride,
                       g.accumulate || p > 0, bias);
        if (is_narrow && p + depth == g.k)
          store_narrow(sums, c_stride, rows, cols, g.c_type, g.c, c_offset, g.c_row_stride);
      }
    }
  }
}

const void* advance(Element type, const void* p, int64_t count) {
  return static_cast<const char*>(p) + count * (type == Element::kF32 ? 4 : 2);
}
void* advance(Element type, void* p, int64_t count) {
  return static_cast<char*>(p) + count * (type == Element::kF32 ? 4 : 2);
}

// How the threads share C: a grid of row parts by column parts.
struct Partition {
  const GemmArgs* args;
  ThreadPool* pool;
  int64_t rows, cols;  // of a part
  int64_t grid_cols;
};

void run_part(void* context, int64_t task, int thread) {
  const Partition& part = *static_cast<const Partition*>(context);
  GemmArgs g = *part.args;
  const int64_t i = task / part.grid_cols * part.rows;
  const int64_t j = task % part.grid_cols * part.cols;
  if (i >= g.m || j >= g.n) return;
  g.m = smaller(part.rows, g.m - i);
  g.n = smaller(part.cols, g.n - j);
  g.a = advance(g.a_type, g.a, i * g.a_row_stride);
  g.b = advance(g.b_type, g.b, j * g.b_col_stride);
  g.c = advance(g.c_type, g.c, i * g.c_row_stride + j);
  if (g.bias != nullptr) g.bias += j;
  const size_t bytes = static_cast<size_t>(gemm_f32_scratch_bytes(g.m, g.n, g.k, g.c_type));
  gemm_f32_serial(g, part.pool->scratch(thread, bytes));
}

}  // namespace

int64_t gemm_panel_rows() { return kTileRows; }
int64_t gemm_panel_cols() { return kTileCols; }

int64_t gemm_packed_a_bytes(int64_t m, int64_t k) {
  return packed_a_floats(m, k) * static_cast<int64_t>(sizeof(float));
}

int64_t gemm_packed_b_bytes(int64_t k, int64_t n) {
  return packed_b_floats(k, n) * static_cast<int64_t>(sizeof(float));
}

void gemm_pack_a(const GemmArgs& g, float* packed) {
  pack<kTileRows>(g.a_type, g.a, 0, g.a_row_stride, g.a_col_stride, g.m, g.k, packed, g.k * kTileRows);
}

void gemm_pack_b(const GemmArgs& g, float* packed) {
  pack<kTileCols>(g.b_type, g.b, 0, g.b_col_stride, g.b_row_stride, g.n, g.k, packed, g.k * kTileCols);
}

void gemm_f32_packed(const GemmArgs& g, const float* packed_a, const float* packed_b) {
  if (g.k == 0) {
    finish_empty_sum(g);
    return;
  }
  const Cut blocks(g.m, kTileRows, kBlockRows), depths(g.k, kDepthUnit, kDepth);
  for (int64_t block = 0; block < blocks.parts; ++block) {
    const int64_t i = blocks.begin(block), rows = blocks.begin(block + 1) - i;
    for (int64_t step = 0; step < depths.parts; ++step) {
      const int64_t p = depths.begin(step), depth = depths.begin(step + 1) - p;
      const Panels panels = {packed_b + p * kTileCols, g.k * kTileCols, kTileCols};
      multiply_block(rows, g.n, depth, packed_a + i * g.k + p * kTileRows, g.k * kTileRows, panels,
                     static_cast<float*>(g.c) + i * g.c_row_stride, g.c_row_stride, g.accumulate || p > 0,
                     p + depth == g.k ? g.bias : nullptr);
    }
  }
}

int64_t gemm_f32_scratch_bytes(int64_t m, int64_t n, int64_t k, Element c_type) {
  const int64_t floats = packed_a_floats(smaller(m, kBlockRows), smaller(k, kDepth)) +
                         packed_b_floats(smaller(k, kDepth), smaller(n, kSlabCols)) +
                         (c_type == Element::kF32 ? 0 : narrow_sums_floats(m, n, k));
  return floats * static_cast<int64_t>(sizeof(float));
}

void gemm_f32_serial(const GemmArgs& g, void* scratch) {
  if (g.m <= 0 || g.n <= 0) return;
  if (g.k == 0) {
    finish_empty_sum(g);
    return;
  }
  float* const packed_b = static_cast<float*>(scratch);
  const int64_t depth = smaller(g.k, kDepth);
  float* const packed_a = packed_b + packed_b_floats(depth, smaller(g.n, kSlabCols));
  float* const narrow_sums = packed_a + packed_a_floats(smaller(g.m, kBlockRows), depth);
  GemmArgs round = g;
  const int64_t round_rows = g.c_type == Element::kF32 ? g.m : kRoundRows;
  for (int64_t i = 0; i < g.m; i += round_rows) {
    round.m = smaller(round_rows, g.m - i);
    round.a = advance(g.a_type, g.a, i * g.a_row_stride);
    round.c = advance(g.c_type, g.c, i * g.c_row_stride);
    multiply_serial(round, packed_b, packed_a, narrow_sums);
  }
}

void gemm_f32(const GemmArgs& g, ThreadPool& pool) {
  if (g.m <= 0 || g.n <= 0) return;
  const int64_t threads = pool.num_threads();
  // Below about 50 us of work waking a thread costs more than it brings.
  const double work = static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k);
  Partition part = {&g, &pool, g.m, g.n, 1};
  int64_t grid_rows = 1;
  if (threads > 1 && work > 2.0e6) {
    // The grid with the least time: the largest part, plus what packing its operands costs.
    double best = 1.0e300;
    for (int64_t r = 1; r <= threads; ++r) {
      const int64_t c = threads / r;
      const int64_t rows = round_up((g.m + r - 1) / r, kTileRows);
      const int64_t cols = round_up((g.n + c - 1) / c, kTileCols);
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
  pool.run(grid_rows * part.grid_cols, run_part, &part);
}

}  // namespace polyreme::cpu::POLYREME_ISA
