#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/messages/endpoint.h"
#include "comm/messages/group.h"

namespace polyreme {

class ThreadLinks;

// An endpoint among threads, for tests. It keeps to the strict side of the contract: a send ends when its
// receive has taken the bytes, and messages of different peers are served in whatever order they come.
class ThreadEndpoint final : public Endpoint {
 public:
  ThreadEndpoint(std::shared_ptr<ThreadLinks> links, int rank);
  ~ThreadEndpoint() override;
  int rank() const override { return rank_; }
  int size() const override;
  std::string who(int rank) const override;
  void exchange(std::span<const Message> messages, std::chrono::milliseconds limit) override;
  void fail(FailureKind kind, const std::string& text) noexcept override;
  std::unique_ptr<Endpoint> make_subgroup(const std::vector<int>& members, const std::string& name,
                                          std::chrono::milliseconds limit) override;

  // Called at the start of every exchange of this endpoint and of those of its subgroups, if set; what it
  // throws comes out of the exchange.
  std::function<void(ThreadEndpoint&)> on_exchange;
  // Closes the links without a word, as a process does that is killed.
  void close();

 private:
  std::shared_ptr<ThreadLinks> links_;
  int rank_;
};

// The endpoints of a group of `size` ranks, by rank.
std::vector<std::unique_ptr<ThreadEndpoint>> make_thread_endpoints(int size);

}  // namespace polyreme
