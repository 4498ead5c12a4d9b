// The product of bf16 matrices by the tile unit of AMX-BF16; the rule of its sums stands in gemm.h.
//
//   granule  32 values of k: what one tile product consumes
//   tile     16 lines (rows of A, columns of B) of one granule, 1 KiB. Of A: a row a line. Of B: a row a pair
//            of k, with the pair of every line side by side.
//   panel    two tiles a granule for 32 lines, granule after granule
//   group    panels of A, up to kGroupBytes: read once for every slab
//   slab     panels of B, up to kSlabBytes: stays in L2 while the panels of A pass
//   step     up to kStepGranules where C is fp32, which keeps the sums in between
//
// Accumulator: four tiles of C, fp32, in registers over all granules of a step. Bytes: a granule of a panel
// of each operand (4 KiB) from L2 for 32 x 32 x 32 multiply-adds.
#include <immintrin.h>

#include "ops/cpu/kernels/gemm_pack.h"
#include "ops/cpu/kernels/gemm_partition.h"
#include "ops/cpu/kernels/lanes.h"

namespace polyreme::cpu::POLYREME_ISA {
namespace {

constexpr int kSide = 16;
constexpr int kPanelLines = 2 * kSide;
constexpr int kGranule = 32;
constexpr int64_t kTileElements = kSide * kGranule;
constexpr int64_t kGranuleElements = 2 * kTileElements;  // of a panel
constexpr int64_t kGranuleBytes = kGranuleElements * static_cast<int64_t>(sizeof(bf16));
constexpr int64_t kGroupBytes = int64_t{4} << 20;
constexpr int64_t kSlabBytes = int64_t{1} << 20;
constexpr int64_t kStepGranules = 64;

// An operand: `lines` of k elements, one of the two strides being 1.
struct Operand {
  const bf16* data;
  int64_t line_stride, k_stride;
  int64_t lines, k;
  int64_t unit;  // k of a unit: each is padded to whole granules
  int64_t granules_per_unit;
  bool is_by_line;  // k contiguous
};

int64_t granules_of_unit(const GemmArgs& g) {
  return ((g.k_unit > 0 ? g.k_unit : g.k) + kGranule - 1) / kGranule;
}

int64_t num_granules(const GemmArgs& g) {
  const int64_t unit = g.k_unit > 0 ? g.k_unit : g.k;
  const int64_t rest = g.k % unit;
  return g.k / unit * granules_of_unit(g) + (rest + kGranule - 1) / kGranule;
}

Operand make_operand(const GemmArgs& g, const void* data, int64_t line_stride, int64_t k_stride,
                     int64_t lines) {
  return {static_cast<const bf16*>(data),
          line_stride,
          k_stride,
          lines,
          g.k,
          g.k_unit > 0 ? g.k_unit : g.k,
          granules_of_unit(g),
          k_stride == 1 || g.k == 1};
}

inline __attribute__((always_inline)) __m512i load_pairs_of_line(const bf16* p, int depth) {
  const __mmask32 mask = depth >= 32 ? ~__mmask32{0} : (__mmask32{1} << depth) - 1;
  return _mm512_maskz_loadu_epi16(mask, p);
}
inline __attribute__((always_inline)) __m512i widen_lines(const bf16* p, int lines) {
  const __mmask16 mask = static_cast<__mmask16>((1u << lines) - 1u);
  return _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_maskz_loadu_epi16(mask, p));
}

// One tile from `lines` lines and `depth` values of k, zeros beyond. kLineRows: a row a line (A), else a row
// a pair of k (B).
template <bool kLineRows>
void pack_tile(const Operand& op, int64_t first_line, int lines, int64_t first_k, int depth, bf16* to) {
  Vec r[kSide];
  const bf16* const from = op.data + first_line * op.line_stride + first_k * op.k_stride;
  if (op.is_by_line) {
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i)
      r[i] =
          i < lines ? _mm512_castsi512_ps(load_pairs_of_line(from + i * op.line_stride, depth)) : vec_zero();
  } else {
#pragma GCC unroll 16
    for (int p = 0; p < kSide; ++p) {
      const __m512i low =
          2 * p < depth ? widen_lines(from + 2 * p * op.k_stride, lines) : _mm512_setzero_si512();
      const __m512i high =
          2 * p + 1 < depth ? widen_lines(from + (2 * p + 1) * op.k_stride, lines) : _mm512_setzero_si512();
      r[p] = _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_maskz_slli_epi32(0xffff, high, 16)));
    }
  }
  if (op.is_by_line != kLineRows) transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) _mm512_store_ps(to + i * kGranule, r[i]);
}

