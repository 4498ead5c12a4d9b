// What the tests of operations share: devices of every kind, host copies, bit comparison, and the
// rule that an operation gives the same bits on all of those devices.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device/cpu/cpu_device.h"
#include "ops/update.h"

namespace polyreme::testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// A CPU device and a stream of it, with transfers that wait.
class Rig {
 public:
  explicit Rig(const CpuDeviceOptions& options = {})
      : device_(make_cpu_device(options)), stream_(device_->create_stream("test")) {}

  Device& device() { return *device_; }
  Stream& stream() { return *stream_; }
  void synchronize() { stream_->synchronize(); }

  template <typename T>
  Tensor upload(const Shape& shape, const std::vector<T>& values) {
    EXPECT_EQ(shape.numel(), static_cast<int64_t>(values.size()));
    const Tensor tensor = empty(*device_, dtype_of<T>(), shape, "upload");
    copy_from_host(*stream_, values.data(), tensor);
    stream_->synchronize();
    return tensor;
  }
  Tensor upload(const std::vector<float>& values) {
    return upload({static_cast<int64_t>(values.size())}, values);
  }

  // Values that are rounded to `dtype`.
  Tensor upload(DType dtype, const Shape& shape, const std::vector<float>& values) {
    const Tensor wide = upload(shape, values);
    return dtype == DType::kF32 ? wide : cast_to(dtype, wide);
  }
  Tensor cast_to(DType dtype, const Tensor& from) {
    const Tensor to = empty(*device_, dtype, from.shape(), "cast");
    cast(*stream_, from, to);
    return to;
  }

  // As floats, elements of 16 bits are widened.
  template <typename T = float>
  std::vector<T> download(const Tensor& tensor) {
    if (std::is_same_v<T, float> && dtype_size(tensor.dtype()) == 2)
      return download<T>(cast_to(DType::kF32, tensor));
    std::vector<T> values(static_cast<size_t>(tensor.numel()));
    copy_to_host(*stream_, tensor, values.data());
    stream_->synchronize();
    return values;
  }

  Tensor empty_f32(const Shape& shape) { return empty(*device_, DType::kF32, shape, "empty_f32"); }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

inline std::vector<float> random_floats(size_t count, uint32_t seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// Rounded to `dtype` and widened again.
inline std::vector<float> rounded(DType dtype, const std::vector<float>& values) {
  Rig rig;
  return rig.download(rig.upload(dtype, {static_cast<int64_t>(values.size())}, values));
}

// Bits of a number, with one pattern for every NaN (payloads are not part of any contract).
inline uint32_t bits_of(float value) {
  return std::isnan(value) ? 0x7fc00000u : std::bit_cast<uint32_t>(value);
}

inline void expect_same_bits(const std::vector<float>& got, const std::vector<float>& expected,
                             const std::string& where = "") {
  ASSERT_EQ(got.size(), expected.size()) << where;
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_EQ(bits_of(got[i]), bits_of(expected[i]))
        << where << " element " << i << ": " << got[i] << " against " << expected[i];
}

// Runs `function` (Rig& -> std::vector<float>, all outputs joined) on every instruction set that
// this CPU has, with 1, 2 and 3 threads, on both executors; expects equal bits and returns them.
template <typename Function>
std::vector<float> same_bits_everywhere(Function&& function) {
  std::vector<float> reference;
  bool first = true;
  for (const Isa isa : supported_isas()) {
    for (const CpuExecutor executor : {CpuExecutor::kImmediate, CpuExecutor::kDeferred}) {
      for (const int num_threads : {1, 2, 3}) {
        Rig rig({.num_threads = num_threads, .isa = isa_name(isa), .executor = executor});
        const std::vector<float> got = function(rig);
        if (first) reference = got;
        first = false;
        expect_same_bits(got, reference,
                         concat(isa_name(isa), ", ", num_threads, " thread(s), ",
                                executor == CpuExecutor::kImmediate ? "immediate" : "deferred"));
      }
    }
  }
  return reference;
}

inline void append(std::vector<float>& to, const std::vector<float>& values) {
  to.insert(to.end(), values.begin(), values.end());
}

// Distance from `got` to `expected` in units of the last fp32 place of `expected`.
inline double ulp_error(float got, double expected) {
  const float rounded = std::abs(static_cast<float>(expected));
  const double ulp = static_cast<double>(std::nextafter(rounded, kInf)) - static_cast<double>(rounded);
  return std::abs(static_cast<double>(got) - expected) / ulp;
}

// `statement` throws `Exception` with `text` in its message.
#define EXPECT_THROW_WITH(statement, Exception, text)                                   \
  try {                                                                                 \
    statement;                                                                          \
    ADD_FAILURE() << "expected " #Exception " with \"" << (text) << "\"";               \
  } catch (const Exception& error) {                                                    \
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what(); \
  }

}  // namespace polyreme::testing
