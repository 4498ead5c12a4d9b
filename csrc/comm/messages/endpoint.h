#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/failure.h"

namespace polyreme {

// One message of an exchange: `num_bytes` bytes at `data`, to or from `peer`, another rank of the group.
struct Message {
  enum class Kind : uint8_t { kSend, kReceive };
  Kind kind = Kind::kSend;
  int peer = 0;
  void* data = nullptr;  // only read by a send
  int64_t num_bytes = 0;
};

// One rank's links to the other ranks of a group: all that tells transports over messages apart.
//
// The n-th message that is sent to a peer is the n-th that the peer receives from this rank, and must be
// of equal size there (CollectiveMismatch otherwise). Whether a send can end before its receive begins
// is not said: what depends on each other belongs into one exchange.
//
// `exchange` and `make_subgroup` belong to one thread at a time, `fail` to any.
class Endpoint {
 public:
  // Closes the links. A peer that still needs one gets PeerLost.
  virtual ~Endpoint() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // "rank 2 (host a, pid 123)"
  virtual std::string who(int rank) const = 0;
  // Runs all messages to their end, at once and in any order between different peers. Throws Timeout,
  // naming the peers, when none of the bytes has moved for `limit`; PeerLost; or what `fail` was told,
  // here or on another rank. After any of them the endpoint is broken and throws it again.
  virtual void exchange(std::span<const Message> messages, std::chrono::milliseconds limit) = 0;
  // Breaks this endpoint, and those of the peers as far as they can be reached. The first failure wins.
  virtual void fail(FailureKind kind, const std::string& text) noexcept = 0;
  // Links of their own between `members`, ranks of this group in the order of the new one. Called by the
  // members and nobody else, who exchange what they need over this endpoint. Blocks up to `limit`.
  virtual std::unique_ptr<Endpoint> make_subgroup(const std::vector<int>& members, const std::string& name,
                                                  std::chrono::milliseconds limit) = 0;
};

}  // namespace polyreme
