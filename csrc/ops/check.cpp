#include "ops/check.h"

namespace polyreme {
namespace {

[[noreturn]] void fail(ArgName name, const Tensor& got, const std::string& expected) {
  std::string text = "an undefined tensor";
  if (got.defined()) text = got.to_string();
  if (got.defined() && !got.is_contiguous()) text += concat(" with strides ", got.strides().to_string());
  throw InvalidArgument(concat(name.op, ": ", name.argument, ": expected ", expected, ", got ", text));
}

bool is_dense(const Tensor& tensor, DType dtype) {
  return tensor.defined() && tensor.dtype() == dtype && tensor.is_contiguous();
}

bool overlap(const Tensor& a, const Tensor& b) {
  return a.buffer() == b.buffer() && a.begin_byte() < b.end_byte() && b.begin_byte() < a.end_byte();
}

}  // namespace

void check_dense(ArgName name, const Tensor& tensor, DType dtype) {
  if (!is_dense(tensor, dtype)) [[unlikely]]
    fail(name, tensor, concat("a contiguous ", dtype_name(dtype), " tensor"));
}

void check_float(ArgName name, const Tensor& tensor) {
  if (!tensor.defined() || !is_float(tensor.dtype()) || !tensor.is_contiguous()) [[unlikely]]
    fail(name, tensor, "a contiguous float32, bfloat16 or float16 tensor");
}

void check_dense(ArgName name, const Tensor& tensor, const Shape& shape, DType dtype) {
  if (!is_dense(tensor, dtype) || !(tensor.shape() == shape)) [[unlikely]]
    fail(name, tensor, concat("contiguous ", dtype_name(dtype), shape.to_string()));
}

void check_rows(ArgName name, const Tensor& tensor, int dims, DType dtype) {
  bool fits = is_dense(tensor, dtype) && tensor.dims() == dims;
  for (int dim = 1; fits && dim < dims; ++dim) fits = tensor.size(dim) > 0;
  if (!fits) [[unlikely]]
    fail(name, tensor, concat("a contiguous ", dtype_name(dtype), " tensor of ", dims, " dims with columns"));
}

void check_float_rows(ArgName name, const Tensor& tensor, int dims) {
  check_float(name, tensor);
  check_rows(name, tensor, dims, tensor.dtype());
}

void check_in_place_or_apart(ArgName name, const Tensor& out, const Tensor& in) {
  if (overlap(out, in) && out.begin_byte() != in.begin_byte()) [[unlikely]]
    throw InvalidArgument(
        concat(name.op, ": ", name.argument,
               ": expected the very memory of an input or none of it, got a view shifted by ",
               out.begin_byte() - in.begin_byte(), " bytes"));
}

void check_apart(ArgName name, const Tensor& out, const Tensor& in) {
  if (overlap(out, in)) [[unlikely]]
    throw InvalidArgument(concat(name.op, ": ", name.argument,
                                 ": expected memory apart from the inputs, got ", out.to_string(),
                                 " that overlaps ", in.to_string()));
}

}  // namespace polyreme
