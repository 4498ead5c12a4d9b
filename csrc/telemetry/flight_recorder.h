#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace polyreme {

// What an operation spends its time on; `bench step` reports time by kind.
enum class OpKind : uint8_t {
  kGemm,
  kAttention,
  kNorm,
  kElementwise,
  kEmbedding,
  kLoss,
  kOptimizer,
  kCollective,
  kCopy,
  kOther,
};
inline constexpr int kNumOpKinds = 10;
// "gemm", "attention", ...
const char* op_kind_name(OpKind kind);

// One executed operation.
struct Span {
  const char* name = "";  // a string literal
  OpKind kind = OpKind::kOther;
  uint32_t stream = 0;    // id of the stream within its device
  uint64_t sequence = 0;  // position in the recorder, from 0
  int64_t start_ns = 0;   // CLOCK_MONOTONIC
  int64_t end_ns = 0;
  double flops = 0;   // model arithmetic, 0 where it is not the point
  int64_t bytes = 0;  // payload of a collective, 0 otherwise
};

// A ring of the last `capacity` spans. Off until `enable`; while off, recording costs one relaxed
// load. Threads may record at once; `spans` is for a moment when nobody records.
class FlightRecorder {
 public:
  explicit FlightRecorder(size_t capacity = 1 << 14);

  void enable(bool on) { enabled_.store(on, std::memory_order_relaxed); }
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void record(Span span);
  // Oldest first, at most `capacity` of them.
  std::vector<Span> spans() const;
  // Spans recorded since `clear`, those that fell out of the ring included.
  uint64_t total() const { return next_.load(std::memory_order_relaxed); }
  void clear();

  static int64_t now_ns();

 private:
  std::atomic<bool> enabled_{false};
  std::atomic<uint64_t> next_{0};
  std::vector<Span> ring_;
};

}  // namespace polyreme