// Granules [begin, end) of the panels of lines [first, first + count).
template <bool kLineRows>
void pack_panels(const Operand& op, int64_t first, int64_t count, int64_t begin, int64_t end, bf16* to) {
  for (int64_t line = 0; line < count; line += kPanelLines) {
    for (int64_t q = begin; q < end; ++q) {
      const int64_t in_unit = q % op.granules_per_unit * kGranule;
      const int64_t k = q / op.granules_per_unit * op.unit + in_unit;
      const int depth = static_cast<int>(smaller(smaller(op.unit - in_unit, op.k - k), kGranule));
      for (int64_t half = 0; half < kPanelLines; half += kSide, to += kTileElements) {
        const int64_t left = count - line - half;
        const int lines = static_cast<int>(left < 0 ? 0 : smaller(left, kSide));
        pack_tile<kLineRows>(op, first + line + half, lines, k, depth, to);
      }
    }
  }
}

// The tile intrinsics of g++ do not say that they read memory: what was stored must be there before.
inline __attribute__((always_inline)) void complete_stores() { __asm__ volatile("" ::: "memory"); }

// C [32, 32] (+)= panel of A times panel of B.
void multiply_panels(int64_t granules, const bf16* a, const bf16* b, float* c, int64_t c_stride,
                     bool continues) {
  const int64_t row_bytes = c_stride * static_cast<int64_t>(sizeof(float));
  float* const below = c + kSide * c_stride;
  complete_stores();
  if (continues) {
    _tile_loadd(0, c, row_bytes);
    _tile_loadd(1, c + kSide, row_bytes);
    _tile_loadd(2, below, row_bytes);
    _tile_loadd(3, below + kSide, row_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t q = 0; q < granules; ++q, a += kGranuleElements, b += kGranuleElements) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kTileElements, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, row_bytes);
  _tile_stored(1, c + kSide, row_bytes);
  _tile_stored(2, below, row_bytes);
  _tile_stored(3, below + kSide, row_bytes);
}

