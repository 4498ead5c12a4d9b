#include <cmath>

#include "ops/check.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/exact.h"
#include "ops/cpu/kernels/optimizer.h"
#include "ops/cuda/launch.h"
#include "ops/update.h"

namespace polyreme {
namespace {

// Coefficients of the quintic x -> a x + b x^3 + c x^5 that draws singular values towards 1 (Jordan et al.
// 2024).
constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;
constexpr int kSteps = 5;
constexpr double kTiny = 1e-7;  // a matrix of zeros stays one

// out = a x + b y
void weighted_sum(Stream& stream, float a, const Tensor& x, float b, const Tensor& y, const Tensor& out) {
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "weighted_sum", {x, y, out}, &PolyremeCudaTable::weighted_sum,
                  {.x = x.address<float>(),
                   .y = y.address<float>(),
                   .out = out.address<float>(),
                   .a = a,
                   .b = b,
                   .count = out.numel()});
  const float* const x_data = x.address<float>();
  const float* const y_data = y.address<float>();
  float* const out_data = out.address<float>();
  as_cpu(stream).enqueue({"weighted_sum", OpKind::kOptimizer}, {reads(x), reads(y), writes(out)},
                         [=, n = out.numel()](const CpuContext& context) {
                           const auto kernel =
                               pick(context.isa, cpu::avx2::weighted_sum, cpu::avx512::weighted_sum);
                           for_ranges(context.pool, n, kGrain, [=](int64_t begin, int64_t end) {
                             kernel(a, x_data + begin, b, y_data + begin, out_data + begin, end - begin);
                           });
                         });
}

// x /= its Frobenius norm, which `limbs` holds the square of.
void normalize(Stream& stream, const Tensor& x, const Tensor& limbs) {
  float* const data = x.address<float>();
  const int64_t* const sum = limbs.address<int64_t>();
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "normalize", {x, limbs}, &PolyremeCudaTable::weighted_sum,
                  {.x = data, .out = data, .limbs = sum, .tiny = kTiny, .count = x.numel()});
  as_cpu(stream).enqueue(
      {"normalize", OpKind::kOptimizer}, {reads(x), reads(limbs), writes(x)},
      [=, n = x.numel()](const CpuContext& context) {
        const auto factor = static_cast<float>(1.0 / (std::sqrt(load_sum(sum).value()) + kTiny));
        const auto kernel = pick(context.isa, cpu::avx2::weighted_sum, cpu::avx512::weighted_sum);
        for_ranges(context.pool, n, kGrain, [=](int64_t begin, int64_t end) {
          kernel(factor, data + begin, 0.0f, nullptr, data + begin, end - begin);
        });
      });
}

}  // namespace

void muon_momentum(Stream& stream, const Tensor& grad, const Tensor& m, const Tensor& scale, double momentum,
                   const Tensor& out) {
  constexpr const char* kOp = "muon_momentum";
  check_dense({kOp, "grad"}, grad);
  check_dense({kOp, "m"}, m, grad.shape());
  check_dense({kOp, "out"}, out, grad.shape());
  check_dense({kOp, "scale"}, scale, {1});
  for (const auto& [name, other] : {std::pair{"m", &m}, {"out", &out}})
    check_apart({kOp, name}, *other, grad);
  check_apart({kOp, "out"}, out, m);
  require(momentum >= 0 && momentum < 1, kOp, ": momentum: expected 0 <= momentum < 1, got ", momentum);
  const cpu::MomentumArgs args = {.grad = grad.address<float>(),
                                  .m = m.address<float>(),
                                  .out = out.address<float>(),
                                  .scale = 1.0f,  // read when the operation runs
                                  .new_m = static_cast<float>(1.0 - momentum),
                                  .momentum = static_cast<float>(momentum)};
  const float* const scale_value = scale.address<float>();
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {grad, m, scale, out}, &PolyremeCudaTable::muon_momentum,
                  {.grad = args.grad,
                   .m = args.m,
                   .out = args.out,
                   .scale = scale_value,
                   .new_m = args.new_m,
                   .momentum = args.momentum,
                   .count = grad.numel()});
  as_cpu(stream).enqueue(
      {kOp, OpKind::kOptimizer}, {reads(grad), reads(scale), reads(m), writes(m), writes(out)},
      [=, n = grad.numel()](const CpuContext& context) {
        if (std::isnan(*scale_value)) {
          std::fill(args.out, args.out + n, 0.0f);
          return;
        }
        cpu::MomentumArgs now = args;
        now.scale = *scale_value;
        const auto kernel = pick(context.isa, cpu::avx2::muon_momentum, cpu::avx512::muon_momentum);
        for_ranges(context.pool, n, kGrain, [&](int64_t begin, int64_t end) { kernel(now, begin, end); });
      });
}

