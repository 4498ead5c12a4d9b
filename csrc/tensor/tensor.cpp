#include "tensor/tensor.h"

#include <algorithm>

namespace polyreme {
namespace {

Shape contiguous_strides(const Shape& shape) {
  Shape strides = shape;
  int64_t stride = 1;
  for (int i = shape.size() - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

}  // namespace

Shape::Shape(std::span<const int64_t> dims) : size_(static_cast<int>(dims.size())) {
  require(dims.size() <= kMaxDims, "a tensor has at most ", kMaxDims, " dims, got ", dims.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    require(dims[i] >= 0, "extent ", i, " is negative: ", dims[i]);
    dims_[i] = dims[i];
  }
}

int64_t Shape::numel() const {
  int64_t product = 1;
  for (const int64_t extent : *this) product *= extent;
  return product;
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (int i = 0; i < size_; ++i) text += concat(i == 0 ? "" : ", ", (*this)[i]);
  return text + "]";
}

bool Shape::operator==(const Shape& other) const {
  return std::equal(begin(), end(), other.begin(), other.end());
}

Tensor::Tensor(std::shared_ptr<Buffer> buffer, DType dtype, Shape shape, int64_t offset)
    : buffer_(std::move(buffer)),
      dtype_(dtype),
      shape_(shape),
      strides_(contiguous_strides(shape)),
      offset_(offset) {
  const int64_t end = (offset + shape.numel()) * static_cast<int64_t>(dtype_size(dtype));
  require(offset >= 0 && end <= static_cast<int64_t>(buffer_->size_bytes()), *this, " at element ", offset,
          " does not fit a buffer of ", buffer_->size_bytes(), " bytes");
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  for (int i = dims() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != expected) return false;
    expected *= shape_[i];
  }
  return true;
}

std::string Tensor::to_string() const { return concat(dtype_name(dtype_), shape_.to_string()); }

Tensor Tensor::view(Shape shape) const {
  require(is_contiguous(), "view needs a contiguous tensor, got ", *this, " with strides ", strides_);
  require(shape.numel() == numel(), "cannot view ", *this, " as ", shape, ": ", numel(), " against ",
          shape.numel(), " elements");
  Tensor result = *this;
  result.shape_ = shape;
  result.strides_ = contiguous_strides(shape);
  return result;
}

Tensor Tensor::slice(int dim, int64_t begin, int64_t end) const {
  require(dim >= 0 && dim < dims(), "slice of dim ", dim, " of ", *this);
  require(0 <= begin && begin <= end && end <= shape_[dim], "slice [", begin, ", ", end, ") of dim ", dim,
          " of ", *this);
  Tensor result = *this;
  result.offset_ += begin * strides_[dim];
  result.shape_[dim] = end - begin;
  return result;
}

Tensor Tensor::transpose(int dim0, int dim1) const {
  require(dim0 >= 0 && dim0 < dims() && dim1 >= 0 && dim1 < dims(), "transpose of dims ", dim0, " and ", dim1,
          " of ", *this);
  Tensor result = *this;
  std::swap(result.shape_[dim0], result.shape_[dim1]);
  std::swap(result.strides_[dim0], result.strides_[dim1]);
  return result;
}

void* Tensor::raw_address() const { return static_cast<char*>(buffer_->address()) + begin_byte(); }

int64_t Tensor::end_byte() const {
  if (numel() == 0) return begin_byte();
  int64_t last = offset_;
  for (int i = 0; i < dims(); ++i) last += (shape_[i] - 1) * strides_[i];
  return (last + 1) * static_cast<int64_t>(dtype_size(dtype_));
}

Tensor empty(Device& device, DType dtype, const Shape& shape, const char* label) {
  return Tensor(device.allocate(static_cast<size_t>(shape.numel()) * dtype_size(dtype), label), dtype, shape);
}

}  // namespace polyreme
