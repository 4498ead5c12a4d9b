#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/hierarchical/hosts.h"
#include "comm/messages/message_transport.h"
#include "comm/tree.h"

namespace polyreme {

// Ranks on several hosts, which move data over shared memory inside a host and over messages between hosts.
//
// Three groups: *flat*, over messages between all ranks; *host*, of the ranks of this rank's host; *cross*,
// of the ranks of equal number on their hosts. Every call is opened in `flat`, where calls are compared and
// small data rides along. Large all_reduce, reduce_scatter, all_gather and broadcast then go through host and
// cross: of ranks_per_host copies that would cross the network, one does. The ranks of a host are a subtree
// of the reduction, so the bits are those of any other transport. Everything else is a matter of `flat`, and
// so is every call if the ranks are not in such a grid (see host_grid).
//
// A failure of one of the groups breaks all three.
class HierarchicalTransport final : public Transport {
 public:
  // hosts[r]: a number of the host of rank r. `host` has the ranks of this one, in order of rank, and may be
  // null where host_grid(hosts) is. Collective over `flat`; opens `host`.
  static std::unique_ptr<HierarchicalTransport> make(std::unique_ptr<MessageTransport> flat,
                                                     std::unique_ptr<Transport> host, std::vector<int> hosts);

  int rank() const override { return flat_->rank(); }
  int size() const override { return flat_->size(); }
  const std::string& name() const override { return flat_->name(); }
  std::chrono::milliseconds timeout() const override { return flat_->timeout(); }
  CallLedger& ledger() override { return flat_->ledger(); }

  void run(const CollectiveCall& call, const CallMemory& memory, std::chrono::milliseconds limit) override;
  std::unique_ptr<Transport> split(const CollectiveCall& call, int color, int key,
                                   const std::string& name) override;

  // What the ranks of a host read of each other.
  std::shared_ptr<void> allocate(size_t size_bytes) override {
    return host_ ? host_->allocate(size_bytes) : nullptr;
  }

  void throw_if_failed() const override { flat_->throw_if_failed(); }
  void fail(FailureKind kind, const std::string& text) noexcept override;
  void abort(const std::string& text) noexcept override;
  void leave(const std::string& why) noexcept override;
  std::string who(int rank) const override { return flat_->who(rank); }

 private:
  HierarchicalTransport() = default;

  void dispatch(const CollectiveCall& call, const CallMemory& memory);
  // Runs `body`; what it throws breaks all groups.
  void guard(const std::function<void()>& body);
  // Runs a call of an inner group.
  void run_inner(Transport& group, const CollectiveCall& call, const CallMemory& memory);

  void all_reduce(const CollectiveCall& call, char* data);
  void reduce_scatter(const CollectiveCall& call, const char* input, char* output);
  void all_gather(const CollectiveCall& call, const CallMemory& memory);
  void broadcast(const CollectiveCall& call, char* data);
  // At least `bytes` bytes, kept.
  char* scratch(int64_t bytes);

  std::unique_ptr<MessageTransport> flat_;
  std::unique_ptr<Transport> host_, cross_;  // null without a grid
  std::vector<int> hosts_;
  std::optional<HostGrid> grid_;
  std::chrono::milliseconds limit_{0};
  std::vector<char> scratch_;
};

}  // namespace polyreme
