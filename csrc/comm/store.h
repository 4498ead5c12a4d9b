#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace polyreme {

// A small key-value store of a job, for rendezvous. Keys and values are bytes; keys at most 1 KiB,
// values at most 1 MiB (more is InvalidArgument). Thread-safe; calls of one object run one by one.
// Every call throws PeerLost when the store is gone.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits until the key exists. Throws Timeout naming the key.
  virtual std::string get(const std::string& key, std::chrono::milliseconds limit) = 0;
  // The value if the key exists now.
  virtual std::optional<std::string> try_get(const std::string& key) = 0;
  // Adds to an integer key (0 at first) and returns the sum. Throws InvalidArgument if the key holds
  // something else.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // For people who wait for ranks that do not come: whom the store did not admit. Empty if there is nobody,
  // and where it is not served.
  virtual std::string refusals() const { return ""; }
};

}  // namespace polyreme
