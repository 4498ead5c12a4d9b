// Chunks with known numbers: y = x * w + b in fp32, element by element, so that the split chain has the bits
// of the unsplit one. Keeps as much as `peak_activations` and `peak_bytes` say.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "device/cpu/cpu_device.h"
#include "pipeline/schedule/schedule.h"
#include "pipeline/stage_runner.h"
#include "tensor/access.h"

namespace polyreme::testing {

// Micro-batches differ in length.
inline int64_t toy_rows(int micro_batch) { return 3 + micro_batch * 5 % 7; }

inline float toy_weight(int chunk) { return 1.0f + 0.3f * static_cast<float>(chunk + 1); }
inline float toy_input(int micro_batch, int64_t row) {
  return 0.1f * static_cast<float>(micro_batch + 1) - 0.7f * static_cast<float>(row);
}

// What a run computed, by chunk.
struct ToyResult {
  std::map<int, float> weight_grads;
  std::map<int, std::vector<float>> outputs;  // of the last chunk, by micro-batch
  bool operator==(const ToyResult&) const = default;
};

// The unsplit chain, on one thread.
inline ToyResult toy_reference(int num_chunks, int micro_batches, bool forward_only) {
  ToyResult result;
  for (int m = 0; m < micro_batches; ++m) {
    const auto rows = static_cast<size_t>(toy_rows(m));
    std::vector<std::vector<float>> x(1, std::vector<float>(rows));
    for (size_t i = 0; i < rows; ++i) x[0][i] = toy_input(m, static_cast<int64_t>(i));
    for (int c = 0; c < num_chunks; ++c) {
      x.push_back(x.back());
      for (float& value : x.back()) value = value * toy_weight(c) + 0.5f;
    }
    result.outputs[m] = x.back();
    if (forward_only) continue;
    std::vector<float> dy = x.back();
    for (int c = num_chunks - 1; c >= 0; --c) {
      for (size_t i = 0; i < rows; ++i) result.weight_grads[c] += dy[i] * x[static_cast<size_t>(c)][i];
      for (float& value : dy) value *= toy_weight(c);
    }
  }
  return result;
}

struct ToyHooks {
  // Called inside of every operation: may sleep or throw.
  std::function<void(const char* what, int chunk, int micro_batch)> in_operation = [](auto...) {};
  // Called when an operation is enqueued.
  std::function<void(const char* what, int chunk, int micro_batch)> at_call = [](auto...) {};
};

class ToyRunner final : public pipeline::StageRunner {
 public:
  ToyRunner(Stream& stream, const pipeline::Schedule& schedule, ToyHooks hooks = {})
      : stream_(stream),
        last_(schedule.num_chunks() - 1),
        forward_only_(schedule.forward_only),
        hooks_(std::move(hooks)) {}

  Tensor make_boundary(int, int micro_batch, bool) override { return make(micro_batch, "boundary"); }

  Tensor forward(int chunk, int micro_batch, Tensor input) override {
    hooks_.at_call("forward", chunk, micro_batch);
    const Tensor x = make(micro_batch, "saved");
    if (chunk == 0) {
      enqueue("tokens", chunk, micro_batch, {writes(x)}, [x, micro_batch] {
        for (int64_t i = 0; i < x.numel(); ++i) x.address<float>()[i] = toy_input(micro_batch, i);
      });
    } else {
      copy(input, x);
    }
    const Tensor y = chunk == last_ ? allocate(micro_batch, "loss") : make(micro_batch, "output");
    enqueue("forward", chunk, micro_batch, {reads(x), writes(y)}, [x, y, chunk] {
      for (int64_t i = 0; i < x.numel(); ++i)
        y.address<float>()[i] = x.address<float>()[i] * toy_weight(chunk) + 0.5f;
    });
    if (!forward_only_) saved_[{chunk, micro_batch}].x = x;
    peak_ = std::max(peak_, saved_.size());
    if (chunk == last_) outputs_[micro_batch] = y;
    return y;
  }

  // Keeps copies for backward_weight, so that it holds what MemorySizes::kept says.
  Tensor backward_input(int chunk, int micro_batch, Tensor dy) override {
    hooks_.at_call("backward_input", chunk, micro_batch);
    if (chunk == last_) dy = outputs_.at(micro_batch);
    const Tensor dx = input_grad(chunk, micro_batch, dy);
    Kept& kept = saved_.at({chunk, micro_batch});
    const Kept copies{make(micro_batch, "kept x"), make(micro_batch, "kept dy")};
    copy(kept.x, copies.x);
    copy(dy, copies.dy);
    kept = copies;
    return dx;
  }

