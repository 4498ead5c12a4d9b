// kernel_bandwidth [ELEMENTS]: the bandwidth of every memory-bound kernel against that of a device-to-device
// copy, measured in the same run; for machines with GPUs, see scripts/gpu_check.sh. One JSON object a line:
// kernel, dtype, bytes moved, GB/s, and the share of the copy's. The median of several rounds, kernels taking
// turns.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/exact_sum.h"
#include "kernels/cross_entropy.cuh"
#include "kernels/elementwise.cuh"
#include "kernels/embedding.cuh"
#include "kernels/gradient_norm.cuh"
#include "kernels/norm.cuh"
#include "kernels/optimizer.cuh"
#include "kernels/random.cuh"
#include "kernels/rotary.cuh"
#include "kernels/rows.cuh"
#include "kernels/where.h"

namespace {

using namespace polyreme;
constexpr int kRounds = 9;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "kernel_bandwidth: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

struct Case {
  std::string name;
  double bytes;
  std::function<cudaError_t()> launch;
  std::vector<double> seconds = {};
};

// Four arrays of `count` floats, small ones, and everything that the kernels take, filled with what they
// accept.
class Cases {
 public:
  explicit Cases(int64_t count) : count_(count), rows_(std::max<int64_t>(count / kCols, 1)) {
    for (float*& array : arrays_) array = make<float>(count, 0.5F);
    small_ = make<float>(8 * part(), 1.0F);
    check(cudaMalloc(reinterpret_cast<void**>(&ids_), static_cast<size_t>(rows_) * sizeof(int32_t)),
          "cudaMalloc");
    check(cudaMalloc(reinterpret_cast<void**>(&limbs_), ExactSum::kLimbs * sizeof(int64_t)), "cudaMalloc");
    const std::vector<int64_t> zeros(ExactSum::kLimbs);
    check(cudaMemcpy(limbs_, zeros.data(), zeros.size() * sizeof(int64_t), cudaMemcpyHostToDevice),
          "cudaMemcpy");
    std::vector<int32_t> ids(static_cast<size_t>(rows_));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 7919 % kVocab);
    check(cudaMemcpy(ids_, ids.data(), ids.size() * sizeof(int32_t), cudaMemcpyHostToDevice), "cudaMemcpy");
    add_flat();
    for (const DType dtype : {DType::kF32, DType::kBF16}) add_typed(dtype);
  }
  std::vector<Case> cases;

 private:
  static constexpr int64_t kCols = 1024, kVocab = 4096, kHeads = 16;

  template <typename T>
  T* make(int64_t size, float value) {
    T* memory = nullptr;
    check(cudaMalloc(reinterpret_cast<void**>(&memory), static_cast<size_t>(size) * sizeof(T)), "cudaMalloc");
    check(kernels::launch_fill({memory, size, value, static_cast<int32_t>(dtype_of<T>())}, nullptr), "fill");
    return memory;
  }
  // Small arrays follow each other; the first ones stay 1.
  int64_t part() const { return std::max(rows_, kCols); }
  void add(const std::string& name, double bytes_per_element, std::function<cudaError_t()> launch) {
    cases.push_back({name, bytes_per_element * static_cast<double>(count_), std::move(launch)});
  }

  void add_flat() {
    float *a = arrays_[0], *b = arrays_[1], *c = arrays_[2], *d = arrays_[3], *one = small_;
    const int64_t n = count_;
    add("copy", 8, [=] {
      return cudaMemcpyAsync(b, a, static_cast<size_t>(n) * sizeof(float), cudaMemcpyDeviceToDevice, nullptr);
    });
    // Rates of 0: the numbers stay what they are however often it runs.
    const PolyremeUpdate update = {a, b, one, nullptr, 0, 0, n};
    add("adamw", 28, [=] { return kernels::launch_adamw({update, c, d, 0, 1, 0, 1, 1e-8F, 0, 1}, nullptr); });
    add("sgd with momentum", 20, [=] { return kernels::launch_sgd({update, c, 0.5F, 0, 1, 0}, nullptr); });
    add("lion", 20, [=] { return kernels::launch_lion({update, c, 0, 0, 0, 1}, nullptr); });
    add("gradient norm", 4, [=, this] {
      return kernels::launch_gradient_norm({a, nullptr, nullptr, limbs_, n}, nullptr);
    });
    add("unscale, check and norm", 8, [=, this] {
      return kernels::launch_gradient_norm({a, one, reinterpret_cast<int32_t*>(limbs_), limbs_, n}, nullptr);
    });
    add("cast to bfloat16", 6, [=] {
      return kernels::launch_cast({a, b, n, 0, static_cast<int32_t>(DType::kBF16)}, nullptr);
    });
    add("normal numbers", 4, [=] {
      return kernels::launch_fill_normal({b, n, 0, {1, 1, 1, 1}, 0.02F}, nullptr);
    });
  }

