#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/shared_memory/exchange.h"
#include "comm/shared_memory/group.h"
#include "comm/shared_memory/memory.h"
#include "comm/transport.h"

namespace polyreme {

// A group whose ranks share memory: threads of one process, or processes of one host. The fast mode is the
// ordered one: the ranks move the same bytes either way.
class SharedTransport final : public Transport {
 public:
  SharedTransport(std::shared_ptr<SharedGroup> group, std::shared_ptr<SharedMemorySource> source,
                  int64_t chunk_bytes)
      : group_(std::move(group)), source_(std::move(source)), chunk_bytes_(chunk_bytes), exchange_(*group_) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->options().name; }
  std::chrono::milliseconds timeout() const override { return group_->options().timeout; }
  CallLedger& ledger() override { return group_->ledger(); }

  void run(const CollectiveCall& call, const CallMemory& memory, std::chrono::milliseconds limit) override;
  std::unique_ptr<Transport> split(const CollectiveCall& call, int color, int key,
                                   const std::string& name) override;

  std::shared_ptr<void> allocate(size_t size_bytes) override {
    return group_->peer_memory() ? group_->peer_memory()->allocate(size_bytes) : nullptr;
  }

  void throw_if_failed() const override { group_->throw_if_failed(); }
  void fail(FailureKind kind, const std::string& text) noexcept override { group_->fail(kind, text); }
  void abort(const std::string& text) noexcept override { group_->abort(text); }
  void leave(const std::string& why) noexcept override { group_->leave(why); }
  std::string who(int rank) const override { return group_->who(rank); }

 private:
  std::unique_ptr<Transport> join_child(const std::string& segment_name, const std::vector<int>& members,
                                        const std::string& name);
  void move(const CollectiveCall& call, const CallMemory& memory);
  void share_heap();

  std::shared_ptr<SharedGroup> group_;
  std::shared_ptr<SharedMemorySource> source_;
  int64_t chunk_bytes_;
  Exchange exchange_;
};

}  // namespace polyreme
