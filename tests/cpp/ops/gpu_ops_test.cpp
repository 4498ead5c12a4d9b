// Operations on an emulated GPU, through the interface that the CPU has: the bits are the CPU's. The kernels
// have tests of their own (tests/cpp/kernels); here their arguments are what matters.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "common/error_text.h"
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
  Tensor ids(const Shape& shape, const std::vector<int32_t>& values) {
    const Tensor tensor = empty(device_, DType::kI32, shape, "ids");
    copy_from_host(*stream_, values.data(), tensor);
    stream_->synchronize();
    return tensor;
  }
  Tensor of(DType dtype, const Shape& shape) { return empty(device_, dtype, shape, "result"); }
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

// Runs `body` on a CPU and on an emulated GPU, in every dtype, under several seeds. The level is avx2: amx
// has bf16 sums of its own (device/cpu/isa.h).
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

TEST(GpuOps, GroupedAttentionAndRotary) {
  expect_same_bits([](OneDevice& run) {
    // 6 query heads over 2 k and v heads, and a sequence of two blocks
    for (const int64_t seq : {7, 70}) {
      const Tensor qkv = run.any({2, seq, 10, 6}), dqkv = run.any({2, seq, 10, 6}),
                   out = run.any({2, seq, 6, 6}), dout = run.any({2, seq, 6, 6}),
                   log_sum_exp = run.f32({2, 6, seq});
      attention_forward(run.stream(), qkv, out, log_sum_exp);
      attention_backward(run.stream(), qkv, out, log_sum_exp, dout, dqkv);
      for (const Tensor& result : {out, log_sum_exp, dqkv}) run.keep(result);
    }
    const Tensor x = run.any({2, 9, 2, 5, 6}), y = run.any({2, 9, 2, 5, 6});
    rotary(run.stream(), x, y, 4, 10000.0);
    run.keep(y);
    rotary(run.stream(), y, y, 4, 10000.0, /*inverse=*/true);
    rotary(run.stream(), y, y, 0, 500.0);
    run.keep(y);
  });
}

TEST(GpuOps, EmbeddingAndCrossEntropy) {
  expect_same_bits([](OneDevice& run) {
    const Tensor tokens = run.ids({2, 3}, {4, 0, 4, 1, 4, 2});
    for (const bool with_positions : {true, false}) {
      const Tensor table = run.any({5, 12}), rows = run.any({2, 3, 12}), token_grad = run.f32({5, 12});
      const Tensor positions = with_positions ? run.any({4, 12}) : Tensor();
      const Tensor position_grad = with_positions ? run.f32({4, 12}) : Tensor();
      embedding_forward(run.stream(), tokens, table, positions, rows);
      run.keep(rows);
      embedding_backward(run.stream(), tokens, rows, token_grad, position_grad);
      run.keep(token_grad);
      if (with_positions) run.keep(position_grad);
    }
    const Tensor logits = run.any({4, 21}), loss = run.f32({4}), log_sum_exp = run.f32({4});
    const Tensor targets = run.ids({4}, {20, kIgnoreIndex, 0, 7});
    cross_entropy_forward(run.stream(), logits, targets, loss, log_sum_exp);
    cross_entropy_backward(run.stream(), logits, targets, log_sum_exp, 0.25F);
    for (const Tensor& result : {loss, log_sum_exp, logits}) run.keep(result);
  });
}

