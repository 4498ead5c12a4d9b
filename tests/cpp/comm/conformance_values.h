#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/half_reference.h"
#include "comm/host_access.h"
#include "comm/tree.h"

// What the ranks of a conformance test contribute, and what must come out: computed by every rank for itself,
// with tree_order, element by element.

namespace polyreme::conformance {

template <typename... Parts>
void expect(bool condition, const Parts&... parts) {
  if (!condition) throw std::runtime_error(concat(parts...));
}

inline constexpr DType kAllDTypes[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kF16, DType::kI8,
                                       DType::kU8,  DType::kI32, DType::kI64,  DType::kBool};
inline constexpr ReduceOp kAllOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin,
                                       ReduceOp::kAverage};

inline uint64_t random_bits(int rank, int64_t i, uint64_t trial) {
  uint64_t z = (static_cast<uint64_t>(rank) << 40) + static_cast<uint64_t>(i) + trial * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// How a dtype lies in memory (Stored) and what it is computed in (Computed).
template <typename T>
struct Plain {
  using Stored = T;
  using Computed = T;
  DType dtype = dtype_of<T>();
  T load(T stored) const { return stored; }
  T store(T computed) const { return computed; }
};
struct Half {
  using Stored = uint16_t;
  using Computed = float;
  DType dtype;
  float load(uint16_t stored) const { return static_cast<float>(HalfReference::of(dtype).decode(stored)); }
  uint16_t store(float computed) const {
    return HalfReference::of(dtype).encode(static_cast<double>(computed));
  }
};

template <typename Visit>
auto with_format(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kF64:
      return visit(Plain<double>{});
    case DType::kBF16:
    case DType::kF16:
      return visit(Half{dtype});
    case DType::kI8:
      return visit(Plain<int8_t>{});
    case DType::kU8:
      return visit(Plain<uint8_t>{});
    case DType::kI32:
      return visit(Plain<int32_t>{});
    case DType::kI64:
      return visit(Plain<int64_t>{});
    case DType::kBool:
      return visit(Plain<uint8_t>{DType::kBool});
    default:
      return visit(Plain<float>{});
  }
}

// kMixed: integers of all bits; floating-point numbers of mixed size, so that another order of summation
// shows. kExact: small whole numbers, of which every order gives the same bits, also of the average over up
// to 8 ranks.
enum class Draw { kMixed, kExact };

// Element i of what `rank` of `size` contributes to a trial.
template <typename Format>
typename Format::Stored draw_element(const Format& format, Draw draw, int rank, int size, int64_t i,
                                     uint64_t trial) {
  using C = typename Format::Computed;
  const uint64_t z = random_bits(rank, i, trial);
  if (format.dtype == DType::kBool) return format.store(static_cast<C>(z % 8 != 0));
  if (draw == Draw::kExact && !std::is_integral_v<C>) {
    const int whole = static_cast<int>(z % 5) - 2;  // of a product: powers of two
    return format.store(static_cast<C>((whole == 0 ? 1 : whole) * (trial % 2 == 0 ? 1 : size)));
  }
  if constexpr (std::is_integral_v<C>) {
    return format.store(static_cast<C>(z));
  } else {
    const double scale = 0x1p-71 * static_cast<double>(1 << (z % 17));
    return format.store(static_cast<C>(static_cast<double>(static_cast<int64_t>(z)) * scale));
  }
}

// The bytes of `count` elements.
using Bytes = std::vector<char>;

struct Trial {
  DType dtype;
  uint64_t seed;
  Draw draw = Draw::kMixed;
  int size = 1;  // of the group
};

template <typename T>
Bytes to_bytes(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

inline Bytes drawn(const Trial& trial, int rank, int64_t count) {
  return with_format(trial.dtype, [&](const auto& format) {
    std::vector<typename std::decay_t<decltype(format)>::Stored> values;
    for (int64_t i = 0; i < count; ++i)
      values.push_back(draw_element(format, trial.draw, rank, trial.size, i, trial.seed));
    return to_bytes(values);
  });
}

template <typename C>
C combined(ReduceOp op, bool is_bool, C a, C b) {
  const bool product = op == ReduceOp::kProduct;
  if (op == ReduceOp::kMax) return b > a ? b : a;
  if (op == ReduceOp::kMin) return b < a ? b : a;
  if constexpr (std::is_integral_v<C>) {
    if (is_bool) return product ? a && b : a || b;
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return static_cast<C>(product ? x * y : x + y);
  } else {
    return product ? a * b : a + b;
  }
}

// Elements [begin, end) of what all ranks contribute, reduced.
inline Bytes reduced(const Trial& trial, ReduceOp op, int64_t begin, int64_t end) {
  return with_format(trial.dtype, [&](const auto& format) {
    using F = std::decay_t<decltype(format)>;
    const std::vector<TreeStep> steps = tree_order(trial.size);
    std::vector<typename F::Computed> terms(static_cast<size_t>(trial.size));
    std::vector<typename F::Stored> out;
    for (int64_t i = begin; i < end; ++i) {
      for (int r = 0; r < trial.size; ++r)
        terms[static_cast<size_t>(r)] =
            format.load(draw_element(format, trial.draw, r, trial.size, i, trial.seed));
      for (const TreeStep& step : steps) {
        auto& into = terms[static_cast<size_t>(step.into)];
        into = combined(op, format.dtype == DType::kBool, into, terms[static_cast<size_t>(step.from)]);
      }
      if (op == ReduceOp::kAverage) terms[0] = terms[0] / static_cast<typename F::Computed>(trial.size);
      out.push_back(format.store(terms[0]));
    }
    return to_bytes(out);
  });
}

}  // namespace polyreme::conformance
