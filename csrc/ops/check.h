#pragma once

#include "tensor/tensor.h"

// Argument checks of the operations. Each throws InvalidArgument that names the operation, the
// argument, what was expected and what came; a check that passes builds no text.

namespace polyreme {

// Names an argument in messages: {"gemm", "bias"}.
struct ArgName {
  const char* op;
  const char* argument;
};

// float32, bfloat16 or float16: what operations take as F.
constexpr bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}
// A contiguous tensor of `dtype`, of any shape.
void check_dense(ArgName name, const Tensor& tensor, DType dtype = DType::kF32);
// A contiguous tensor of float32, bfloat16 or float16, of any shape.
void check_float(ArgName name, const Tensor& tensor);
// A contiguous tensor of `dtype` and exactly `shape`.
void check_dense(ArgName name, const Tensor& tensor, const Shape& shape, DType dtype = DType::kF32);
// A contiguous tensor of `dtype` with `dims` dims, none of them empty after the first (a call for no rows is
// legal, rows without columns are not).
void check_rows(ArgName name, const Tensor& tensor, int dims = 2, DType dtype = DType::kF32);
// The same for float32, bfloat16 or float16.
void check_float_rows(ArgName name, const Tensor& tensor, int dims = 2);
// `out` starts where `in` does, for element-wise use in place, or shares no byte with it.
void check_in_place_or_apart(ArgName name, const Tensor& out, const Tensor& in);
// `out` shares no byte with `in`.
void check_apart(ArgName name, const Tensor& out, const Tensor& in);

}  // namespace polyreme
