#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "comm/messages/endpoint.h"
#include "comm/transport.h"

namespace polyreme {

struct MessageOptions {
  std::string name;
  std::chrono::milliseconds timeout{0};
  int64_t chunk_bytes = int64_t{256} << 10;  // staging is a few of them, see group.cpp
  // Up to this many ranks a call is opened by direct messages between all of them, and small data travels
  // with them: one step. Larger groups need log2(size) steps.
  int max_direct_ranks = 32;
  // Groups of a power of two and at least so many ranks reduce slices of up to so many bytes by halving.
  int min_halving_ranks = 16;
  int64_t max_halving_bytes = int64_t{64} << 10;
};

// The first message of a call to each peer, and of each tensor of an exchange. All have one size, so that
// calls that differ are seen as that; it fits into one Ethernet frame.
struct Opening {
  static constexpr int64_t kPayloadBytes = 984;
  static constexpr uint64_t kMagic = 0x31304d454d4c5950;  // "PYLMEM01"
  uint64_t magic = kMagic;
  CollectiveCall call;
  char payload[kPayloadBytes] = {};
};
static_assert(sizeof(Opening) == 1024);

// One rank's side of a group over messages: how calls are opened, and everything that can go wrong.
//
// `open` compares the calls of all ranks; user memory may be written only after it. Every function but
// `fail`, `abort` and `leave` belongs to one thread at a time.
class MessageGroup {
 public:
  MessageGroup(std::unique_ptr<Endpoint> endpoint, MessageOptions options);
  ~MessageGroup();
  MessageGroup(const MessageGroup&) = delete;
  MessageGroup& operator=(const MessageGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const MessageOptions& options() const { return options_; }
  CallLedger& ledger() { return ledger_; }

  // Of the call that begins: what errors name, and how long a wait without progress may last.
  void begin(const CollectiveCall& call, std::chrono::milliseconds limit);
  // Waits until every rank has come to the call that began. Throws CollectiveMismatch on all of them if
  // their calls differ.
  void open();
  // Whether `bytes` bytes for each peer can travel with the opening: into `outgoing` before it,
  // from `incoming` after it.
  bool rides(int64_t bytes) const { return is_direct() && bytes <= Opening::kPayloadBytes; }
  char* outgoing(int peer) { return sent(peer).payload; }
  const char* incoming(int peer) { return received(peer).payload; }
  // Space for one opening to and from each peer; those of an exchange use it too.
  Opening& sent(int peer) { return openings_[static_cast<size_t>(peer)]; }
  Opening& received(int peer) { return openings_[static_cast<size_t>(size_) + static_cast<size_t>(peer)]; }

  // Runs the messages. Throws PeerLost, Timeout or CollectiveMismatch; the group is broken then.
  void exchange(std::span<const Message> messages) { exchange(messages, limit_); }
  // Every rank learns the block of every rank; block rank() of `blocks` is its own, and already there.
  void gather(void* blocks, int64_t block_bytes);
  // What is received before it is reduced; of one size, allocated at the first call. 64 bytes for each rank,
  // or more.
  std::span<char> staging();
  // Links between `members` alone; see Endpoint::make_subgroup.
  std::unique_ptr<Endpoint> make_subgroup(const std::vector<int>& members, const std::string& name);
  void add_subgroup(const std::shared_ptr<MessageGroup>& subgroup);

  void throw_if_failed() const;
  void fail(FailureKind kind, const std::string& text) noexcept;
  [[noreturn]] void fail_and_throw(FailureKind kind, const std::string& text);
  void abort(const std::string& text) noexcept;
  void leave(const std::string& why) noexcept;
  std::string who(int rank) const { return endpoint_->who(rank); }
  // "group 'world', rank 0, all_reduce float32[4] sum, sequence 7"
  std::string where() const;

 private:
  bool is_direct() const { return size_ <= options_.max_direct_ranks; }
  void exchange(std::span<const Message> messages, std::chrono::milliseconds limit);
  std::vector<CollectiveCall> exchange_calls();
  std::vector<CollectiveCall> disseminate_calls();
  std::string unseen_text();
  // False if the group was broken before.
  bool note_failure(FailureKind kind, const std::string& text) noexcept;

  std::unique_ptr<Endpoint> endpoint_;
  int rank_;
  int size_;
  MessageOptions options_;
  int64_t pid_;
  CallLedger ledger_{};
  std::vector<Opening> openings_;  // to each peer, then from each peer
  std::unique_ptr<char[]> staging_;

  mutable std::mutex call_mutex_;  // where() comes from the thread that issues, too
  CollectiveCall call_;
  std::chrono::milliseconds limit_{0};
  bool opening_ = false;
  std::atomic<uint64_t> last_opened_{0};  // mark of the last call that all ranks came to

  std::atomic<bool> left_{false};
  mutable std::mutex mutex_;  // of what follows
  FailureKind failure_kind_ = FailureKind::kNone;
  std::string failure_text_;
  std::vector<std::weak_ptr<MessageGroup>> subgroups_;
};

}  // namespace polyreme
