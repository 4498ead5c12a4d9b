#include "telemetry/flight_recorder.h"

#include <time.h>

#include <algorithm>

namespace polyreme {

const char* op_kind_name(OpKind kind) {
  static constexpr std::array<const char*, kNumOpKinds> kNames = {
      "gemm", "attention", "norm",       "elementwise", "embedding",
      "loss", "optimizer", "collective", "copy",        "other"};
  return kNames[static_cast<size_t>(kind)];
}

FlightRecorder::FlightRecorder(size_t capacity) : ring_(std::max<size_t>(capacity, 1)) {}

void FlightRecorder::record(Span span) {
  span.sequence = next_.fetch_add(1, std::memory_order_relaxed);
  ring_[span.sequence % ring_.size()] = span;
}

std::vector<Span> FlightRecorder::spans() const {
  const uint64_t end = total();
  const uint64_t begin = end > ring_.size() ? end - ring_.size() : 0;
  std::vector<Span> result;
  result.reserve(end - begin);
  for (uint64_t i = begin; i < end; ++i) result.push_back(ring_[i % ring_.size()]);
  return result;
}

void FlightRecorder::clear() { next_.store(0, std::memory_order_relaxed); }

int64_t FlightRecorder::now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

}  // namespace polyreme
