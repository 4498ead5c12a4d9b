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

// What the CPU makes of it.
template <typename T>
std::vector<T> tree_of(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& terms) {
  std::vector<const void*> addresses;
  for (const auto& term : terms) addresses.push_back(term.data());
  std::vector<T> out(terms[0].size());
  const int num_terms = static_cast<int>(terms.size());
  tree_reduce(Reduction::whole(op, dtype, num_terms), addresses.data(), num_terms,
              static_cast<int64_t>(out.size()), out.data());
  return out;
}

// Elements of any dtype as `Bits`.
template <typename Bits>
std::vector<std::vector<Bits>> drawn_terms(DType dtype, int num_terms, int64_t count) {
  std::vector<std::vector<Bits>> terms;
  for (int t = 0; t < num_terms; ++t) {
    const conformance::Bytes bytes = conformance::drawn({dtype, 9}, t, count);
    terms.emplace_back(static_cast<size_t>(count));
    std::memcpy(terms.back().data(), bytes.data(), bytes.size());
  }
  return terms;
}

TEST_F(EmulatedTree, HasTheBitsOfTheCpu) {
  for (const DType dtype : conformance::kAllDTypes)
    for (const ReduceOp op : conformance::kAllOps)
      for (const int num_terms : kManyTerms) {
        if (!is_reducible(op, dtype)) continue;
        const std::string what = concat(dtype_name(dtype), ", ", num_terms, " terms, ", reduce_op_name(op));
        const auto compare = [&]<typename Bits>(Bits) {
          const auto terms = drawn_terms<Bits>(dtype, num_terms, 77);
          for (const int own : {-1, num_terms - 1})
            conformance::expect_bits(reduce(dtype, op, terms, own), tree_of(dtype, op, terms), what);
        };
        if (dtype_size(dtype) == 1) compare(uint8_t{});
        if (dtype_size(dtype) == 2) compare(uint16_t{});
        if (dtype_size(dtype) == 4) compare(uint32_t{});
        if (dtype_size(dtype) == 8) compare(uint64_t{});
      }
}

TEST_F(EmulatedTree, SpecialValues) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  const std::vector<std::vector<float>> terms = {{nan, 1, -0.0F, 0.0F, infinity, 1e-45F},
                                                 {1, nan, 0.0F, -0.0F, 1, 1e-45F},
                                                 {2, 2, 0.0F, 0.0F, -infinity, 1e-45F}};
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kSum}) {
    const std::vector<float> got = reduce(DType::kF32, op, terms, -1),
                             wanted = tree_of(DType::kF32, op, terms);
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(wanted[i])) {
        EXPECT_TRUE(std::isnan(got[i])) << i;
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(wanted[i])) << i;
      }
    }
  }
}

TEST_F(EmulatedTree, KnownResults) {
  const std::vector<std::vector<float>> floats = {{2, 3}, {5, 7}, {11, 13}};
  EXPECT_EQ(reduce(DType::kF32, ReduceOp::kProduct, floats, 2), (std::vector<float>{110, 273}));
  EXPECT_EQ(reduce(DType::kF32, ReduceOp::kAverage, floats, 2), (std::vector<float>{6, 23.0F / 3.0F}));
  const std::vector<std::vector<int8_t>> bytes = {{100, -100}, {100, 3}};
  EXPECT_EQ(reduce(DType::kI8, ReduceOp::kSum, bytes, 0), (std::vector<int8_t>{-56, -97}));
  EXPECT_EQ(reduce(DType::kI8, ReduceOp::kProduct, bytes, 0), (std::vector<int8_t>{16, -44}));
  // float16: 2048 + 1 + 1; additions in 16 bits would lose both.
  const std::vector<std::vector<uint16_t>> halves = {{0x6800}, {0x3c00}, {0x3c00}};
  EXPECT_EQ(reduce(DType::kF16, ReduceOp::kSum, halves, 1), std::vector<uint16_t>{0x6801});
  const std::vector<std::vector<uint8_t>> bools = {{0, 0, 2, 255}, {0, 1, 0, 1}};
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
