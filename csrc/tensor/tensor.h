#pragma once

#include <memory>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "device/device.h"
#include "tensor/shape.h"

namespace polyreme {

// A typed strided view of device memory; copies share the memory. Strides are in elements.
// The memory is dereferenced only inside operations (see Buffer).
class Tensor {
 public:
  Tensor() = default;  // no memory; defined() is false
  // A contiguous view of `buffer` from `offset` elements on. Throws InvalidArgument if it does not fit.
  Tensor(std::shared_ptr<Buffer> buffer, DType dtype, Shape shape, int64_t offset = 0);

  bool defined() const { return buffer_ != nullptr; }
  const std::shared_ptr<Buffer>& buffer() const { return buffer_; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  const Shape& strides() const { return strides_; }
  int dims() const { return shape_.size(); }
  // A negative dim counts from the end.
  int64_t size(int dim) const { return shape_[dim < 0 ? dims() + dim : dim]; }
  int64_t stride(int dim) const { return strides_[dim < 0 ? dims() + dim : dim]; }
  int64_t numel() const { return shape_.numel(); }
  int64_t size_bytes() const { return numel() * static_cast<int64_t>(dtype_size(dtype_)); }
  bool is_contiguous() const;
  // "float32[2, 3]"
  std::string to_string() const;

  // The same elements under another shape. Throws InvalidArgument unless contiguous and of equal count.
  Tensor view(Shape shape) const;
  // Elements [begin, end) of `dim`.
  Tensor slice(int dim, int64_t begin, int64_t end) const;
  // Two dims exchanged; no data moves.
  Tensor transpose(int dim0, int dim1) const;

  // The address of element 0. Throws InvalidArgument if T is not the element type.
  template <typename T>
  T* address() const {
    if (dtype_of<T>() != dtype_) [[unlikely]]
      throw InvalidArgument(concat("expected ", dtype_name(dtype_of<T>()), ", got ", to_string()));
    return static_cast<T*>(raw_address());
  }
  void* raw_address() const;
  // The bytes of the buffer that the view touches: [begin, end).
  int64_t begin_byte() const { return offset_ * static_cast<int64_t>(dtype_size(dtype_)); }
  int64_t end_byte() const;

 private:
  std::shared_ptr<Buffer> buffer_;
  DType dtype_ = DType::kF32;
  Shape shape_;
  Shape strides_;
  int64_t offset_ = 0;
};

// As to_string. Lets a check name a tensor without building the text when it passes.
inline std::ostream& operator<<(std::ostream& out, const Tensor& tensor) { return out << tensor.to_string(); }

// Uninitialised contiguous memory. `label` is a string literal. Throws OutOfMemory.
Tensor empty(Device& device, DType dtype, const Shape& shape, const char* label);

}  // namespace polyreme
