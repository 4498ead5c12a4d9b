// Operations on an emulated GPU, through the interface that the CPU has: the bits are the CPU's. The kernels
// have tests of their own (tests/cpp/kernels); here their arguments are what matters.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "device/cpu/cpu_device.h"
#include "device/cuda/cuda_device.h"
#include "device/cuda/cuda_table.h"
#include "emulator/fake_gpu.h"
#include "ops/ops.h"
#include "ops/update.h"

extern "C" const PolyremeCudaTable* polyreme_cuda_table();

namespace polyreme {
namespace {

// One device: makes the inputs of a case, and gathers the bytes of its outputs.
class OneDevice {
 public:
  OneDevice(Device& device, DType dtype)
      : device_(device), dtype_(dtype), stream_(device.create_stream("ops")) {}

  Stream& stream() { return *stream_; }
  Tensor f32(const Shape& shape) { return drawn(shape, DType::kF32); }
  Tensor any(const Shape& shape) { return drawn(shape, dtype_); }
  Tensor limbs() {
    const Tensor tensor = empty(device_, DType::kI64, {ExactSum::kLimbs}, "limbs");
    zero_limbs(*stream_, tensor);
    return tensor;
  }
  // A result, behind a result before it.
  void keep(const Tensor& tensor) {
    results_.emplace_back(static_cast<size_t>(tensor.size_bytes()));
    copy_to_host(*stream_, tensor, results_.back().data());
  }
  std::vector<std::vector<char>> results() {
    stream_->synchronize();
    return std::move(results_);
  }

 private:
  // Normal numbers, made in fp32 by the device and cast by it.
  Tensor drawn(const Shape& shape, DType dtype) {
    const Tensor wide = empty(device_, DType::kF32, shape, "drawn");
    std::vector<float> values(static_cast<size_t>(shape.numel()));
    std::normal_distribution<float> normal(0.0F, 1.0F);
    for (float& value : values) value = normal(random_);
    copy_from_host(*stream_, values.data(), wide);
    stream_->synchronize();
    if (dtype == DType::kF32) return wide;
    const Tensor narrow = empty(device_, dtype, shape, "narrow");
    cast(*stream_, wide, narrow);
    return narrow;
  }

  Device& device_;
  const DType dtype_;
  std::mt19937 random_{7};
  std::unique_ptr<Stream> stream_;
  std::vector<std::vector<char>> results_;
};

// Runs `body` on a CPU and on an emulated GPU, in every dtype, under several seeds. The level is avx2: amx has
// bf16 sums of its own (device/cpu/isa.h).
void expect_same_bits(const std::function<void(OneDevice&)>& body) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const auto cpu = make_cpu_device({.num_threads = 1, .isa = "avx2"});
    OneDevice on_cpu(*cpu, dtype);
    body(on_cpu);
    const auto wanted = on_cpu.results();
    for (const uint64_t seed : {1, 2}) {
      fake_gpu::reset(1, seed);
      const auto gpu = make_cuda_device(*polyreme_cuda_table(), 0);
      OneDevice on_gpu(*gpu, dtype);
      body(on_gpu);
      EXPECT_EQ(on_gpu.results(), wanted) << dtype_name(dtype) << ", fake_gpu::reset(1, " << seed << ")";
      EXPECT_TRUE(fake_gpu::violations().empty());
    }
  }
}

TEST(GpuOps, MemoryAndElements) {
  expect_same_bits([](OneDevice& run) {
    const Tensor x = run.any({5, 24}), y = run.any({5, 24}), sums = run.f32({24});
    add(run.stream(), x, y, y);
    run.keep(y);
    gelu_backward(run.stream(), x, y, y);
    run.keep(y);
    gelu_forward(run.stream(), x, y);
    run.keep(y);
    const RandomKey key = {.seed = 3, .purpose = RandomPurpose::kDropout, .stream = 2, .step = 1};
    dropout(run.stream(), x, y, 0.3F, key, 12);
    run.keep(y);
    copy(run.stream(), x, y);
    run.keep(y);
    accumulate_rows(run.stream(), x, sums);
    run.keep(sums);
    fill(run.stream(), y, 0.7F);
    run.keep(y);
    fill_normal(run.stream(), sums, 0.1F, key, 5);
    run.keep(sums);
  });
}

TEST(GpuOps, LayerNorm) {
  expect_same_bits([](OneDevice& run) {
    for (const bool wide : {false, true}) {
      const Tensor x = run.any({6, 40}), y = run.any({6, 40}), mean = run.f32({6}), rstd = run.f32({6});
      const Tensor gamma = wide ? run.f32({40}) : run.any({40}), beta = wide ? run.f32({40}) : run.any({40});
      layer_norm_forward(run.stream(), x, gamma, beta, 1e-5F, y, mean, rstd);
      for (const Tensor& result : {y, mean, rstd}) run.keep(result);
      const Tensor dgamma = run.f32({40}), dbeta = run.f32({40}), dx = run.any({6, 40});
      layer_norm_backward_weight(run.stream(), y, x, mean, rstd, dgamma, dbeta);
      layer_norm_backward_input(run.stream(), y, x, gamma, mean, rstd, dx);
      for (const Tensor& result : {dgamma, dbeta, dx}) run.keep(result);
    }
  });
}

