#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <span>
#include <string>
#include <vector>

namespace polyreme {

// Up to kMaxDims extents (or strides), held in place.
class Shape {
 public:
  static constexpr int kMaxDims = 6;

  Shape() = default;
  // Throws InvalidArgument for more than kMaxDims entries.
  Shape(std::initializer_list<int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const int64_t> dims);

  int size() const { return size_; }
  int64_t operator[](int i) const { return dims_[static_cast<size_t>(i)]; }
  int64_t& operator[](int i) { return dims_[static_cast<size_t>(i)]; }
  const int64_t* begin() const { return dims_.data(); }
  const int64_t* end() const { return dims_.data() + size_; }
  // The product of the extents; 1 for no dims.
  int64_t numel() const;
  // "[2, 3]"
  std::string to_string() const;
  bool operator==(const Shape& other) const;

 private:
  std::array<int64_t, kMaxDims> dims_{};
  int size_ = 0;
};

// As to_string. Lets a check name a shape without building the text when it passes.
inline std::ostream& operator<<(std::ostream& out, const Shape& shape) { return out << shape.to_string(); }

}  // namespace polyreme
