#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace polyreme {

// A small key-value store of a job, for rendezvous. Keys and values are bytes; values at most 1 MiB.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits until the key exists. Throws Timeout naming the key.
  virtual std::string get(const std::string& key, std::chrono::milliseconds limit) = 0;
  // Adds to an integer key (0 at first) and returns the sum.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
};

}  // namespace polyreme
