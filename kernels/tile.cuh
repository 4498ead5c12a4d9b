// Products of tiles by one block: 64 x 64 results, 256 threads of 4 x 4 results each. Every result is one
// chain of fused multiply-adds over ascending depth that starts from what it holds, so its bits depend on
// nothing else.
#pragma once

#include "kernels/launch.h"

namespace polyreme::kernels {

inline constexpr int kTile = 64;
inline constexpr int kTileThreads = 256;
inline constexpr int kPart = 4;    // results of a thread per dim
inline constexpr int kApart = 16;  // from one to the next
inline constexpr int kDepth = 16;  // of what is staged at once
inline constexpr int kStagedFloats = 2 * kDepth * kTile;

// Row and column in the tile of a thread's result [r][c].
__device__ inline int tile_row(int r) { return static_cast<int>(threadIdx.x) / kApart + r * kApart; }
__device__ inline int tile_column(int c) { return static_cast<int>(threadIdx.x) % kApart + c * kApart; }

struct Part {
  float at[kPart][kPart];
};
__device__ inline void clear(Part& part) {
#pragma unroll
  for (int r = 0; r < kPart; ++r) {
#pragma unroll
    for (int c = 0; c < kPart; ++c) part.at[r][c] = 0.0f;
  }
}

// part += a x b; a(row, i) and b(i, column) give elements with 0 <= i < depth. kAlongDepth says in which
// direction neighbouring threads read an operand. `staged`: kStagedFloats of shared memory; the block may use
// it again at once.
template <bool kAAlongDepth, bool kBAlongDepth, typename A, typename B>
__device__ void multiply_tiles(Part& part, int64_t depth, float* staged, A a, B b) {
  float* staged_a = staged;
  float* staged_b = staged + kDepth * kTile;
  for (int64_t first = 0; first < depth; first += kDepth) {
    const int count = static_cast<int>(depth - first < kDepth ? depth - first : kDepth);
    for (int n = static_cast<int>(threadIdx.x); n < kDepth * kTile; n += kTileThreads) {
      const int a_i = kAAlongDepth ? n % kDepth : n / kTile, row = kAAlongDepth ? n / kDepth : n % kTile;
      const int b_i = kBAlongDepth ? n % kDepth : n / kTile, column = kBAlongDepth ? n / kDepth : n % kTile;
      if (a_i < count) staged_a[a_i * kTile + row] = a(row, first + a_i);
      if (b_i < count) staged_b[b_i * kTile + column] = b(first + b_i, column);
    }
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      float x[kPart], y[kPart];
#pragma unroll
      for (int p = 0; p < kPart; ++p) x[p] = staged_a[i * kTile + tile_row(p)];
#pragma unroll
      for (int p = 0; p < kPart; ++p) y[p] = staged_b[i * kTile + tile_column(p)];
#pragma unroll
      for (int r = 0; r < kPart; ++r) {
#pragma unroll
        for (int c = 0; c < kPart; ++c) part.at[r][c] = fmaf(x[r], y[c], part.at[r][c]);
      }
    }
    __syncthreads();
  }
}

}  // namespace polyreme::kernels
