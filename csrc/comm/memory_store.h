#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "base/error.h"
#include "comm/store.h"

namespace polyreme {

// A store within one process: of ranks that are threads, or of one rank alone.
class MemoryStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    require_alive();
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, std::chrono::milliseconds limit) override {
    std::unique_lock lock(mutex_);
    require<Timeout>(changed_.wait_for(lock, limit, [&] { return lost_ || values_.contains(key); }),
                     "no key '", key, "' in the store");
    require_alive();
    return values_[key];
  }
  std::optional<std::string> try_get(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    require_alive();
    const auto it = values_.find(key);
    return it == values_.end() ? std::nullopt : std::optional(it->second);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const std::lock_guard lock(mutex_);
    require_alive();
    std::string& value = values_[key];
    const int64_t sum = (value.empty() ? 0 : std::stoll(value)) + amount;
    value = std::to_string(sum);
    changed_.notify_all();
    return sum;
  }

  // For tests: every call throws PeerLost from now on.
  void lose() {
    const std::lock_guard lock(mutex_);
    lost_ = true;
    changed_.notify_all();
  }
  size_t num_keys() {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  void require_alive() const { require<PeerLost>(!lost_, "the store is gone"); }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  bool lost_ = false;
};

}  // namespace polyreme