// As store(), in one instruction; flushes subnormal results to zero, as the tile unit does.
POLYREME_INLINE void store_rounded(bf16* to, v16f x, FullLanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
}
POLYREME_INLINE void store_rounded(bf16* to, v16f x, TailLanes tail) {
  _mm256_mask_storeu_epi16(to, lane_mask_bits(tail.n), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
}

// The rectangle of C that a pair of panels makes, where it is not a whole fp32 one without bias.
template <typename T>
void finish_edge(const GemmArgs& g, const float* sums, int64_t i, int64_t j, bool with_bias) {
  const int64_t rows = smaller(g.m - i, kPanelLines), cols = smaller(g.n - j, kPanelLines);
  T* to = static_cast<T*>(g.c) + i * g.c_row_stride + j;
  for (int64_t r = 0; r < rows; ++r, to += g.c_row_stride, sums += kPanelLines) {
    for_lanes(cols, [=](int64_t c, auto lanes) {
      v16f x = load(sums + c, lanes);
      if (with_bias) x = x + load(g.bias + j + c, lanes);
      if constexpr (sizeof(T) == sizeof(bf16))
        store_rounded(to + c, x, lanes);
      else
        store(to + c, x, lanes);
    });
  }
}

void load_edge(const GemmArgs& g, float* sums, int64_t i, int64_t j) {
  const int64_t rows = smaller(g.m - i, kPanelLines), cols = smaller(g.n - j, kPanelLines);
  const float* from = static_cast<const float*>(g.c) + i * g.c_row_stride + j;
  for (int64_t r = 0; r < rows; ++r, from += g.c_row_stride, sums += kPanelLines)
    for_lanes(cols, [=](int64_t c, auto lanes) { store(sums + c, load(from + c, lanes), lanes); });
}

void multiply_pair(const GemmArgs& g, int64_t i, int64_t j, int64_t granules, const bf16* a, const bf16* b,
                   bool continues, bool is_last) {
  const bool with_bias = is_last && g.bias != nullptr;
  const bool is_whole = i + kPanelLines <= g.m && j + kPanelLines <= g.n;
  if (is_whole && !with_bias && g.c_type == Element::kF32) {
    multiply_panels(granules, a, b, static_cast<float*>(g.c) + i * g.c_row_stride + j, g.c_row_stride,
                    continues);
    return;
  }
  alignas(64) float sums[kPanelLines * kPanelLines];
  if (continues) load_edge(g, sums, i, j);
  multiply_panels(granules, a, b, sums, kPanelLines, continues);
  if (g.c_type == Element::kF32)
    finish_edge<float>(g, sums, i, j, with_bias);
  else
    finish_edge<bf16>(g, sums, i, j, with_bias);
}

int64_t step_granules(const GemmArgs& g) {
  const int64_t granules = num_granules(g);
  return g.c_type == Element::kF32 ? smaller(granules, kStepGranules) : granules;
}
// Lines of a packed buffer of about `bytes`.
int64_t lines_within(int64_t bytes, int64_t granules, int64_t lines) {
  const int64_t panels = bytes / (granules * kGranuleBytes);
  return smaller(round_up(lines, kPanelLines), (panels < 1 ? 1 : panels) * kPanelLines);
}

void configure_tiles() {
  alignas(64) uint8_t config[64] = {1};  // palette 1; eight tiles of 16 rows of 64 bytes
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;
    config[48 + tile] = kSide;
  }
  const uint8_t* const address = config;
  __asm__ volatile("" : : "r"(address) : "memory");
  _tile_loadconfig(config);
}

int64_t scratch_bytes(const GemmArgs& g) {
  const int64_t granules = step_granules(g);
  const int64_t panels =
      (lines_within(kGroupBytes, granules, g.m) + lines_within(kSlabBytes, granules, g.n)) / kPanelLines;
  return panels * granules * kGranuleBytes;
}

void multiply_serial(const GemmArgs& g, void* scratch) {
  configure_tiles();
  const int64_t total = num_granules(g), step = step_granules(g);
  const int64_t group = lines_within(kGroupBytes, step, g.m), slab = lines_within(kSlabBytes, step, g.n);
  const Operand a = make_operand(g, g.a, g.a_row_stride, g.a_col_stride, g.m);
  const Operand b = make_operand(g, g.b, g.b_col_stride, g.b_row_stride, g.n);
  bf16* const packed_a = static_cast<bf16*>(scratch);
  bf16* const packed_b = packed_a + group * step * kGranule;
  for (int64_t begin = 0; begin < total; begin += step) {
    const int64_t granules = smaller(step, total - begin);
    const int64_t panel = granules * kGranuleElements;
    const bool is_last = begin + granules == total;
    for (int64_t i0 = 0; i0 < g.m; i0 += group) {
      const int64_t rows = smaller(group, g.m - i0);
      pack_panels<true>(a, i0, rows, begin, begin + granules, packed_a);
      for (int64_t j0 = 0; j0 < g.n; j0 += slab) {
        const int64_t cols = smaller(slab, g.n - j0);
        pack_panels<false>(b, j0, cols, begin, begin + granules, packed_b);
        for (int64_t i = 0; i < rows; i += kPanelLines)
          for (int64_t j = 0; j < cols; j += kPanelLines)
            multiply_pair(g, i0 + i, j0 + j, granules, packed_a + i / kPanelLines * panel,
                          packed_b + j / kPanelLines * panel, g.accumulate || begin > 0, is_last);
      }
    }
  }
  _tile_release();
}

}  // namespace

void gemm_bf16(const GemmArgs& g, ThreadPool& pool) {
  if (g.m <= 0 || g.n <= 0) return;
  run_partition({&g, &pool, multiply_serial, scratch_bytes, 0, 0, 0}, kPanelLines, kPanelLines, 2.0e7);
}

}  // namespace polyreme::cpu::POLYREME_ISA
