#pragma once

#include <memory>
#include <string>

#include "comm/messages/group.h"

namespace polyreme {

// A group whose ranks send each other messages over an Endpoint. The fast mode is the ordered one: a ring
// moves the same bytes in more steps.
class MessageTransport final : public Transport {
 public:
  // parent_ranks: of the group that this one was split from.
  MessageTransport(std::unique_ptr<Endpoint> endpoint, MessageOptions options,
                   std::vector<int> parent_ranks = {})
      : group_(std::make_shared<MessageGroup>(std::move(endpoint), std::move(options))),
        parent_ranks_(std::move(parent_ranks)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->options().name; }
  std::chrono::milliseconds timeout() const override { return group_->options().timeout; }
  CallLedger& ledger() override { return group_->ledger(); }

  void run(const CollectiveCall& call, const CallMemory& memory, std::chrono::milliseconds limit) override;
  std::unique_ptr<Transport> split(const CollectiveCall& call, int color, int key,
                                   const std::string& name) override {
    return split_messages(call, color, key, name);
  }

  void throw_if_failed() const override { group_->throw_if_failed(); }
  void fail(FailureKind kind, const std::string& text) noexcept override { group_->fail(kind, text); }
  void abort(const std::string& text) noexcept override { group_->abort(text); }
  void leave(const std::string& why) noexcept override { group_->leave(why); }
  std::string who(int rank) const override { return group_->who(rank); }

  // For transports that are made of others (HierarchicalTransport).
  const MessageOptions& options() const { return group_->options(); }
  const std::vector<int>& parent_ranks() const { return parent_ranks_; }
  // Waits for all ranks and compares their calls; the first thing that `run` does, too.
  void open(const CollectiveCall& call, std::chrono::milliseconds limit);
  // Whether `run` is done with the call when it is open: each rank's data travel along.
  bool rides(const CollectiveCall& call) const;
  std::unique_ptr<MessageTransport> split_messages(const CollectiveCall& call, int color, int key,
                                                   const std::string& name);

 private:
  std::shared_ptr<MessageGroup> group_;
  std::vector<int> parent_ranks_;
};

}  // namespace polyreme
