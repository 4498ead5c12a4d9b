#include "comm/thread_endpoint.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "comm/collective.h"

namespace polyreme {

using Clock = std::chrono::steady_clock;

// What the ranks of a group share. One lock: tests move little. Who comes second to a message copies it.
class ThreadLinks {
 public:
  struct Rank {
    std::condition_variable changed;
    bool closed = false;
    std::map<int, int> pending;  // messages that have not ended, by peer
    Clock::time_point last_move;
    std::map<std::string, int> num_subgroups;  // made so far, by name and members
  };
  // Messages from one rank to another whose other side has not come yet.
  struct Channel {
    std::deque<const Message*> sends, receives;
  };

  explicit ThreadLinks(int size) : ranks(static_cast<size_t>(size)) {}

  Rank& rank(int r) { return ranks[static_cast<size_t>(r)]; }
  // Throws if the message's other side is there and has another size.
  void post(int self, const Message& message) {
    const bool sends = message.kind == Message::Kind::kSend;
    Channel& channel = channels[sends ? std::pair(self, message.peer) : std::pair(message.peer, self)];
    auto& others = sends ? channel.receives : channel.sends;
    ++rank(self).pending[message.peer];
    if (others.empty()) return (sends ? channel.sends : channel.receives).push_back(&message);
    const Message& other = *others.front();
    others.pop_front();
    if (other.num_bytes != message.num_bytes)
      return break_all(FailureKind::kMismatch,
                       concat("messages of ", message.num_bytes, " and ", other.num_bytes,
                              " bytes meet between ranks ", self, " and ", message.peer));
    std::memcpy(sends ? other.data : message.data, sends ? message.data : other.data,
                static_cast<size_t>(message.num_bytes));
    end(self, message.peer);
    end(message.peer, self);
  }
  // Takes back what `self` has posted and nobody met.
  void withdraw(int self) {
    for (auto& [ranks_of, channel] : channels) {
      if (ranks_of.first == self) channel.sends.clear();
      if (ranks_of.second == self) channel.receives.clear();
    }
    rank(self).pending.clear();
  }
  void break_all(FailureKind kind, const std::string& text) {
    if (failure_kind == FailureKind::kNone) {
      failure_kind = kind;
      failure_text = text;
    }
    wake_all();
  }
  void wake_all() {
    for (Rank& each : ranks) each.changed.notify_all();
  }
  void throw_if_broken() const {
    if (failure_kind != FailureKind::kNone) throw_failure(failure_kind, failure_text);
  }

  std::mutex mutex;
  std::deque<Rank> ranks;
  std::map<std::pair<int, int>, Channel> channels;
  FailureKind failure_kind = FailureKind::kNone;
  std::string failure_text;
  std::map<std::string, std::shared_ptr<ThreadLinks>> subgroups;

 private:
  void end(int self, int peer) {
    Rank& owner = rank(self);
    if (--owner.pending[peer] == 0) owner.pending.erase(peer);
    owner.last_move = Clock::now();
    if (owner.pending.empty()) owner.changed.notify_all();
  }
};

ThreadEndpoint::ThreadEndpoint(std::shared_ptr<ThreadLinks> links, int rank)
    : links_(std::move(links)), rank_(rank) {}

ThreadEndpoint::~ThreadEndpoint() { close(); }

void ThreadEndpoint::close() {
  const std::lock_guard lock(links_->mutex);
  links_->rank(rank_).closed = true;
  links_->wake_all();
}

int ThreadEndpoint::size() const { return static_cast<int>(links_->ranks.size()); }

std::string ThreadEndpoint::who(int rank) const { return concat("rank ", rank, " (host test, pid 1)"); }

void ThreadEndpoint::exchange(std::span<const Message> messages, std::chrono::milliseconds limit) {
  if (on_exchange) on_exchange(*this);
  std::unique_lock lock(links_->mutex);
  links_->throw_if_broken();
  ThreadLinks::Rank& self = links_->rank(rank_);
  self.last_move = Clock::now();
  for (const Message& message : messages) links_->post(rank_, message);
  while (!self.pending.empty() && links_->failure_kind == FailureKind::kNone) {
    std::string late;
    for (const auto& [peer, count] : self.pending) {
      late += concat(late.empty() ? "" : ", ", who(peer));
      if (links_->rank(peer).closed)
        links_->break_all(FailureKind::kPeerLost, concat(who(peer), " closed its links"));
    }
    if (Clock::now() >= self.last_move + limit)
      links_->break_all(FailureKind::kTimeout,
                        concat("waited ", static_cast<double>(limit.count()) / 1000, " s for ", late));
    if (links_->failure_kind == FailureKind::kNone) self.changed.wait_until(lock, self.last_move + limit);
  }
  if (self.pending.empty()) return;
  links_->withdraw(rank_);
  links_->throw_if_broken();
}

void ThreadEndpoint::fail(FailureKind kind, const std::string& text) noexcept {
  const std::lock_guard lock(links_->mutex);
  if (links_->rank(rank_).closed) return;  // reaches nobody
  links_->break_all(kind, text);
}

std::unique_ptr<Endpoint> ThreadEndpoint::make_subgroup(const std::vector<int>& members,
                                                        const std::string& name,
                                                        std::chrono::milliseconds limit) {
  char byte = 0, other = 0;  // all have come, or nobody gets the group
  std::vector<Message> messages;
  for (const int member : members)
    if (member != rank_)
      messages.insert(messages.end(), {{Message::Kind::kSend, member, &byte, 1},
                                       {Message::Kind::kReceive, member, &other, 1}});
  exchange(messages, limit);
  const std::lock_guard lock(links_->mutex);
  ThreadLinks::Rank& self = links_->rank(rank_);
  const std::string key = concat(name, " of ", ranks_text(members));
  std::shared_ptr<ThreadLinks>& links = links_->subgroups[concat(key, " ", ++self.num_subgroups[key])];
  if (!links) links = std::make_shared<ThreadLinks>(static_cast<int>(members.size()));
  const auto place = std::find(members.begin(), members.end(), rank_) - members.begin();
  auto endpoint = std::make_unique<ThreadEndpoint>(links, static_cast<int>(place));
  endpoint->on_exchange = on_exchange;
  return endpoint;
}

std::vector<std::unique_ptr<ThreadEndpoint>> make_thread_endpoints(int size) {
  const auto links = std::make_shared<ThreadLinks>(size);
  std::vector<std::unique_ptr<ThreadEndpoint>> endpoints;
  for (int r = 0; r < size; ++r) endpoints.push_back(std::make_unique<ThreadEndpoint>(links, r));
  return endpoints;
}

}  // namespace polyreme
