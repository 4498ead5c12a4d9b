// kernels/tree_reduce.cu, run on the CPU, against the tree as comm/tree.h defines it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "comm/conformance.h"
#include "comm/tree.h"
#include "device/cuda/cuda_device.h"
#include "device/cuda/cuda_table.h"
#include "emulator/fake_gpu.h"

extern "C" const PolyremeCudaTable* polyreme_cuda_table();

namespace polyreme {
namespace {

float widen_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
// Round to nearest even; no NaN comes here.
uint16_t narrow_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

class EmulatedTree : public ::testing::Test {
 protected:
  EmulatedTree() {
    fake_gpu::reset(1, 3);
    device_ = make_cuda_device(*polyreme_cuda_table(), 0);
    stream_ = device_->create_stream("test");
  }

  // Runs the kernel over terms[t], the term `own` apart from the others; -1: none is.
  template <typename T>
  std::vector<T> reduce(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& terms, int own) {
    const size_t count = terms[0].size(), stride = (count + 5) * sizeof(T);
    const auto memory = device_->allocate(stride * terms.size() + 1, "terms");
    const auto apart = device_->allocate(count * sizeof(T) + 1, "own");
    for (size_t t = 0; t < terms.size(); ++t)
      if (static_cast<int>(t) != own)
        copy_from_host(memory, static_cast<int64_t>(t * stride), terms[t].data(),
                       static_cast<int64_t>(count * sizeof(T)), *stream_);
    if (own >= 0)
      copy_from_host(apart, 0, terms[static_cast<size_t>(own)].data(),
                     static_cast<int64_t>(count * sizeof(T)), *stream_);
    const PolyremeTreeReduce reduction{.dtype = static_cast<int32_t>(dtype),
                                       .reduce = static_cast<int32_t>(op),
                                       .num_terms = static_cast<int32_t>(terms.size()),
                                       .own = own,
                                       .terms = memory->address(),
                                       .own_term = apart->address(),
                                       .stride_bytes = stride,
                                       .count = static_cast<int64_t>(count),
                                       .out = own >= 0 ? apart->address() : memory->address()};
    as_cuda(*stream_).enqueue({memory, apart}, [&](void* handle) {
      EXPECT_EQ(device_->table().tree_reduce(&reduction, handle).code, 0);
    });
    std::vector<T> result(count);
    copy_to_host(result.data(), own >= 0 ? apart : memory, 0, static_cast<int64_t>(count * sizeof(T)),
                 *stream_);
    stream_->synchronize();
    return result;
  }

  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<Stream> stream_;
};

constexpr int kManyTerms[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 31, 64, 100};

template <typename T>
std::vector<T> tree_of(ReduceOp op, const std::vector<std::vector<T>>& terms) {
  std::vector<const void*> addresses;
  for (const auto& term : terms) addresses.push_back(term.data());
  std::vector<T> out(terms[0].size());
  tree_reduce(dtype_of<T>(), op, addresses.data(), static_cast<int>(terms.size()),
              static_cast<int64_t>(out.size()), out.data());
  return out;
}

template <typename T>
std::vector<std::vector<T>> many_terms(int num_terms, int64_t count) {
  std::vector<std::vector<T>> terms;
  for (int t = 0; t < num_terms; ++t) terms.push_back(conformance::values_of<T>(t, count, 9));
  return terms;
}

TEST_F(EmulatedTree, HasTheBitsOfTheCpu) {
  for (const int num_terms : kManyTerms)
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin})
      for (const int own : {-1, 0, num_terms - 1}) {
        const std::string what = concat(num_terms, " terms, ", reduce_op_name(op), ", own ", own);
        const auto compare = [&]<typename T>(const std::vector<std::vector<T>>& terms) {
          conformance::expect_bits(reduce(dtype_of<T>(), op, terms, own), tree_of(op, terms), what);
        };
        compare(many_terms<float>(num_terms, 300));
        compare(many_terms<double>(num_terms, 77));
        compare(many_terms<int32_t>(num_terms, 77));
        compare(many_terms<int64_t>(num_terms, 77));
      }
}

