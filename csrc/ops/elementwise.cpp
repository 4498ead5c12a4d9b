#include <cmath>
#include <cstring>

#include "ops/check.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/kernels/elementwise.h"
#include "ops/cpu/kernels/layer_norm.h"
#include "ops/cpu/kernels/random.h"
#include "ops/cpu/ranges.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

using Unary = void(cpu::Element type, const void* x, void* y, int64_t n);
using Binary = void(cpu::Element type, const void* x, const void* y, void* out, int64_t n);

void check_output(const char* op, const char* argument, const Tensor& out, const Tensor& in) {
  check_dense({op, argument}, out, in.shape(), in.dtype());
  check_in_place_or_apart({op, argument}, out, in);
}

void check_first_element(const char* op, int64_t first_element) {
  require(first_element >= 0, op, ": first_element: expected 0 or more, got ", first_element);
}

PolyremeElementwise elementwise_args(const Tensor& x, const Tensor& y, const Tensor& out) {
  return {.x = x.raw_address(),
          .y = y.defined() ? y.raw_address() : nullptr,
          .out = out.raw_address(),
          .count = out.numel(),
          .dtype = dtype_code(out)};
}

PolyremeRandomKey key_args(const RandomKey& key) {
  return {key.seed, static_cast<uint32_t>(key.purpose), key.stream, key.step};
}

void enqueue_binary(Stream& stream, const char* name, const Tensor& x, const Tensor& y, const Tensor& out,
                    Binary* avx2, Binary* avx512, Kernel<PolyremeElementwise> kernel_of_gpu) {
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, name, {x, y, out}, kernel_of_gpu, elementwise_args(x, y, out));
  const ElementPointer x_data(x), y_data(y), out_data(out);
  const int64_t n = out.numel();
  as_cpu(stream).enqueue(
      {name, OpKind::kElementwise}, {reads(x), reads(y), writes(out)}, [=](const CpuContext& context) {
        Binary* const kernel = pick(context.isa, avx2, avx512);
        for_ranges(context.pool, n, kGrain, [=](int64_t begin, int64_t end) {
          kernel(x_data.type, x_data + begin, y_data + begin, out_data + begin, end - begin);
        });
      });
}

}  // namespace

void add(Stream& stream, const Tensor& x, const Tensor& y, const Tensor& out) {
  check_float({"add", "x"}, x);
  check_dense({"add", "y"}, y, x.shape(), x.dtype());
  check_output("add", "out", out, x);
  check_in_place_or_apart({"add", "out"}, out, y);
  enqueue_binary(stream, "add", x, y, out, cpu::avx2::add, cpu::avx512::add, &PolyremeCudaTable::add);
}

void cast(Stream& stream, const Tensor& from, const Tensor& to) {
  check_float({"cast", "from"}, from);
  check_float({"cast", "to"}, to);
  check_dense({"cast", "to"}, to, from.shape(), to.dtype());
  check_apart({"cast", "to"}, to, from);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "cast", {from, to}, &PolyremeCudaTable::cast,
                  {.from = from.raw_address(),
                   .to = to.raw_address(),
                   .count = from.numel(),
                   .from_dtype = dtype_code(from),
                   .to_dtype = dtype_code(to)});
  const ElementPointer source(from), target(to);
  as_cpu(stream).enqueue({"cast", OpKind::kElementwise}, {reads(from), writes(to)},
                         [=, n = from.numel()](const CpuContext& context) {
                           const auto kernel = pick(context.isa, cpu::avx2::cast, cpu::avx512::cast);
                           for_ranges(context.pool, n, kGrain, [=](int64_t begin, int64_t end) {
                             kernel(source.type, source + begin, target.type, target + begin, end - begin);
                           });
                         });
}

void gelu_forward(Stream& stream, const Tensor& x, const Tensor& y) {
  check_float({"gelu_forward", "x"}, x);
  check_output("gelu_forward", "y", y, x);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "gelu_forward", {x, y}, &PolyremeCudaTable::gelu_forward, elementwise_args(x, {}, y));
  const ElementPointer from(x), to(y);
  as_cpu(stream).enqueue({"gelu_forward", OpKind::kElementwise}, {reads(x), writes(y)},
                         [=, n = x.numel()](const CpuContext& context) {
                           Unary* const kernel =
                               pick(context.isa, cpu::avx2::gelu_forward, cpu::avx512::gelu_forward);
                           for_ranges(context.pool, n, kGrain, [=](int64_t begin, int64_t end) {
                             kernel(from.type, from + begin, to + begin, end - begin);
                           });
                         });
}

void gelu_backward(Stream& stream, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  check_float({"gelu_backward", "x"}, x);
  check_dense({"gelu_backward", "dy"}, dy, x.shape(), x.dtype());
  check_output("gelu_backward", "dx", dx, x);
  check_in_place_or_apart({"gelu_backward", "dx"}, dx, dy);
  enqueue_binary(stream, "gelu_backward", x, dy, dx, cpu::avx2::gelu_backward, cpu::avx512::gelu_backward,
                 &PolyremeCudaTable::gelu_backward);
}

