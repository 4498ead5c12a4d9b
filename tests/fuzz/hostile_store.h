#pragma once

#include <map>

#include "base/error.h"
#include "comm/store.h"
#include "fuzz.h"

namespace polyreme::fuzz {

// A store in which the other ranks wrote what the input says. A get of what is not there times out at once.
class HostileStore final : public Store {
 public:
  explicit HostileStore(FuzzedDataProvider& input) : input_(input) {}

  void set(const std::string& key, const std::string& value) override { values_[key] = value; }
  std::string get(const std::string& key, std::chrono::milliseconds /*limit*/) override {
    const auto value = try_get(key);
    require<Timeout>(value.has_value(), "store key '", key, "' did not appear");
    return *value;
  }
  std::optional<std::string> try_get(const std::string& key) override {
    if (input_.remaining_bytes() > 0 && input_.ConsumeBool()) return input_.ConsumeRandomLengthString();
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    counts_[key] += amount;
    return input_.remaining_bytes() > 0 && input_.ConsumeBool() ? input_.ConsumeIntegral<int8_t>()
                                                                : counts_[key];
  }

 private:
  FuzzedDataProvider& input_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> counts_;
};

}  // namespace polyreme::fuzz