TEST(GpuOps, PartsOfLanes) {
  expect_same_bits([](OneDevice& run) {
    const Tensor x = run.any({6, 24}), sum = run.f32({6, 24}), table = run.any({3, 24}),
                 out = run.of(DType::kBF16, {6, 24});
    add_to(run.stream(), x, sum);
    add_rows(run.stream(), sum, table, out);
    add_rows(run.stream(), sum, table, sum);
    const Tensor tokens = run.ids({2, 3}, {4, 9, 4, 0, 6, 4});
    const Tensor part = run.any({4, 24}), rows = run.f32({2, 3, 24}), grad = run.f32({4, 24});
    embedding_part_forward(run.stream(), tokens, part, 3, rows);
    embedding_part_backward(run.stream(), tokens, run.any({2, 3, 24}), 3, grad);
    for (const Tensor& result : {sum, out, rows, grad}) run.keep(result);
    // 13 of 16 columns from class 5 on, and a part without a class.
    const Tensor logits = run.any({4, 16}), targets = run.ids({4}, {17, kIgnoreIndex, 5, 2});
    const Tensor top = run.f32({4}), sums = run.f32({2, 4}), loss = run.f32({4}), log_sum_exp = run.f32({4});
    for (const int64_t valid : {int64_t{13}, int64_t{0}}) {
      const LogitsPart columns{.logits = logits, .first_class = 5, .valid = valid};
      fill(run.stream(), top, -std::numeric_limits<float>::infinity());
      cross_entropy_part_max(run.stream(), columns, top);
      cross_entropy_part_sums(run.stream(), columns, targets, top, sums);
      cross_entropy_finish(run.stream(), sums, targets, top, loss, log_sum_exp);
      for (const Tensor& result : {top, sums, loss, log_sum_exp}) run.keep(result);
      cross_entropy_part_backward(run.stream(), columns, targets, log_sum_exp, 0.25F);
      run.keep(logits);
    }
  });
}

TEST(GpuOps, SumsAndFlagsOfTheCaller) {
  expect_same_bits([](OneDevice& run) {
    const Tensor x = run.any({1500}), sum = run.f32({1500}), flags = run.ids({2}, {7, 7});
    clear_flags(run.stream(), flags);
    accumulate(run.stream(), x, sum, flags.slice(0, 0, 1));
    scale(run.stream(), x, 0.3F);
    for (const Tensor& result : {x, sum, flags}) run.keep(result);
    fill(run.stream(), x, std::numeric_limits<float>::infinity());
    accumulate(run.stream(), x.slice(0, 3, 4), sum.slice(0, 3, 4), flags.slice(0, 1, 2));
    run.keep(flags);
    const RandomKey key = {.seed = 3, .purpose = RandomPurpose::kRounding, .stream = 2, .step = 1};
    const Tensor wide = run.f32({37}), rounded = run.of(DType::kBF16, {37});
    round_stochastic(run.stream(), wide, rounded, key, 6);
    run.keep(rounded);
    const Tensor hash = run.of(DType::kI64, {1});
    for (const Tensor& hashed : {x, wide, run.any({7})}) {
      fingerprint(run.stream(), hashed, hash);
      run.keep(hash);
    }
  });
}

// The text is the CPU's; nothing is written, and the stream is usable afterwards.
TEST(GpuOps, IdsThatAreBadAreToldBySynchronize) {
  const auto texts = [](Device& device) {
    OneDevice run(device, DType::kF32);
    std::vector<std::string> errors;
    const auto expect_refused = [&](const std::function<void()>& enqueue) {
      enqueue();
      errors.push_back(testing::error_text<InvalidArgument>([&] { run.stream().synchronize(); }));
    };
    const Tensor tokens = run.ids({2, 2}, {4, 5, 4, -1}), targets = run.ids({2}, {1, -7});
    const Tensor table = run.f32({5, 8}), rows = run.f32({2, 2, 8}), logits = run.f32({2, 3}),
                 loss = run.f32({2});
    fill(run.stream(), rows, 1.5F);
    fill(run.stream(), loss, 1.5F);
    fill(run.stream(), table, 1.5F);
    expect_refused([&] { embedding_forward(run.stream(), tokens, table, {}, rows); });
    expect_refused([&] { embedding_backward(run.stream(), tokens, rows, table, {}); });
    expect_refused([&] { cross_entropy_forward(run.stream(), logits, targets, loss, loss); });
    expect_refused([&] { cross_entropy_backward(run.stream(), logits, targets, loss, 1.0F); });
    for (const Tensor& result : {rows, table, loss}) run.keep(result);
    for (const std::vector<char>& bytes : run.results())
      for (size_t i = 0; i < bytes.size(); i += sizeof(float)) {
        float value = 0;
        std::memcpy(&value, &bytes[i], sizeof value);
        EXPECT_EQ(value, 1.5F);
      }
    return errors;
  };
  fake_gpu::reset(1, 1);
  const auto gpu = make_cuda_device(*polyreme_cuda_table(), 0);
  const auto cpu = make_cpu_device({.num_threads = 1, .isa = "avx2"});
  const std::vector<std::string> errors = texts(*gpu);
  EXPECT_EQ(errors, texts(*cpu));
  EXPECT_EQ(errors[0], "embedding_forward: token 1 is 5; expected 0 to 4");
}