void dropout(Stream& stream, const Tensor& x, const Tensor& y, float p, const RandomKey& key,
             int64_t first_element) {
  check_float({"dropout", "x"}, x);
  check_output("dropout", "y", y, x);
  require(p >= 0.0f && p < 1.0f, "dropout: p: expected 0 <= p < 1, got ", p);
  check_first_element("dropout", first_element);
  // An element is kept if its word is at least p * 2^32: all are when p is 0.
  const double p_exact = p;
  const cpu::DropoutRule rule = {static_cast<uint32_t>(std::ceil(p_exact * 0x1p32)),
                                 static_cast<float>(1.0 / (1.0 - p_exact))};
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "dropout", {x, y}, &PolyremeCudaTable::dropout,
                  {.x = x.raw_address(),
                   .y = y.raw_address(),
                   .count = x.numel(),
                   .first_element = first_element,
                   .key = key_args(key),
                   .threshold = rule.threshold,
                   .keep_scale = rule.keep_scale,
                   .dtype = dtype_code(x)});
  const ElementPointer from(x), to(y);
  const auto element_bytes = static_cast<int64_t>(dtype_size(x.dtype()));
  const auto first = static_cast<uint64_t>(first_element);
  as_cpu(stream).enqueue({"dropout", OpKind::kElementwise}, {reads(x), writes(y)},
                         [=, n = x.numel()](const CpuContext& context) {
                           const auto kernel = pick(context.isa, cpu::avx2::dropout, cpu::avx512::dropout);
                           for_ranges(context.pool, n, kGrain, [&](int64_t begin, int64_t end) {
                             if (rule.threshold != 0) {
                               kernel(from.type, from + begin, to + begin, end - begin, key,
                                      first + static_cast<uint64_t>(begin), rule);
                             } else if (to.data != from.data) {
                               std::memcpy(to + begin, from + begin,
                                           static_cast<size_t>((end - begin) * element_bytes));
                             }
                           });
                         });
}

void round_stochastic(Stream& stream, const Tensor& from, const Tensor& to, const RandomKey& key,
                      int64_t first_element) {
  check_dense({"round_stochastic", "from"}, from);
  check_dense({"round_stochastic", "to"}, to, from.shape(), DType::kBF16);
  check_apart({"round_stochastic", "to"}, to, from);
  check_first_element("round_stochastic", first_element);
  const float* const x = from.address<float>();
  const ElementPointer y(to);
  const auto first = static_cast<uint64_t>(first_element);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "round_stochastic", {from, to}, &PolyremeCudaTable::round_stochastic,
                  {.x = x,
                   .y = to.raw_address(),
                   .count = from.numel(),
                   .first_element = first_element,
                   .key = key_args(key)});
  as_cpu(stream).enqueue(
      {"round_stochastic", OpKind::kElementwise}, {reads(from), writes(to)},
      [=, n = from.numel()](const CpuContext& context) {
        const auto kernel = pick(context.isa, cpu::avx2::round_stochastic, cpu::avx512::round_stochastic);
        for_ranges(context.pool, n, kGrain, [&](int64_t begin, int64_t end) {
          kernel(x + begin, y + begin, end - begin, key, first + static_cast<uint64_t>(begin));
        });
      });
}

void fill_normal(Stream& stream, const Tensor& out, float std, const RandomKey& key, int64_t first_element) {
  check_dense({"fill_normal", "out"}, out);
  require(std >= 0.0f && std::isfinite(std), "fill_normal: std: expected a finite number, 0 or more, got ",
          std);
  check_first_element("fill_normal", first_element);
  float* const data = out.address<float>();
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "fill_normal", {out}, &PolyremeCudaTable::fill_normal,
                  {.out = data,
                   .count = out.numel(),
                   .first_element = first_element,
                   .key = key_args(key),
                   .std = std});
  const auto first = static_cast<uint64_t>(first_element);
  as_cpu(stream).enqueue(
      {"fill_normal", OpKind::kElementwise}, {writes(out)}, [=, n = out.numel()](const CpuContext& context) {
        const auto kernel = pick(context.isa, cpu::avx2::fill_normal, cpu::avx512::fill_normal);
        for_ranges(context.pool, n, kGrain, [&](int64_t begin, int64_t end) {
          kernel(data + begin, end - begin, key, first + static_cast<uint64_t>(begin), std);
        });
      });
}

void accumulate_rows(Stream& stream, const Tensor& x, const Tensor& out) {
  check_float_rows({"accumulate_rows", "x"}, x);
  check_dense({"accumulate_rows", "out"}, out, {x.size(1)});
  check_apart({"accumulate_rows", "out"}, out, x);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "accumulate_rows", {x, out}, &PolyremeCudaTable::accumulate_rows,
                  {.x = x.raw_address(),
                   .out = out.address<float>(),
                   .rows = x.size(0),
                   .cols = x.size(1),
                   .dtype = dtype_code(x)});
  const cpu::AccumulateRows args = {.rows = x.size(0),
                                    .cols = x.size(1),
                                    .type = element_of(x),
                                    .x = x.raw_address(),
                                    .out = out.address<float>()};
  as_cpu(stream).enqueue({"accumulate_rows", OpKind::kElementwise}, {reads(x), reads(out), writes(out)},
                         [args](const CpuContext& context) {
                           const auto kernel =
                               pick(context.isa, cpu::avx2::accumulate_rows, cpu::avx512::accumulate_rows);
                           for_column_ranges(context.pool, args.cols,
                                             [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
                         });
}

}  // namespace polyreme
