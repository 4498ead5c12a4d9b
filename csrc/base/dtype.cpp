#include "base/dtype.h"

#include <array>

#include "base/error.h"

namespace polyreme {
namespace {

struct DTypeInfo {
  DType dtype;
  size_t size;
  const char* name;
};

constexpr std::array<DTypeInfo, 9> kInfo = {{{DType::kF32, 4, "float32"},
                                             {DType::kF64, 8, "float64"},
                                             {DType::kBF16, 2, "bfloat16"},
                                             {DType::kF16, 2, "float16"},
                                             {DType::kI8, 1, "int8"},
                                             {DType::kU8, 1, "uint8"},
                                             {DType::kI32, 4, "int32"},
                                             {DType::kI64, 8, "int64"},
                                             {DType::kBool, 1, "bool"}}};

}  // namespace

size_t dtype_size(DType dtype) { return kInfo[static_cast<size_t>(dtype)].size; }

const char* dtype_name(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < kInfo.size() ? kInfo[index].name : "unknown dtype";
}

DType dtype_from_name(const std::string& name) {
  std::string known;
  for (const DTypeInfo& info : kInfo) {
    if (name == info.name) return info.dtype;
    known += concat(known.empty() ? "" : ", ", info.name);
  }
  throw InvalidArgument(concat("unknown dtype '", name, "'; expected one of ", known));
}

}  // namespace polyreme
