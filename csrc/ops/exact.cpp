#include <cstring>

#include "ops/check.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/exact.h"
#include "ops/cpu/kernels/sum_squares.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

void check_limbs(ArgName name, const Tensor& limbs) {
  check_dense(name, limbs, {ExactSum::kLimbs}, DType::kI64);
}

}  // namespace

void zero_limbs(Stream& stream, const Tensor& limbs) {
  check_limbs({"zero_limbs", "limbs"}, limbs);
  int64_t* const data = limbs.address<int64_t>();
  if (CudaStream* const gpu = gpu_stream(stream))  // as floats: all bits are 0
    return launch(*gpu, "zero_limbs", {limbs}, &PolyremeCudaTable::fill,
                  {.out = data,
                   .count = 2 * ExactSum::kLimbs,
                   .value = 0.0f,
                   .dtype = static_cast<int32_t>(DType::kF32)});
  as_cpu(stream).enqueue({"zero_limbs"}, {writes(limbs)}, [=](const CpuContext&) {
    std::memset(data, 0, ExactSum::kLimbs * sizeof(int64_t));
  });
}

void exact_sum(Stream& stream, const Tensor& x, const Tensor& limbs) {
  check_dense({"exact_sum", "x"}, x);
  check_limbs({"exact_sum", "limbs"}, limbs);
  const float* const values = x.address<float>();
  int64_t* const data = limbs.address<int64_t>();
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "exact_sum", {x, limbs}, &PolyremeCudaTable::exact_sum,
                  {.x = values, .limbs = data, .count = x.numel()});
  as_cpu(stream).enqueue({"exact_sum"}, {reads(x), reads(limbs), writes(limbs)},
                         [=, n = x.numel()](const CpuContext& context) {
                           add_exactly<1>(context.pool, n, kGrain, data,
                                          [=](std::array<ExactSum, 1>& sum, int64_t begin, int64_t end) {
                                            for (int64_t i = begin; i < end; ++i)
                                              sum[0].add(static_cast<double>(values[i]));
                                          });
                         });
}

void exact_sum_squares(Stream& stream, const Tensor& x, const Tensor& limbs) {
  check_dense({"exact_sum_squares", "x"}, x);
  check_limbs({"exact_sum_squares", "limbs"}, limbs);
  const float* const values = x.address<float>();
  int64_t* const data = limbs.address<int64_t>();
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "exact_sum_squares", {x, limbs}, &PolyremeCudaTable::gradient_norm,
                  {.grad = x.address<float>(),
                   .scale = nullptr,
                   .overflow = nullptr,
                   .limbs = data,
                   .count = x.numel()});
  as_cpu(stream).enqueue(
      {"exact_sum_squares"}, {reads(x), reads(limbs), writes(limbs)},
      [=, n = x.numel()](const CpuContext& context) {
        const auto kernel = pick(context.isa, cpu::avx2::sum_squares, cpu::avx512::sum_squares);
        constexpr int64_t kBlocks = 4 * kGrain / kNormBlock;  // of one task
        add_exactly<1>(context.pool, ceil_div(n, kNormBlock), kBlocks, data,
                       [=](std::array<ExactSum, 1>& sum, int64_t first_block, int64_t end_block) {
                         for (int64_t block = first_block; block < end_block; ++block) {
                           const int64_t begin = block * kNormBlock;
                           sum[0].add(kernel(values + begin, std::min(kNormBlock, n - begin)));
                         }
                       });
      });
}

}  // namespace polyreme