  void add_typed(DType type) {
    float *a = arrays_[0], *b = arrays_[1], *c = arrays_[2], *s = small_, *t = small_ + 4 * part();
    const int64_t n = count_, rows = rows_, p = part();
    const auto code = static_cast<int32_t>(type);
    const auto size = static_cast<double>(dtype_size(type));
    const std::string suffix = std::string(", ") + dtype_name(type);
    add("add" + suffix, 3 * size, [=] { return kernels::launch_add({a, b, c, n, code}, nullptr); });
    add("gelu" + suffix, 2 * size, [=] {
      return kernels::launch_gelu_forward({a, nullptr, c, n, code}, nullptr);
    });
    add("gelu backward" + suffix, 3 * size, [=] {
      return kernels::launch_gelu_backward({a, b, c, n, code}, nullptr);
    });
    add("swiglu" + suffix, 1.5 * size, [=] {
      return kernels::launch_swiglu_forward({a, nullptr, c, rows, kCols / 2, code}, nullptr);
    });
    add("swiglu backward" + suffix, 2.5 * size, [=] {
      return kernels::launch_swiglu_backward({a, b, c, rows, kCols / 2, code}, nullptr);
    });
    add("dropout" + suffix, 2 * size, [=] {
      return kernels::launch_dropout({a, c, n, 0, {1, 2, 3, 4}, 1U << 28, 1.0F, code}, nullptr);
    });
    add("layer norm" + suffix, 2 * size, [=] {
      return kernels::launch_norm_forward({a, s, s, c, t, t + p, rows, kCols, 1e-5F, code, 0}, nullptr);
    });
    add("layer norm backward" + suffix, 3 * size, [=] {
      return kernels::launch_norm_backward_input({b, a, s, s, s, c, rows, kCols, code, 0}, nullptr);
    });
    add("rms norm" + suffix, 2 * size, [=] {
      return kernels::launch_norm_forward({a, s, nullptr, c, nullptr, t, rows, kCols, 1e-5F, code, 0},
                                          nullptr);
    });
    add("layer norm weights (chains)" + suffix, 2 * size, [=] {
      return kernels::launch_norm_backward_weight({b, a, s, s, t, t + p, rows, kCols, code}, nullptr);
    });
    add("rows (chains)" + suffix, size, [=] {
      return kernels::launch_accumulate_rows({a, t, rows, kCols, code}, nullptr);
    });
    add("rotary" + suffix, 2 * size, [=] {
      return kernels::launch_rotary({c, s, s, rows, 1, 1, kHeads, kCols / kHeads, kCols, 0, code}, nullptr);
    });
    const PolyremeEmbedding embedding = {ids_, a, nullptr, c, bad(), rows, 1, kCols, kVocab, code};
    if (n >= kVocab * kCols)
      add("embedding" + suffix, 2 * size,
          [=] { return kernels::launch_embedding_forward(embedding, nullptr); });
    if (n >= kVocab * kCols) {
      PolyremeEmbedding backward = embedding;
      backward.token_rows = b;
      add("embedding backward" + suffix, size + 8.0 * kVocab / static_cast<double>(std::max(rows, kVocab)),
          [=] { return kernels::launch_embedding_backward(backward, nullptr); });
    }
    const int64_t tokens = n / kVocab;
    if (tokens == 0) return;
    const PolyremeCrossEntropy loss = {c, ids_, t, t + p, bad(), tokens, kVocab, 0.5F, code};
    add("cross-entropy" + suffix, size, [=] { return kernels::launch_cross_entropy_forward(loss, nullptr); });
    add("cross-entropy backward" + suffix, 2 * size,
        [=] { return kernels::launch_cross_entropy_backward(loss, nullptr); });
  }
  int32_t* bad() const { return reinterpret_cast<int32_t*>(limbs_); }

  const int64_t count_, rows_;
  float* arrays_[4] = {};
  float* small_ = nullptr;
  int32_t* ids_ = nullptr;
  int64_t* limbs_ = nullptr;
};

double seconds_of(const Case& each, cudaEvent_t begin, cudaEvent_t end) {
  check(cudaEventRecord(begin, nullptr), "cudaEventRecord");
  check(each.launch(), each.name.c_str());
  check(cudaEventRecord(end, nullptr), "cudaEventRecord");
  check(cudaEventSynchronize(end), each.name.c_str());
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  kernel_test::start_case(1);
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : int64_t{1} << 26;
  Cases all(count / 4096 * 4096);
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreateWithFlags(&begin, 0), "cudaEventCreate");
  check(cudaEventCreateWithFlags(&end, 0), "cudaEventCreate");
  for (int round = -1; round < kRounds; ++round)  // the first one warms up
    for (Case& each : all.cases) {
      const double seconds = seconds_of(each, begin, end);
      if (round >= 0) each.seconds.push_back(seconds);
    }
  const double copy = all.cases[0].bytes / median(all.cases[0].seconds);
  for (const Case& each : all.cases) {
    const double rate = each.bytes / median(each.seconds);
    std::printf("{\"kernel\": \"%s\", \"bytes\": %.0f, \"gb_per_s\": %.1f, \"of_copy\": %.3f}\n",
                each.name.c_str(), each.bytes, rate * 1e-9, rate / copy);
  }
}
