// rows_kernel: x (and dy) [rows, cols] -> one or two chains per column, [cols].
// Grid: one-dimensional, a block per 32 columns. Its first warp adds, a lane a column; the other eight bring
// the next 64 rows into shared memory (double-buffered) in 16-byte loads while it does. Bytes per element of
// size s: s read; norms 2s. Bound by the latency of the chain, some 5 cycles a row, not by memory: the order
// of the sum is what is promised. A lane of lanes.dp is one chain, so more lanes are shorter. Accumulator:
// fp32, one chain (norms: gamma's with a fused multiply-add).
#include "kernels/elements.cuh"
#include "kernels/rows.cuh"
#include "kernels/warp.cuh"

namespace polyreme::kernels {
namespace {

constexpr int kColumns = kWarp;
constexpr int kRows = 64;
constexpr int kLoaders = 256;
constexpr int kTile = kRows * kColumns;

// body(row in the tile, first column in the tile, Int<n>{}) for the elements that loader `thread` brings.
template <int kCount, typename Body>
__device__ void for_tile(int thread, int num_rows, int num_columns, bool packs, Body body) {
  if (packs) {
    constexpr int kOfRow = kColumns / kCount;
#pragma unroll
    for (int i = thread; i < kRows * kOfRow; i += kLoaders) {
      const int row = i / kOfRow, column = i % kOfRow * kCount;
      if (row < num_rows && column < num_columns) body(row, column, Int<kCount>{});
    }
  } else {
    for (int i = thread; i < kTile; i += kLoaders)
      if (i / kColumns < num_rows && i % kColumns < num_columns) body(i / kColumns, i % kColumns, Int<1>{});
  }
}

// load(buffer, first row, number of rows) by the loaders and add(buffer, number of rows) by the first warp,
// for tile after tile.
template <typename Load, typename Add>
__device__ void for_tiles(int64_t rows, Load load, Add add) {
  const bool adds = threadIdx.x < kWarp;
  const auto rows_of = [rows](int64_t first) {
    return static_cast<int>(rows - first < kRows ? rows - first : kRows);
  };
  if (!adds) load(0, int64_t{0}, rows_of(0));
  int buffer = 0;
  for (int64_t first = 0; first < rows; first += kRows) {
    __syncthreads();
    if (adds) {
      add(buffer, rows_of(first));
    } else if (first + kRows < rows) {
      load(1 - buffer, first + kRows, rows_of(first + kRows));
    }
    buffer = 1 - buffer;
  }
}

template <typename T>
__global__ void rows_kernel(PolyremeAccumulateRows args, bool packs) {
  POLYREME_SHARED(float4, tiles4, 2 * kTile / 4);
  auto* tiles = reinterpret_cast<float*>(tiles4);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns;
  const auto num_columns = static_cast<int>(args.cols - column < kColumns ? args.cols - column : kColumns);
  const auto* x = static_cast<const T*>(args.x) + column;
  const auto lane = static_cast<int>(threadIdx.x);
  const bool sums = lane < num_columns;
  float sum = sums ? args.out[column + lane] : 0.0f;
  for_tiles(
      args.rows,
      [&](int buffer, int64_t first, int num_rows) {
        const auto thread = static_cast<int>(threadIdx.x) - kWarp;
        for_tile<kPack<T>>(thread, num_rows, num_columns, packs, [&](int row, int c, auto pack) {
          float values[decltype(pack)::value];
          load_pack(x + (first + row) * args.cols + c, values);
          store_pack(tiles + buffer * kTile + row * kColumns + c, values);
        });
      },
      [&](int buffer, int num_rows) {
        const float* tile = tiles + buffer * kTile + lane;
        if (!sums) return;
#pragma unroll 8
        for (int row = 0; row < num_rows; ++row) sum = sum + tile[row * kColumns];
      });
  if (sums) args.out[column + lane] = sum;
}

// Grid: one-dimensional, one thread per 16 bytes of the table, strides of the whole grid. Bytes per element:
// 4 and the table's size (from the cache beyond its first period) read, the output's written; memory-bound.
template <typename T, typename Out>
__global__ void add_rows_kernel(PolyremeAddRows args, bool packs) {
  const auto* table = static_cast<const T*>(args.table);
  auto* out = static_cast<Out*>(args.out);
  const int64_t in_period = args.period * args.cols;
  constexpr int kOfThread = kPack < T >> kPack<Out> ? kPack<T> : kPack<Out>;
  for_elements<kOfThread>(args.rows * args.cols, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    float values[kCount], more[kCount];
    load_pack(args.x + i, values);
    load_pack(table + i % in_period, more);
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[e] = values[e] + more[e];
    store_pack(out + i, values);
  });
}

template <typename T>
__global__ void norm_weight_kernel(PolyremeNormBackwardWeight args, bool packs) {
  POLYREME_SHARED(float4, tiles4, 4 * kTile / 4);
  auto* tiles = reinterpret_cast<float*>(tiles4);  // [buffer][dy, xhat][kRows][kColumns]
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns;
  const auto num_columns = static_cast<int>(args.cols - column < kColumns ? args.cols - column : kColumns);
  const auto* dy = static_cast<const T*>(args.dy) + column;
  const auto* x = static_cast<const T*>(args.x) + column;
  const auto lane = static_cast<int>(threadIdx.x);
  const bool sums = lane < num_columns;
  float gamma = sums ? args.dgamma[column + lane] : 0.0f;
  float beta = sums && args.dbeta != nullptr ? args.dbeta[column + lane] : 0.0f;
  for_tiles(
      args.rows,
      [&](int buffer, int64_t first, int num_rows) {
        const auto thread = static_cast<int>(threadIdx.x) - kWarp;
        for_tile<kPack<T>>(thread, num_rows, num_columns, packs, [&](int row, int c, auto pack) {
          constexpr int kCount = decltype(pack)::value;
          float gradient[kCount], xhat[kCount];
          load_pack(dy + (first + row) * args.cols + c, gradient);
          load_pack(x + (first + row) * args.cols + c, xhat);
          const float mean = args.mean != nullptr ? args.mean[first + row] : 0.0f;
          const float rstd = args.rstd[first + row];
#pragma unroll
          for (int e = 0; e < kCount; ++e) xhat[e] = (xhat[e] - mean) * rstd;
          float* tile = tiles + buffer * 2 * kTile + row * kColumns + c;
          store_pack(tile, gradient);
          store_pack(tile + kTile, xhat);
        });
      },
      [&](int buffer, int num_rows) {
        const float* tile = tiles + buffer * 2 * kTile + lane;
        if (!sums) return;
#pragma unroll 8
        for (int row = 0; row < num_rows; ++row) {
          gamma = fmaf(tile[row * kColumns], tile[kTile + row * kColumns], gamma);
          beta = beta + tile[row * kColumns];
        }
      });
  if (sums) args.dgamma[column + lane] = gamma;
  if (sums && args.dbeta != nullptr) args.dbeta[column + lane] = beta;
}

template <typename Args>
cudaError_t launch_tiles(void (*kernel)(Args, bool), const Args& args, bool packs, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((args.cols + kColumns - 1) / kColumns);
  POLYREME_LAUNCH(kernel, blocks, kWarp + kLoaders, stream, args, packs);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_accumulate_rows(const PolyremeAccumulateRows& args, cudaStream_t stream) {
  if (args.rows < 0 || args.cols < 1) return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.rows == 0) return cudaSuccess;
    return launch_tiles(&rows_kernel<T>, args, packs_fit(args.x) && args.cols % kPack<T> == 0, stream);
  });
}