// Each check has words of its own, which are used again.
TEST(GpuOps, ManyChecksAreKeptApart) {
  fake_gpu::reset(1, 3);
  const auto gpu = make_cuda_device(*polyreme_cuda_table(), 0);
  OneDevice run(*gpu, DType::kF32);
  const Tensor good = run.ids({1, 2}, {0, 1}), bad = run.ids({1, 2}, {0, 9});
  const Tensor table = run.f32({2, 4}), rows = run.f32({1, 2, 4});
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 10; ++i) embedding_forward(run.stream(), good, table, {}, rows);
    run.stream().synchronize();
    for (int i = 0; i < 10; ++i) embedding_forward(run.stream(), i == 6 ? bad : good, table, {}, rows);
    EXPECT_THROW(run.stream().synchronize(), InvalidArgument);
    run.stream().synchronize();
  }
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

// Sizes beyond a block of sums, and the scale of a step that is skipped.
TEST(GpuOps, UpdatesOfWholeParameters) {
  expect_same_bits([](OneDevice& run) {
    const float skipped = std::numeric_limits<float>::quiet_NaN();
    for (const int64_t count : {5, 1500, 66001}) {
      const Tensor param = run.f32({count}), grad = run.f32({count}), m = run.f32({count}),
                   v = run.f32({count});
      const Tensor scale = run.f32({1}), sums = run.of(DType::kI64, {2, ExactSum::kLimbs});
      fill(run.stream(), v, 0.5F);
      for (const float factor : {0.5F, skipped}) {
        const AdamWOptions options = {
            .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .step = 4};
        fill(run.stream(), scale, factor);
        for (const int64_t row : {0, 1})
          zero_limbs(run.stream(), sums.slice(0, row, row + 1).view({ExactSum::kLimbs}));
        lamb_moments(run.stream(), param, grad, m, v, scale, options, sums);
        lamb_apply(run.stream(), param, m, v, sums, scale, options);
        for (const Tensor& result : {param, m, v, sums}) run.keep(result);
      }
    }
    for (const Shape& shape : {Shape{3, 7}, Shape{9, 4}, Shape{1, 1}}) {
      const Tensor param = run.f32(shape), grad = run.f32(shape), m = run.f32(shape),
                   direction = run.f32(shape), scale = run.f32({1});
      for (const float factor : {0.5F, skipped}) {
        fill(run.stream(), scale, factor);
        muon_momentum(run.stream(), grad, m, scale, 0.9, direction);
        run.keep(direction);
        orthogonalize(run.stream(), direction);
        muon_apply(run.stream(), param, direction, scale, {.lr = 0.02, .weight_decay = 0.1, .factor = 0.2});
        for (const Tensor& result : {m, direction, param}) run.keep(result);
      }
    }
  });
}

