#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "ops/check.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/kernels/sum_squares.h"
#include "ops/cpu/ranges.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

void check_limbs(ArgName name, const Tensor& limbs) {
  check_dense(name, limbs, {ExactSum::kLimbs}, DType::kI64);
}

ExactSum load_sum(const int64_t* limbs) {
  return ExactSum(std::span<const int64_t, ExactSum::kLimbs>(limbs, ExactSum::kLimbs));
}

// Adds to `limbs` what add_range(sum, begin, end) adds for pieces of [0, count). Pieces are added as
// threads finish them: an exact sum has no order.
template <typename AddRange>
void accumulate(ThreadPool& pool, int64_t count, int64_t grain, int64_t* limbs, AddRange&& add_range) {
  ExactSum total = load_sum(limbs);
  std::mutex mutex;
  for_ranges(pool, count, grain, [&](int64_t begin, int64_t end) {
    ExactSum piece;
    add_range(piece, begin, end);
    const std::lock_guard lock(mutex);
    total.add(piece);
  });
  const ExactSum::Limbs canonical = total.canonical_limbs();
  std::memcpy(limbs, canonical.data(), sizeof(canonical));
}

}  // namespace

void zero_limbs(Stream& stream, const Tensor& limbs) {
  check_limbs({"zero_limbs", "limbs"}, limbs);
  int64_t* const data = limbs.address<int64_t>();
  as_cpu(stream).enqueue({"zero_limbs"}, {writes(limbs)}, [=](const CpuContext&) {
    std::memset(data, 0, ExactSum::kLimbs * sizeof(int64_t));
  });
}

void exact_sum(Stream& stream, const Tensor& x, const Tensor& limbs) {
  check_dense({"exact_sum", "x"}, x);
  check_limbs({"exact_sum", "limbs"}, limbs);
  const float* const values = x.address<float>();
  int64_t* const data = limbs.address<int64_t>();
  as_cpu(stream).enqueue(
      {"exact_sum"}, {reads(x), reads(limbs), writes(limbs)}, [=, n = x.numel()](const CpuContext& context) {
        accumulate(context.pool, n, kGrain, data, [=](ExactSum& sum, int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) sum.add(static_cast<double>(values[i]));
        });
      });
}

void exact_sum_squares(Stream& stream, const Tensor& x, const Tensor& limbs) {
  check_dense({"exact_sum_squares", "x"}, x);
  check_limbs({"exact_sum_squares", "limbs"}, limbs);
  const float* const values = x.address<float>();
  int64_t* const data = limbs.address<int64_t>();
  as_cpu(stream).enqueue({"exact_sum_squares"}, {reads(x), reads(limbs), writes(limbs)},
                         [=, n = x.numel()](const CpuContext& context) {
                           const auto kernel =
                               pick(context.isa, cpu::avx2::sum_squares, cpu::avx512::sum_squares);
                           constexpr int64_t kBlocks = 4 * kGrain / kNormBlock;  // of one task
                           accumulate(context.pool, ceil_div(n, kNormBlock), kBlocks, data,
                                      [=](ExactSum& sum, int64_t first_block, int64_t end_block) {
                                        for (int64_t block = first_block; block < end_block; ++block) {
                                          const int64_t begin = block * kNormBlock;
                                          sum.add(kernel(values + begin, std::min(kNormBlock, n - begin)));
                                        }
                                      });
                         });
}

void clip_scale(Stream& stream, const Tensor& sum_squares_limbs, float max_norm, const Tensor& scale) {
  check_limbs({"clip_scale", "sum_squares_limbs"}, sum_squares_limbs);
  check_dense({"clip_scale", "scale"}, scale);
  require(scale.numel() == 1, "clip_scale: scale: expected one element, got ", scale.numel());
  require(!std::isnan(max_norm), "clip_scale: max_norm: expected a number, got NaN");
  const int64_t* const limbs = sum_squares_limbs.address<int64_t>();
  float* const out = scale.address<float>();
  as_cpu(stream).enqueue({"clip_scale"}, {reads(sum_squares_limbs), writes(scale)}, [=](const CpuContext&) {
    const double norm = std::sqrt(load_sum(limbs).value());
    const double limit = static_cast<double>(max_norm);
    if (!std::isfinite(norm)) {
      *out = std::numeric_limits<float>::quiet_NaN();
    } else {
      *out = limit > 0 && norm > limit ? static_cast<float>(limit / norm) : 1.0f;
    }
  });
}

}  // namespace polyreme