TEST(GpuOps, RmsNormAndSwiglu) {
  expect_same_bits([](OneDevice& run) {
    for (const int64_t cols : {7, 40, 130}) {
      const Tensor x = run.any({6, cols}), y = run.any({6, cols}), gamma = run.any({cols}),
                   rstd = run.f32({6});
      rms_norm_forward(run.stream(), x, gamma, 1e-5F, y, rstd);
      for (const Tensor& result : {y, rstd}) run.keep(result);
      const Tensor dgamma = run.f32({cols}), dx = run.any({6, cols});
      rms_norm_backward_weight(run.stream(), y, x, rstd, dgamma);
      rms_norm_backward_input(run.stream(), y, x, gamma, rstd, dx);
      for (const Tensor& result : {dgamma, dx}) run.keep(result);
      const Tensor gates = run.any({6, 2 * cols}), gradients = run.any({6, 2 * cols});
      swiglu_forward(run.stream(), gates, y);
      swiglu_backward(run.stream(), gates, dx, gradients);
      for (const Tensor& result : {y, gradients}) run.keep(result);
    }
  });
}

TEST(GpuOps, GemmAndAttention) {
  expect_same_bits([](OneDevice& run) {
    const Tensor a = run.any({9, 20}), b = run.any({33, 20}), bias = run.any({33}), c = run.any({9, 33}),
                 sum = run.f32({20, 33});
    gemm(run.stream(), a, b.transpose(0, 1), c, false, bias);
    run.keep(c);
    gemm(run.stream(), a.transpose(0, 1), c, sum, true);
    run.keep(sum);
    const Tensor qkv = run.any({2, 7, 3, 2, 5}), out = run.any({2, 7, 2, 5}), dqkv = run.any({2, 7, 3, 2, 5}),
                 log_sum_exp = run.f32({2, 2, 7});
    attention_forward(run.stream(), qkv, out, log_sum_exp);
    attention_backward(run.stream(), qkv, out, log_sum_exp, out, dqkv);
    for (const Tensor& result : {out, log_sum_exp, dqkv}) run.keep(result);
  });
}

TEST(GpuOps, UpdatesAndSums) {
  expect_same_bits([](OneDevice& run) {
    const Shape shape = {1500};
    const Tensor grad = run.f32(shape), m = run.f32(shape), v = run.f32(shape), scale = run.f32({1});
    fill(run.stream(), v, 0.5F);
    for (int rule = 0; rule < 4; ++rule) {
      const Tensor param = run.f32(shape);
      if (rule == 0)
        adamw(run.stream(), param, grad, m, v, scale,
              {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .step = 4});
      if (rule == 1)
        lion(run.stream(), param, grad, m, scale,
             {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1});
      if (rule > 1)
        sgd(run.stream(), param, grad, rule == 2 ? m : Tensor{}, scale,
            {.lr = 1e-2, .momentum = rule == 2 ? 0.9 : 0.0, .weight_decay = 0.1, .first_step = false});
      run.keep(param);
    }
    for (const Tensor& result : {m, v}) run.keep(result);
    const Tensor squares = run.limbs(), sum = run.limbs();
    exact_sum_squares(run.stream(), grad, squares);
    exact_sum(run.stream(), grad, sum);
    clip_scale(run.stream(), squares, 3.0F, scale, 0.5);
    for (const Tensor& result : {squares, sum, scale}) run.keep(result);
  });
}

TEST(GpuOps, WhatAGpuDoesNotHaveIsRefused) {
  fake_gpu::reset(1, 1);
  const auto gpu = make_cuda_device(*polyreme_cuda_table(), 0);
  OneDevice run(*gpu, DType::kF32);
  const Tensor logits = run.f32({2, 3}), loss = run.f32({2});
  const Tensor targets = empty(*gpu, DType::kI32, {2}, "targets");
  EXPECT_THROW(cross_entropy_forward(run.stream(), logits, targets, loss, loss), NotAvailable);
}

TEST(GpuOps, ALaunchThatFailsIsTold) {
  fake_gpu::reset(1, 1);
  const auto gpu = make_cuda_device(*polyreme_cuda_table(), 0);
  OneDevice run(*gpu, DType::kF32);
  const Tensor x = run.f32({8});
  fake_gpu::fail_call("cudaLaunchKernel", 1, cudaErrorIllegalAddress);
  try {
    add(run.stream(), x, x, x);
    ADD_FAILURE() << "expected DeviceError";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("cuda:0: add failed: cudaErrorIllegalAddress"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace polyreme
