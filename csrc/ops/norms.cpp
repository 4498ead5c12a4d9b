#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "ops/check.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/exact.h"
#include "ops/cuda/launch.h"
#include "ops/update.h"

namespace polyreme {
namespace {

void check_order(const char* op, double p) {
  require(p >= 1, op, ": p: expected a norm of order 1 or more (infinity is allowed), got ", p);
}

double power(double x, double p) {
  if (p == 3) return x * x * x;
  return p == 4 ? (x * x) * (x * x) : std::pow(x, p);
}

// |x| as a number that orders like it, with NaN above infinity.
int64_t magnitude_bits(float x) { return std::bit_cast<int64_t>(std::abs(static_cast<double>(x))); }

void enqueue_max(Stream& stream, const Tensor& x, const Tensor& sums) {
  const float* const values = x.address<float>();
  int64_t* const out = sums.address<int64_t>();
  as_cpu(stream).enqueue({"add_to_norm"}, {reads(x), reads(sums), writes(sums)},
                         [=, n = x.numel()](const CpuContext& context) {
                           std::mutex mutex;
                           for_ranges(context.pool, n, kGrain, [&](int64_t begin, int64_t end) {
                             int64_t largest = 0;
                             for (int64_t i = begin; i < end; ++i)
                               largest = std::max(largest, magnitude_bits(values[i]));
                             const std::lock_guard lock(mutex);
                             *out = std::max(*out, largest);
                           });
                         });
}

// Blocks of kNormBlock elements: block_sum(first, count) is added exactly.
template <typename BlockSum>
void enqueue_blocks(Stream& stream, const Tensor& x, const Tensor& sums, BlockSum block_sum) {
  const float* const values = x.address<float>();
  int64_t* const limbs = sums.address<int64_t>();
  as_cpu(stream).enqueue(
      {"add_to_norm"}, {reads(x), reads(sums), writes(sums)}, [=, n = x.numel()](const CpuContext& context) {
        add_exactly<1>(context.pool, ceil_div(n, kNormBlock), kGrain / kNormBlock, limbs,
                       [=](std::array<ExactSum, 1>& sum, int64_t first_block, int64_t end_block) {
                         for (int64_t block = first_block; block < end_block; ++block) {
                           const int64_t begin = block * kNormBlock;
                           block_sum(sum[0], values + begin, std::min(kNormBlock, n - begin));
                         }
                       });
      });
}

}  // namespace

Shape norm_shape(double p) {
  check_order("norm_shape", p);
  return {std::isinf(p) ? 1 : ExactSum::kLimbs};
}

void add_to_norm(Stream& stream, const Tensor& x, double p, const Tensor& sums) {
  constexpr const char* kOp = "add_to_norm";
  check_order(kOp, p);
  check_dense({kOp, "x"}, x);
  check_dense({kOp, "sums"}, sums, norm_shape(p), DType::kI64);
  if (p == 2) {
    exact_sum_squares(stream, x, sums);
  } else if (std::isinf(p)) {
    enqueue_max(stream, x, sums);
  } else if (p == 1) {
    enqueue_blocks(stream, x, sums, [](ExactSum& sum, const float* values, int64_t count) {
      for (int64_t i = 0; i < count; ++i) sum.add(std::abs(static_cast<double>(values[i])));
    });
  } else {
    enqueue_blocks(stream, x, sums, [p](ExactSum& sum, const float* values, int64_t count) {
      double block = 0;
      for (int64_t i = 0; i < count; ++i) block += power(std::abs(static_cast<double>(values[i])), p);
      sum.add(block);
    });
  }
}

double norm_value(std::span<const int64_t> sums, double p) {
  require(static_cast<int64_t>(sums.size()) == norm_shape(p).numel(), "norm_value: expected ",
          norm_shape(p).numel(), " sums for a norm of order ", p, ", got ", sums.size());
  if (std::isinf(p)) return std::bit_cast<double>(sums[0]);
  const double sum = load_sum(sums.data()).value();
  if (p == 1) return sum;
  return p == 2 ? std::sqrt(sum) : std::pow(sum, 1.0 / p);
}

void clip_scale(Stream& stream, const Tensor& sums, float max_norm, const Tensor& scale, double multiplier,
                double p) {
  constexpr const char* kOp = "clip_scale";
  check_order(kOp, p);
  check_dense({kOp, "sums"}, sums, norm_shape(p), DType::kI64);
  check_dense({kOp, "scale"}, scale);
  require(scale.numel() == 1, kOp, ": scale: expected one element, got ", scale.numel());
  require(!std::isnan(max_norm), kOp, ": max_norm: expected a number, got NaN");
  require(multiplier > 0 && std::isfinite(multiplier), kOp,
          ": multiplier: expected a finite number above 0, got ", multiplier);
  const int64_t* const data = sums.address<int64_t>();
  float* const out = scale.address<float>();
  if (CudaStream* const gpu = gpu_stream(stream); gpu != nullptr && p == 2.0)
    return launch(*gpu, kOp, {sums, scale}, &PolyremeCudaTable::clip_scale,
                  {.limbs = data, .scale = out, .multiplier = multiplier, .max_norm = max_norm});
  as_cpu(stream).enqueue({kOp}, {reads(sums), writes(scale)}, [=, n = sums.numel()](const CpuContext&) {
    const double norm = norm_value({data, static_cast<size_t>(n)}, p) * multiplier;
    const double limit = static_cast<double>(max_norm);
    const double clip = limit > 0 && norm > limit ? limit / norm : 1.0;
    *out =
        std::isfinite(norm) ? static_cast<float>(multiplier * clip) : std::numeric_limits<float>::quiet_NaN();
  });
}

}  // namespace polyreme
