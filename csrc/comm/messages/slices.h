#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/math.h"
#include "comm/blocks.h"
#include "comm/messages/group.h"

namespace polyreme {

// A vector in contiguous slices, one for each rank. In elements.
class Slices {
 public:
  // Slices of `count` elements.
  static Slices equal(int size, int64_t count) { return Slices(size, size * count, count); }
  // Of `total` elements; the last ones are shorter, or empty.
  static Slices of(int size, int64_t total) { return Slices(size, total, ceil_div(total, size)); }
  static Slices of_counts(std::span<const int64_t> counts) {
    Slices slices;
    for (const int64_t count : counts) slices.begin_.push_back(slices.begin_.back() + count);
    return slices;
  }

  int size() const { return static_cast<int>(begin_.size()) - 1; }
  int64_t begin(int r) const { return begin_[static_cast<size_t>(r)]; }
  int64_t count(int r) const { return begin(r + 1) - begin(r); }
  // Of the part [from, from + length) of slice r.
  int64_t count_within(int r, int64_t from, int64_t length) const {
    return std::clamp<int64_t>(count(r) - from, 0, length);
  }
  int64_t max_count() const {
    int64_t most = 0;
    for (int r = 0; r < size(); ++r) most = std::max(most, count(r));
    return most;
  }

 private:
  Slices() : begin_(1, 0) {}
  Slices(int size, int64_t total, int64_t step) : Slices() {
    for (int r = 1; r <= size; ++r) begin_.push_back(std::min(r * step, total));
  }
  std::vector<int64_t> begin_;
};

// Messages that run at once. Empty ones are left out; both sides know that they are empty.
class Batch {
 public:
  void send(int peer, const void* data, int64_t num_bytes) {
    if (num_bytes > 0) messages_.push_back({Message::Kind::kSend, peer, const_cast<void*>(data), num_bytes});
  }
  void receive(int peer, void* data, int64_t num_bytes) {
    if (num_bytes > 0) messages_.push_back({Message::Kind::kReceive, peer, data, num_bytes});
  }
  void run(MessageGroup& group) {
    group.exchange(messages_);
    messages_.clear();
  }

 private:
  std::vector<Message> messages_;
};

}  // namespace polyreme
