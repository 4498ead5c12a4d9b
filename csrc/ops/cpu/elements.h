#pragma once

#include <vector>

#include "ops/cpu/enqueue.h"
#include "ops/cpu/kernels/elementwise.h"

namespace polyreme {

// The storage format of a tensor that check_float has let pass.
inline cpu::Element element_of(const Tensor& tensor) {
  switch (tensor.dtype()) {
    case DType::kF32:
      return cpu::Element::kF32;
    case DType::kBF16:
      return cpu::Element::kBF16;
    case DType::kF16:
      return cpu::Element::kF16;
    default:
      throw InvalidArgument(concat("expected float32, bfloat16 or float16, got ", tensor));
  }
}

// Where elements of some format lie.
struct ElementPointer {
  void* data = nullptr;
  cpu::Element type = cpu::Element::kF32;

  ElementPointer() = default;
  ElementPointer(void* data_in, cpu::Element type_in) : data(data_in), type(type_in) {}
  explicit ElementPointer(const Tensor& tensor) : data(tensor.raw_address()), type(element_of(tensor)) {}
  void* operator+(int64_t index) const {
    return static_cast<char*>(data) + index * (type == cpu::Element::kF32 ? 4 : 2);
  }
};

// `count` elements as fp32: the row itself where it is, else a copy. For short rows of parameters that an
// operation reads many times.
class WideRow {
 public:
  WideRow(Isa isa, const ElementPointer& row, int64_t count) : data_(static_cast<const float*>(row.data)) {
    if (row.data == nullptr || row.type == cpu::Element::kF32) return;
    copy_.resize(static_cast<size_t>(count));
    pick(isa, cpu::avx2::cast, cpu::avx512::cast)(row.type, row.data, cpu::Element::kF32, copy_.data(),
                                                  count);
    data_ = copy_.data();
  }
  const float* data() const { return data_; }

 private:
  const float* data_;
  std::vector<float> copy_;
};

}  // namespace polyreme
