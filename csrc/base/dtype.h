#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace polyreme {

// Element types that a tensor can hold. Compute kernels say which ones they take.
enum class DType : uint8_t { kF32, kF64, kBF16, kF16, kI8, kU8, kI32, kI64, kBool };

// Bytes of one element.
size_t dtype_size(DType dtype);
// "float32", "bfloat16", "int32", ...: NumPy's spelling. "unknown dtype" for a number that is none.
const char* dtype_name(DType dtype);
// The inverse of dtype_name. Throws InvalidArgument and lists the names that exist.
DType dtype_from_name(const std::string& name);

template <typename T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::kF32;
}
template <>
constexpr DType dtype_of<double>() {
  return DType::kF64;
}
template <>
constexpr DType dtype_of<int8_t>() {
  return DType::kI8;
}
template <>
constexpr DType dtype_of<uint8_t>() {
  return DType::kU8;
}
template <>
constexpr DType dtype_of<int32_t>() {
  return DType::kI32;
}
template <>
constexpr DType dtype_of<int64_t>() {
  return DType::kI64;
}
template <>
constexpr DType dtype_of<bool>() {
  return DType::kBool;
}

}  // namespace polyreme