TEST_F(EmulatedTree, SixteenBitsAreAddedInFloat32AndRoundedOnce) {
  for (const int num_terms : kManyTerms) {
    std::vector<std::vector<uint16_t>> narrow;
    std::vector<std::vector<float>> wide;
    for (const auto& term : many_terms<float>(num_terms, 200)) {
      narrow.emplace_back();
      wide.emplace_back();
      for (const float value : term) {
        narrow.back().push_back(narrow_bf16(value));
        wide.back().push_back(widen_bf16(narrow.back().back()));
      }
    }
    std::vector<uint16_t> wanted;
    for (const float sum : tree_of(ReduceOp::kSum, wide)) wanted.push_back(narrow_bf16(sum));
    conformance::expect_bits(reduce(DType::kBF16, ReduceOp::kSum, narrow, 0), wanted, "bfloat16 sum");
  }
  // float16: 2048 + 1 + 1: each addition in 16 bits would lose the 1.
  const std::vector<std::vector<uint16_t>> halves = {{0x6800}, {0x3c00}, {0x3c00}};          // 2048, 1, 1
  EXPECT_EQ(reduce(DType::kF16, ReduceOp::kSum, halves, 1), std::vector<uint16_t>{0x6801});  // 2050
}

TEST_F(EmulatedTree, SpecialValues) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  const std::vector<std::vector<float>> terms = {{nan, 1, -0.0F, 0.0F, infinity, 1e-45F},
                                                 {1, nan, 0.0F, -0.0F, 1, 1e-45F},
                                                 {2, 2, 0.0F, 0.0F, -infinity, 1e-45F}};
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kSum}) {
    const std::vector<float> got = reduce(DType::kF32, op, terms, -1), wanted = tree_of(op, terms);
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(wanted[i])) {
        EXPECT_TRUE(std::isnan(got[i])) << i;
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(wanted[i])) << i;
      }
    }
  }
}

TEST_F(EmulatedTree, ProductsAveragesAndBools) {
  const std::vector<std::vector<float>> floats = {{2, 3}, {5, 7}, {11, 13}};
  EXPECT_EQ(reduce(DType::kF32, ReduceOp::kProduct, floats, 2), (std::vector<float>{110, 273}));
  EXPECT_EQ(reduce(DType::kF32, ReduceOp::kAverage, floats, 2), (std::vector<float>{6, 23.0F / 3.0F}));
  const std::vector<std::vector<int8_t>> bytes = {{100, -100}, {100, 3}};
  EXPECT_EQ(reduce(DType::kI8, ReduceOp::kSum, bytes, 0), (std::vector<int8_t>{-56, -97}));
  EXPECT_EQ(reduce(DType::kI8, ReduceOp::kProduct, bytes, 0), (std::vector<int8_t>{16, -44}));
  const std::vector<std::vector<uint8_t>> bools = {{0, 0, 1, 1}, {0, 1, 0, 1}};
  for (const ReduceOp any : {ReduceOp::kSum, ReduceOp::kMax})
    EXPECT_EQ(reduce(DType::kBool, any, bools, 0), (std::vector<uint8_t>{0, 1, 1, 1}));
  for (const ReduceOp all : {ReduceOp::kProduct, ReduceOp::kMin})
    EXPECT_EQ(reduce(DType::kBool, all, bools, 1), (std::vector<uint8_t>{0, 0, 0, 1}));
}

TEST_F(EmulatedTree, MoreElementsThanThreads) {
  // A grid of 4096 blocks of 256 threads covers 1048576 elements at once.
  const int64_t count = (int64_t{1} << 20) + 1001;
  std::vector<std::vector<float>> terms = {std::vector<float>(static_cast<size_t>(count), 1.0F),
                                           std::vector<float>(static_cast<size_t>(count), 2.0F)};
  terms[0].back() = 5;
  const std::vector<float> got = reduce(DType::kF32, ReduceOp::kSum, terms, -1);
  EXPECT_EQ(got.front(), 3);
  EXPECT_EQ(got[1 << 20], 3);
  EXPECT_EQ(got.back(), 7);
}

TEST_F(EmulatedTree, WhatItDoesNotReduceIsRefused) {
  const auto refused = [&](PolyremeTreeReduce reduction) {
    return device_->table().tree_reduce(&reduction, as_cuda(*stream_).handle()).code == cudaErrorInvalidValue;
  };
  const auto average = static_cast<int32_t>(ReduceOp::kAverage);
  EXPECT_TRUE(
      refused({.dtype = static_cast<int32_t>(DType::kI32), .reduce = average, .num_terms = 2, .count = 1}));
  EXPECT_TRUE(
      refused({.dtype = static_cast<int32_t>(DType::kBool), .reduce = average, .num_terms = 2, .count = 1}));
  EXPECT_TRUE(refused({.num_terms = 0, .count = 1}));
  EXPECT_TRUE(refused({.num_terms = 4097, .count = 1}));
  EXPECT_TRUE(refused({.dtype = 99, .num_terms = 2, .count = 1}));
}

}  // namespace
}  // namespace polyreme