  void backward_weight(int chunk, int micro_batch) override {
    hooks_.at_call("backward_weight", chunk, micro_batch);
    const Kept kept = saved_.at({chunk, micro_batch});
    saved_.erase({chunk, micro_batch});
    weight_grad(chunk, micro_batch, kept.x, kept.dy);
  }

  Tensor backward(int chunk, int micro_batch, Tensor dy) override {
    hooks_.at_call("backward", chunk, micro_batch);
    if (chunk == last_) dy = outputs_.at(micro_batch);
    const Tensor dx = input_grad(chunk, micro_batch, dy);
    weight_grad(chunk, micro_batch, saved_.at({chunk, micro_batch}).x, dy);
    saved_.erase({chunk, micro_batch});
    return dx;
  }

  // Waits.
  ToyResult result() {
    stream_.synchronize();
    ToyResult result;
    const auto read = [](const Tensor& t) {
      const HostMapping mapping(t.buffer());
      return std::vector<float>(t.address<float>(), t.address<float>() + t.numel());
    };
    for (const auto& [chunk, grad] : grads_) result.weight_grads[chunk] = read(grad)[0];
    for (const auto& [micro_batch, y] : outputs_) result.outputs[micro_batch] = read(y);
    return result;
  }
  // The most (chunk, micro-batch) pairs that were kept for a backward.
  int peak() const { return static_cast<int>(peak_); }
  bool is_empty() const { return saved_.empty(); }
  // Memory for all tensors but losses and weight gradients comes from here, if given.
  std::function<Tensor(int micro_batch)> counted_memory;

 private:
  struct Kept {
    Tensor x, dy;
  };

  Tensor allocate(int micro_batch, const char* label) {
    return empty(stream_.device(), DType::kF32, {toy_rows(micro_batch)}, label);
  }
  Tensor make(int micro_batch, const char* label) {
    return counted_memory ? counted_memory(micro_batch) : allocate(micro_batch, label);
  }
  void copy(const Tensor& from, const Tensor& to) {
    enqueue("copy", -1, -1, {reads(from), writes(to)},
            [from, to] { std::copy_n(from.address<float>(), from.numel(), to.address<float>()); });
  }
  Tensor input_grad(int chunk, int micro_batch, const Tensor& dy) {
    if (chunk == 0) return {};
    const Tensor dx = make(micro_batch, "grad");
    enqueue("backward_input", chunk, micro_batch, {reads(dy), writes(dx)}, [dy, dx, chunk] {
      for (int64_t i = 0; i < dy.numel(); ++i)
        dx.address<float>()[i] = dy.address<float>()[i] * toy_weight(chunk);
    });
    return dx;
  }
  void weight_grad(int chunk, int micro_batch, const Tensor& x, const Tensor& dy) {
    Tensor& grad = grads_[chunk];
    if (!grad.defined()) {
      grad = empty(stream_.device(), DType::kF32, {1}, "weight grad");
      enqueue("zero", chunk, micro_batch, {writes(grad)}, [grad = grad] { *grad.address<float>() = 0; });
    }
    enqueue("backward_weight", chunk, micro_batch, {reads(x), reads(dy), writes(grad)}, [x, dy, grad = grad] {
      for (int64_t i = 0; i < x.numel(); ++i)
        *grad.address<float>() += dy.address<float>()[i] * x.address<float>()[i];
    });
  }
  void enqueue(const char* what, int chunk, int micro_batch, std::vector<Access> accesses,
               std::function<void()> body) {
    as_cpu(stream_).enqueue({what}, std::move(accesses), [=, hooks = hooks_](const CpuContext&) {
      hooks.in_operation(what, chunk, micro_batch);
      body();
    });
  }

  Stream& stream_;
  int last_;
  bool forward_only_;
  ToyHooks hooks_;
  std::map<std::pair<int, int>, Kept> saved_;
  std::map<int, Tensor> grads_, outputs_;
  size_t peak_ = 0;
};

}  // namespace polyreme::testing
