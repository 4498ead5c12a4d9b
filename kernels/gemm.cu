// gemm_kernel: a [m, k], b [k, n] -> c [m, n].
// Grid: x tiles of 64 columns, y tiles of 64 rows of c; 256 threads, 4 x 4 results each.
// Bytes: each tile reads 64 rows of a and 64 columns of b once, in steps of 16 along k, through 8 KiB of
// shared memory; 32 fused multiply-adds of a thread per 8 loads from there. Bound by shared memory.
// Accumulator: fp32, one chain per element.
#include "kernels/elements.cuh"
#include "kernels/gemm.cuh"
#include "kernels/tile.cuh"

namespace polyreme::kernels {
namespace {

// Element i of an array whose dtype is known when it runs: the same for all threads.
__device__ float load_any(const void* data, int32_t dtype, int64_t i) {
  if (dtype == static_cast<int32_t>(DType::kBF16))
    return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
  if (dtype == static_cast<int32_t>(DType::kF16)) return to_float(static_cast<const __half*>(data)[i]);
  return static_cast<const float*>(data)[i];
}
__device__ void store_any(void* data, int32_t dtype, int64_t i, float x) {
  if (dtype == static_cast<int32_t>(DType::kBF16)) {
    static_cast<__nv_bfloat16*>(data)[i] = from_float<__nv_bfloat16>(x);
  } else if (dtype == static_cast<int32_t>(DType::kF16)) {
    static_cast<__half*>(data)[i] = from_float<__half>(x);
  } else {
    static_cast<float*>(data)[i] = x;
  }
}

template <bool kAAlongDepth, bool kBAlongDepth>
__global__ void gemm_kernel(PolyremeGemm args) {
  POLYREME_SHARED(float, staged, kStagedFloats);
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kTile;
  Part part;
  clear(part);
  const auto for_results = [&](auto body) {
#pragma unroll
    for (int r = 0; r < kPart; ++r) {
#pragma unroll
      for (int c = 0; c < kPart; ++c) {
        const int64_t row = first_row + tile_row(r), column = first_column + tile_column(c);
        if (row < args.m && column < args.n) body(part.at[r][c], row * args.c_row + column, column);
      }
    }
  };
  if (args.accumulate != 0)
    for_results([&](float& x, int64_t at, int64_t) { x = load_any(args.c, args.c_dtype, at); });
  multiply_tiles<kAAlongDepth, kBAlongDepth>(
      part, args.k, staged,
      [&](int row, int64_t i) {
        const int64_t at = first_row + row;
        return at < args.m ? load_any(args.a, args.a_dtype, at * args.a_row + i * args.a_column) : 0.0f;
      },
      [&](int64_t i, int column) {
        const int64_t at = first_column + column;
        return at < args.n ? load_any(args.b, args.b_dtype, i * args.b_row + at * args.b_column) : 0.0f;
      });
  for_results([&](float x, int64_t at, int64_t column) {
    if (args.bias != nullptr) x = x + load_any(args.bias, args.bias_dtype, column);
    store_any(args.c, args.c_dtype, at, x);
  });
}

bool is_float(int32_t dtype) {
  return with_type(dtype, [](auto) { return cudaSuccess; }) == cudaSuccess;
}

}  // namespace

cudaError_t launch_ordered_gemm(const PolyremeGemm& args, cudaStream_t stream) {
  const bool narrow = args.c_dtype != static_cast<int32_t>(DType::kF32);
  const int64_t tiles = (args.m + kTile - 1) / kTile;
  if (args.m < 0 || args.n < 0 || args.k < 0 || tiles > 65535 || (args.accumulate != 0 && narrow) ||
      !is_float(args.a_dtype) || !is_float(args.b_dtype) || !is_float(args.c_dtype) ||
      (args.bias != nullptr && !is_float(args.bias_dtype)))
    return cudaErrorInvalidValue;
  if (args.m == 0 || args.n == 0) return cudaSuccess;
  const dim3 blocks(static_cast<unsigned>((args.n + kTile - 1) / kTile), static_cast<unsigned>(tiles));
  const bool a_along = args.a_column == 1, b_along = args.b_row == 1;
  void (*kernel)(PolyremeGemm) = a_along   ? b_along ? &gemm_kernel<true, true> : &gemm_kernel<true, false>
                                   : b_along ? &gemm_kernel<false, true>
                                           : &gemm_kernel<false, false>;
  POLYREME_LAUNCH(kernel, blocks, kTileThreads, stream, args);
  return cudaGetLastError();
}

}  // namespace polyreme::kernels