// A planted fault: the emulator says which two operations lack a wait, whatever order they came to run in.
class MissingWaits : public ::testing::Test {
 protected:
  // The violations of `second` on another stream behind `first`, with and without a wait for it.
  std::vector<std::string> violations_of(const std::function<void(Stream&)>& first,
                                         const std::function<void(Stream&)>& second, bool waits) {
    const auto event = gpu_->create_event();
    first(*one_);
    one_->record(*event);
    if (waits) two_->wait(*event);
    second(*two_);
    one_->synchronize();
    two_->synchronize();
    return fake_gpu::violations();
  }
  void expect_found(const std::function<void(Stream&)>& first, const std::function<void(Stream&)>& second,
                    const std::vector<std::string>& either, const std::vector<std::string>& or_else) {
    for (uint64_t seed = 1; seed < 6; ++seed) {
      start(seed);
      EXPECT_EQ(violations_of(first, second, /*waits=*/true), std::vector<std::string>{});
      const std::vector<std::string> found = violations_of(first, second, /*waits=*/false);
      ASSERT_EQ(found.size(), 1U) << "seed " << seed;
      const auto has = [&](const std::vector<std::string>& parts) {
        return std::all_of(parts.begin(), parts.end(),
                           [&](const std::string& part) { return found[0].find(part) != std::string::npos; });
      };
      EXPECT_TRUE(has(either) || has(or_else)) << found[0];
    }
  }
  void start(uint64_t seed) {
    x_ = y_ = {};
    one_ = nullptr;
    two_ = nullptr;
    gpu_ = nullptr;
    fake_gpu::reset(1, seed);
    gpu_ = make_cuda_device(*polyreme_cuda_table(), 0);
    one_ = gpu_->create_stream("one");
    two_ = gpu_->create_stream("two");
    x_ = empty(*gpu_, DType::kF32, {100}, "x");
    y_ = empty(*gpu_, DType::kF32, {100}, "y");
    fill(*one_, x_, 1.0F);
    fill(*one_, y_, 1.0F);
    one_->synchronize();
  }

  std::unique_ptr<CudaDevice> gpu_;
  std::unique_ptr<Stream> one_, two_;
  Tensor x_, y_;
};

TEST_F(MissingWaits, ReadOfWhatIsStillWritten) {
  std::vector<float> host(100);
  expect_found([&](Stream& stream) { fill(stream, x_, 2.0F); },
               [&](Stream& stream) { copy_to_host(stream, x_, host.data()); },
               {"cudaMemcpyAsync of GPU 0, stream 1 reads memory that launch_fill (elementwise.cu:",
                "of GPU 0, stream 0 writes"},
               {"launch_fill (elementwise.cu:", "overwrites memory that cudaMemcpyAsync", "reads"});
}

TEST_F(MissingWaits, OverwriteOfWhatIsStillRead) {
  expect_found([&](Stream& stream) { add(stream, x_, x_, y_); },
               [&](Stream& stream) { fill(stream, x_, 3.0F); },
               {"launch_fill (elementwise.cu:", "overwrites memory that launch_flat", "reads"},
               {"launch_flat", "reads memory that launch_fill", "writes"});
}

TEST_F(MissingWaits, TheHostThatWaitsIsEnough) {
  start(1);
  fill(*one_, x_, 2.0F);
  const auto event = gpu_->create_event();
  one_->record(*event);
  event->synchronize();
  add(*two_, x_, x_, y_);
  two_->synchronize();
  add(*one_, y_, y_, x_);
  one_->synchronize();
  EXPECT_EQ(fake_gpu::violations(), std::vector<std::string>{});
}

TEST(GpuOps, WhatAGpuDoesNotHaveIsRefused) {
  fake_gpu::reset(1, 1);
  const auto gpu = make_cuda_device(*polyreme_cuda_table(), 0);
  OneDevice run(*gpu, DType::kF32);
  const Tensor x = run.f32({8}), sums = run.limbs();
  EXPECT_THROW(add_to_norm(run.stream(), x, 1.0, sums), NotAvailable);
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
