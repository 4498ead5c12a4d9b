#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "comm/collective.h"

namespace polyreme {

// A CollectiveCall, all of it, in 24 bytes: what is left of a cache line is for the data of a small call. No
// call has both a root and a hash of counts.
struct PackedCall {
  std::array<uint64_t, 3> words;

  bool operator==(const PackedCall&) const = default;

  static PackedCall of(const CollectiveCall& call) {
    const auto kinds = static_cast<uint64_t>(call.dtype) << 4 | static_cast<uint64_t>(call.reduce);
    const uint64_t detail =
        call.op == CollectiveOp::kBroadcast ? static_cast<uint64_t>(call.root) : call.counts_hash;
    return {{call.sequence << 8 | static_cast<uint64_t>(call.op),
             static_cast<uint64_t>(call.count) << 8 | kinds, detail}};
  }
  CollectiveCall unpacked() const {
    CollectiveCall call{.sequence = words[0] >> 8,
                        .count = static_cast<int64_t>(words[1] >> 8),
                        .op = static_cast<CollectiveOp>(words[0] & 0xff),
                        .dtype = static_cast<DType>(words[1] >> 4 & 0xf),
                        .reduce = static_cast<ReduceOp>(words[1] & 0xf)};
    if (call.op == CollectiveOp::kBroadcast) {
      call.root = static_cast<int32_t>(words[2]);
    } else {
      call.counts_hash = words[2];
    }
    return call;
  }
};

// The call that a rank is in: set by the thread that runs it, read by any. A sequence lock, since every call
// passes here and a mutex costs a tenth of a small one.
class CurrentCall {
 public:
  void set(const PackedCall& call) {
    const uint64_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    // Each releases: who reads a new word finds the odd version.
    for (size_t i = 0; i < words_.size(); ++i) words_[i].store(call.words[i], std::memory_order_release);
    version_.store(version + 2, std::memory_order_release);
  }
  PackedCall get() const {
    while (true) {
      const uint64_t version = version_.load(std::memory_order_acquire);
      PackedCall call;
      for (size_t i = 0; i < words_.size(); ++i) call.words[i] = words_[i].load(std::memory_order_acquire);
      if (version % 2 == 0 && version_.load(std::memory_order_relaxed) == version) return call;
    }
  }

 private:
  std::atomic<uint64_t> version_{0};
  std::array<std::atomic<uint64_t>, 3> words_{};
};

}  // namespace polyreme