cudaError_t launch_add_rows(const PolyremeAddRows& args, cudaStream_t stream) {
  if (args.rows < 0 || args.cols < 1 || args.period < 1) return cudaErrorInvalidValue;
  return with_type(args.table_dtype, [&](auto table) {
    return with_type(args.out_dtype, [&](auto out) {
      if (args.rows == 0) return cudaSuccess;
      constexpr int kOfThread =
          kPack < decltype(table) >> kPack<decltype(out)> ? kPack<decltype(table)> : kPack<decltype(out)>;
      void (*kernel)(PolyremeAddRows, bool) = &add_rows_kernel<decltype(table), decltype(out)>;
      POLYREME_LAUNCH(kernel, blocks_for(args.rows * args.cols, kThreads * kOfThread), kThreads, stream, args,
                      packs_fit(args.x, args.table, args.out) && args.cols % kOfThread == 0);
      return cudaGetLastError();
    });
  });
}

cudaError_t launch_norm_backward_weight(const PolyremeNormBackwardWeight& args, cudaStream_t stream) {
  if (args.rows < 0 || args.cols < 1 || (args.mean == nullptr) != (args.dbeta == nullptr))
    return cudaErrorInvalidValue;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.rows == 0) return cudaSuccess;
    return launch_tiles(&norm_weight_kernel<T>, args, packs_fit(args.x, args.dy) && args.cols % kPack<T> == 0,
                        stream);
  });
}

}  // namespace polyreme::kernels