void orthogonalize(Stream& stream, const Tensor& x) {
  check_rows({"orthogonalize", "x"}, x);
  if (x.numel() == 0) return;
  Device& device = stream.device();
  const Tensor limbs = empty(device, DType::kI64, {ExactSum::kLimbs}, "squared norm");
  zero_limbs(stream, limbs);
  exact_sum_squares(stream, x, limbs);
  normalize(stream, x, limbs);
  // With the Gram matrix G of the shorter side, x -> a x + (b G + c G^2) x; for a tall matrix from the right.
  const bool tall = x.size(0) > x.size(1);
  const int64_t side = std::min(x.size(0), x.size(1));
  const Tensor gram = empty(device, DType::kF32, {side, side}, "gram matrix");
  const Tensor poly = empty(device, DType::kF32, {side, side}, "gram polynomial");
  const Tensor next = empty(device, DType::kF32, x.shape(), "orthogonalized");
  for (int step = 0; step < kSteps; ++step) {
    const Tensor& from = step % 2 == 0 ? x : next;
    const Tensor& to = step % 2 == 0 ? next : x;
    const Tensor turned = from.transpose(0, 1);
    gemm(stream, tall ? turned : from, tall ? from : turned, gram, /*accumulate=*/false);
    gemm(stream, gram, gram, poly, /*accumulate=*/false);
    weighted_sum(stream, kB, gram, kC, poly, poly);
    weighted_sum(stream, kA, from, 0.0f, from, to);
    gemm(stream, tall ? from : poly, tall ? poly : from, to, /*accumulate=*/true);
  }
  static_assert(kSteps % 2 == 1, "the last step leaves its result in `next`");
  copy(stream, next, x);
}

void muon_apply(Stream& stream, const Tensor& param, const Tensor& direction, const Tensor& scale,
                const MuonOptions& options) {
  constexpr const char* kOp = "muon_apply";
  check_dense({kOp, "param"}, param);
  check_dense({kOp, "direction"}, direction, param.shape());
  check_apart({kOp, "direction"}, direction, param);
  check_dense({kOp, "scale"}, scale, {1});
  require(options.lr >= 0 && std::isfinite(options.lr), kOp,
          ": lr: expected a finite number, 0 or more, got ", options.lr);
  const auto keep = static_cast<float>(1.0 - options.lr * options.weight_decay);
  const auto step = static_cast<float>(-options.lr * options.factor);
  float* const data = param.address<float>();
  const float* const towards = direction.address<float>();
  const float* const scale_value = scale.address<float>();
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, kOp, {param, direction, scale}, &PolyremeCudaTable::weighted_sum,
                  {.x = data,
                   .y = towards,
                   .out = data,
                   .scale = scale_value,
                   .a = keep,
                   .b = step,
                   .count = param.numel()});
  as_cpu(stream).enqueue(
      {kOp, OpKind::kOptimizer}, {reads(param), writes(param), reads(direction), reads(scale)},
      [=, n = param.numel()](const CpuContext& context) {
        if (std::isnan(*scale_value)) return;
        const auto kernel = pick(context.isa, cpu::avx2::weighted_sum, cpu::avx512::weighted_sum);
        for_ranges(context.pool, n, kGrain, [=](int64_t begin, int64_t end) {
          kernel(keep, data + begin, step, towards + begin, data + begin, end - begin);
        });
      });
}

}  // namespace polyreme
