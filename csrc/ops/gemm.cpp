#include "ops/cpu/kernels/gemm.h"
#include "ops/check.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/enqueue.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

// A matrix whose rows or columns are contiguous, so that the kernel can pack it with vector loads.
void check_operand(ArgName name, const Tensor& matrix) {
  const bool fits = matrix.defined() && is_float(matrix.dtype()) && matrix.dims() == 2 &&
                    (matrix.stride(0) == 1 || matrix.stride(1) == 1);
  if (!fits) [[unlikely]]
    throw InvalidArgument(
        concat(name.op, ": ", name.argument,
               ": expected a float32, bfloat16 or float16 matrix with one stride of 1, got ",
               matrix.defined() ? matrix.to_string() : "an undefined tensor",
               matrix.defined() ? " with strides " + matrix.strides().to_string() : ""));
}

bool uses_tiles(Isa isa, const cpu::GemmArgs& args) {
  using cpu::Element;
  return isa == Isa::kAmx && args.k > 0 && args.a_type == Element::kBF16 && args.b_type == Element::kBF16 &&
         args.c_type != Element::kF16;
}

}  // namespace

void gemm(Stream& stream, const Tensor& a, const Tensor& b, const Tensor& c, bool accumulate,
          const Tensor& bias, int64_t k_unit) {
  check_operand({"gemm", "a"}, a);
  check_operand({"gemm", "b"}, b);
  check_operand({"gemm", "c"}, c);
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  if (b.size(0) != k || c.size(0) != m || c.size(1) != n) [[unlikely]]
    throw InvalidArgument(concat("gemm: expected a[m,k] x b[k,n] = c[m,n], got a ", a.to_string(), ", b ",
                                 b.to_string(), ", c ", c.to_string()));
  // A row of its own may have any distance to the next one, but must be contiguous.
  if ((n > 1 && c.stride(1) != 1) || (m > 1 && c.stride(0) < n)) [[unlikely]]
    throw InvalidArgument(concat("gemm: c: expected contiguous rows, got ", c.to_string(), " with strides ",
                                 c.strides().to_string()));
  require(!accumulate || c.dtype() == DType::kF32, "gemm: c: expected float32 to accumulate into, got ", c,
          "; a 16-bit sum loses what is small beside it, so accumulate in float32 and cast");
  require(k_unit >= 0, "gemm: k_unit: expected 0 or more, got ", k_unit);
  check_apart({"gemm", "c"}, c, a);
  check_apart({"gemm", "c"}, c, b);
  std::vector<Access> accesses = {reads(a), reads(b), writes(c)};
  if (bias.defined()) {
    check_float({"gemm", "bias"}, bias);
    check_dense({"gemm", "bias"}, bias, {n}, bias.dtype());
    check_apart({"gemm", "c"}, c, bias);
    accesses.push_back(reads(bias));
  }

  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "gemm", {a, b, c, bias}, &PolyremeCudaTable::ordered_gemm,
                  {.a = a.raw_address(),
                   .b = b.raw_address(),
                   .c = c.raw_address(),
                   .bias = bias.defined() ? bias.raw_address() : nullptr,
                   .m = m,
                   .n = n,
                   .k = k,
                   .a_row = a.stride(0),
                   .a_column = a.stride(1),
                   .b_row = b.stride(0),
                   .b_column = b.stride(1),
                   .c_row = c.stride(0),
                   .accumulate = accumulate,
                   .a_dtype = dtype_code(a),
                   .b_dtype = dtype_code(b),
                   .c_dtype = dtype_code(c),
                   .bias_dtype = bias.defined() ? dtype_code(bias) : 0});
  cpu::GemmArgs args{};
  args.m = m;
  args.n = n;
  args.k = k;
  args.a = a.raw_address();
  args.a_type = element_of(a);
  args.a_row_stride = a.stride(0);
  args.a_col_stride = a.stride(1);
  args.b = b.raw_address();
  args.b_type = element_of(b);
  args.b_row_stride = b.stride(0);
  args.b_col_stride = b.stride(1);
  args.c = c.raw_address();
  args.c_type = element_of(c);
  args.c_row_stride = c.stride(0);
  args.accumulate = accumulate;
  args.k_unit = k_unit;
  const ElementPointer bias_row = bias.defined() ? ElementPointer(bias) : ElementPointer();
  const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  as_cpu(stream).enqueue({"gemm", OpKind::kGemm, flops}, std::move(accesses),
                         [args, bias_row](const CpuContext& context) {
                           const WideRow wide_bias(context.isa, bias_row, args.n);
                           cpu::GemmArgs now = args;
                           now.bias = wide_bias.data();
                           if (uses_tiles(context.isa, now))
                             cpu::amx::gemm_bf16(now, context.pool);
                           else
                             pick(context.isa, cpu::avx2::gemm_f32, cpu::avx512::gemm_f32)(now, context.pool);
                         });
}

}  // namespace polyreme
