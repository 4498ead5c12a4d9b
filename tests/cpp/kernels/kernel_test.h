// What the tests of kernels share. Kernels run on the emulator's threads, under AddressSanitizer; arrays lie
// in memory of exactly their size. Every case runs under several seeds of the emulator, which are part of the
// message of a failure.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "device/cpu/cpu_device.h"
#include "kernels/where.h"
#include "ops/ops.h"
#include "ops/update.h"

namespace polyreme::kernel_test {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();
using Half = __half;
using BFloat16 = __nv_bfloat16;

template <typename T>
constexpr DType kDTypeOf = std::is_same_v<T, Half>       ? DType::kF16
                           : std::is_same_v<T, BFloat16> ? DType::kBF16
                                                         : DType::kF32;
template <typename T>
constexpr int32_t kCodeOf = static_cast<int32_t>(kDTypeOf<T>);

template <typename T>
T narrow(float x) {
  if constexpr (std::is_same_v<T, Half>) return __float2half_rn(x);
  if constexpr (std::is_same_v<T, BFloat16>) return __float2bfloat16_rn(x);
  if constexpr (std::is_same_v<T, float>) return x;
}
inline float widen(float x) { return x; }
inline float widen(Half x) { return __half2float(x); }
inline float widen(BFloat16 x) { return __bfloat162float(x); }

// Memory of exactly `size` elements, `shift` elements behind a multiple of 16 bytes. What is not filled is
// NaN.
template <typename T>
class Array {
 public:
  explicit Array(size_t size, size_t shift = 0)
      : size_(size), shift_(shift), memory_(allocate((size + shift) * sizeof(T) + (size + shift == 0))) {
    std::memset(memory_.get(), 0xff, (size + shift) * sizeof(T));
  }
  template <typename From>
  Array(const std::vector<From>& values, size_t shift = 0) : Array(values.size(), shift) {
    for (size_t i = 0; i < size_; ++i)
      if constexpr (std::is_same_v<From, float>) {
        (*this)[i] = narrow<T>(values[i]);
      } else {
        (*this)[i] = static_cast<T>(values[i]);
      }
  }

  T* data() const { return static_cast<T*>(memory_.get()) + shift_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data()[i]; }
  std::vector<T> values() const { return std::vector<T>(data(), data() + size_); }
  std::vector<float> floats() const {
    std::vector<float> result(size_);
    for (size_t i = 0; i < size_; ++i) result[i] = widen((*this)[i]);
    return result;
  }

 private:
  size_t size_, shift_;
  std::shared_ptr<void> memory_;
};

inline std::vector<float> normals(int64_t count, uint32_t seed, float scale = 1.0F) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}
// Values that T holds exactly.
template <typename T>
std::vector<float> normals_of(int64_t count, uint32_t seed, float scale = 1.0F) {
  return Array<T>(normals(count, seed, scale)).floats();
}

// Launches and waits.
template <typename Args>
void run(cudaError_t (*launch)(const Args&, cudaStream_t), const Args& args) {
  ASSERT_EQ(launch(args, nullptr), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  ASSERT_EQ(violations(), std::vector<std::string>{});
}

// Calls body(T{}) for the three dtypes.
template <typename Body>
void for_dtypes(Body body) {
  const auto traced = [&](auto type) {
    SCOPED_TRACE(dtype_name(kDTypeOf<decltype(type)>));
    body(type);
  };
  traced(0.0F);
  traced(BFloat16{});
  traced(Half{});
}
// Calls body() under every seed of the emulator.
template <typename Body>
void for_seeds(Body body) {
  for (const uint64_t seed : kSeeds) {
    SCOPED_TRACE(concat("start_case(", seed, ")"));
    start_case(seed);
    body();
  }
}

inline uint32_t bits_of(float x) { return std::isnan(x) ? 0x7fc00000U : std::bit_cast<uint32_t>(x); }
// NaN by any payload.
inline void expect_bits(const std::vector<float>& got, const std::vector<float>& wanted,
                        const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_EQ(bits_of(got[i]), bits_of(wanted[i]))
        << what << ", element " << i << ": " << got[i] << " against " << wanted[i];
}
// The result as T stores it against fp32 numbers that are to be rounded once.
template <typename T>
void expect_rounded(const Array<T>& got, const std::vector<float>& wanted, const std::string& what) {
  expect_bits(got.floats(), Array<T>(wanted).floats(), what);
}
// |got - wanted| <= relative * max(|wanted|, scale), plus half a unit in the last place of T.
template <typename T>
void expect_near(const Array<T>& got, const std::vector<double>& wanted, double relative, double scale,
                 const std::string& what) {
  const double unit = std::is_same_v<T, Half> ? 0x1p-11 : std::is_same_v<T, BFloat16> ? 0x1p-8 : 0.0;
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double bound = (relative + unit * 1.01) * std::max(std::abs(wanted[i]), scale);
    ASSERT_NEAR(static_cast<double>(widen(got[i])), wanted[i], bound) << what << ", element " << i;
  }
}

// The CPU's operations, for comparison.
class Cpu {
 public:
  Tensor upload(const Shape& shape, const std::vector<float>& values) { return filled(shape, values); }
  Tensor upload(const Shape& shape, const std::vector<int32_t>& values) { return filled(shape, values); }
  Tensor upload(const std::vector<float>& values) {
    return filled({static_cast<int64_t>(values.size())}, values);
  }
  Tensor make(const Shape& shape, DType dtype = DType::kF32) { return empty(*device_, dtype, shape, "made"); }
  template <typename T = float>
  std::vector<T> download(const Tensor& tensor) {
    std::vector<T> values(static_cast<size_t>(tensor.numel()));
    copy_to_host(*stream_, tensor, values.data());
    stream_->synchronize();
    return values;
  }
  Stream& stream() { return *stream_; }

 private:
  template <typename T>
  Tensor filled(const Shape& shape, const std::vector<T>& values) {
    const Tensor tensor = empty(*device_, dtype_of<T>(), shape, "filled");
    copy_from_host(*stream_, values.data(), tensor);
    stream_->synchronize();
    return tensor;
  }

  std::unique_ptr<Device> device_ = make_cpu_device({.num_threads = 1});
  std::unique_ptr<Stream> stream_ = device_->create_stream("reference");
};

}  // namespace polyreme::kernel_test
