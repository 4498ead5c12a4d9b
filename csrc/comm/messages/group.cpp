#include "comm/messages/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace polyreme {
namespace {

// Whoever waits in an earlier step of a dissemination waits for fewer ranks: it times out first, so that it
// is the one to name the culprit.
constexpr auto kStepGrace = std::chrono::milliseconds(50);

// Groups of so many ranks receive a chunk from every rank at a time, larger ones as many bytes in all.
// Over the loopback interface messages of 128 KiB took 1.5 times as long as the same bytes in 256 KiB each.
constexpr int kMaxStagedChunks = 8;

}  // namespace

MessageGroup::MessageGroup(std::unique_ptr<Endpoint> endpoint, MessageOptions options)
    : endpoint_(std::move(endpoint)),
      rank_(endpoint_->rank()),
      size_(endpoint_->size()),
      options_(std::move(options)),
      pid_(getpid()),
      openings_(static_cast<size_t>(2 * size_)) {}

MessageGroup::~MessageGroup() { leave("its communicator was destroyed"); }

void MessageGroup::begin(const CollectiveCall& call, std::chrono::milliseconds limit) {
  throw_if_failed();
  {
    const std::lock_guard lock(call_mutex_);
    call_ = call;
  }
  limit_ = limit;
}

void MessageGroup::open() {
  if (size_ == 1) return;
  opening_ = true;
  const std::vector<CollectiveCall> calls = is_direct() ? exchange_calls() : disseminate_calls();
  opening_ = false;
  if (std::any_of(calls.begin(), calls.end(), [&](const CollectiveCall& call) { return call != call_; }))
    fail_and_throw(FailureKind::kMismatch,
                   concat("the ranks called different collectives: ", mismatch_text(calls)));
  last_opened_ = CallLedger::mark_of(call_);
}

std::vector<CollectiveCall> MessageGroup::exchange_calls() {
  std::vector<Message> messages;
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    sent(peer).call = call_;
    received(peer).magic = 0;
    messages.push_back({Message::Kind::kSend, peer, &sent(peer), sizeof(Opening)});
    messages.push_back({Message::Kind::kReceive, peer, &received(peer), sizeof(Opening)});
  }
  exchange(messages);
  std::vector<CollectiveCall> calls;
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && received(r).magic != Opening::kMagic)
      fail_and_throw(FailureKind::kMismatch,
                     concat(who(r), " sent something else than the opening of a call; ",
                            "all ranks need the same version of this library"));
    calls.push_back(r == rank_ ? call_ : received(r).call);
  }
  return calls;
}

std::vector<CollectiveCall> MessageGroup::disseminate_calls() {
  std::vector<CollectiveCall> calls(static_cast<size_t>(size_));
  calls[static_cast<size_t>(rank_)] = call_;
  gather(calls.data(), sizeof(CollectiveCall));
  return calls;
}

// Directly, or as in Bruck's concatenation (Bruck et al., 1997, section 3.1): in step k a rank, which has the
// blocks of itself and the 2^k - 1 ranks after it, sends them 2^k ranks back and receives as many.
void MessageGroup::gather(void* blocks, int64_t block_bytes) {
  auto* all = static_cast<char*>(blocks);
  std::vector<Message> messages;
  if (is_direct()) {
    for (int i = 1; i < size_; ++i) {
      const int peer = (rank_ + i) % size_;
      messages.push_back({Message::Kind::kSend, peer, all + rank_ * block_bytes, block_bytes});
      messages.push_back({Message::Kind::kReceive, peer, all + peer * block_bytes, block_bytes});
    }
    return exchange(messages);
  }
  std::vector<char> rotated(static_cast<size_t>(size_ * block_bytes));  // from this rank on
  std::memcpy(rotated.data(), all + rank_ * block_bytes, static_cast<size_t>(block_bytes));
  auto limit = limit_;
  for (int distance = 1; distance < size_; distance *= 2, limit += kStepGrace) {
    const int64_t bytes = std::min(distance, size_ - distance) * block_bytes;
    messages = {{Message::Kind::kSend, (rank_ - distance + size_) % size_, rotated.data(), bytes},
                {Message::Kind::kReceive, (rank_ + distance) % size_, rotated.data() + distance * block_bytes,
                 bytes}};
    exchange(messages, limit);
  }
  const int64_t tail_bytes = (size_ - rank_) * block_bytes;
  std::memcpy(all + rank_ * block_bytes, rotated.data(), static_cast<size_t>(tail_bytes));
  std::memcpy(all, rotated.data() + tail_bytes, static_cast<size_t>(rank_ * block_bytes));
}

void MessageGroup::exchange(std::span<const Message> messages, std::chrono::milliseconds limit) {
  throw_if_failed();
  if (messages.empty()) return;
  try {
    return endpoint_->exchange(messages, limit);
  } catch (const Timeout& failure) {
    fail(FailureKind::kTimeout, failure.what() + unseen_text());
  } catch (const CollectiveMismatch& failure) {
    fail(FailureKind::kMismatch, failure.what());
  } catch (const CommError& failure) {
    fail(FailureKind::kPeerLost, failure.what() + unseen_text());
  }
  throw_if_failed();
}

// What is known of the ranks that have not come to the call that is being opened.
std::string MessageGroup::unseen_text() {
  if (!opening_ || !is_direct()) return {};
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && received(r).magic == 0) ranks.push_back(r);
  if (ranks.empty()) return {};
  return concat("; ", ranks_text(ranks), " did not come to this call and last came to ",
                mark_text(last_opened_));
}

std::span<char> MessageGroup::staging() {
  const int64_t bytes =
      std::max(options_.chunk_bytes * std::clamp(size_, 2, kMaxStagedChunks), int64_t{64} * size_);
  if (!staging_) staging_ = std::make_unique<char[]>(static_cast<size_t>(bytes));
  return {staging_.get(), static_cast<size_t>(bytes)};
}

std::unique_ptr<Endpoint> MessageGroup::make_subgroup(const std::vector<int>& members,
                                                      const std::string& name) {
  try {
    return endpoint_->make_subgroup(members, name, limit_);
  } catch (const Timeout& failure) {
    fail(FailureKind::kTimeout, failure.what());
  } catch (const CommError& failure) {
    fail(FailureKind::kPeerLost, failure.what());
  }
  throw_if_failed();
  return nullptr;
}

void MessageGroup::add_subgroup(const std::shared_ptr<MessageGroup>& subgroup) {
  const std::lock_guard lock(mutex_);
  std::erase_if(subgroups_, [](const std::weak_ptr<MessageGroup>& each) { return each.expired(); });
  subgroups_.push_back(subgroup);
}

void MessageGroup::throw_if_failed() const {
  FailureKind kind;
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    if (failure_kind_ == FailureKind::kNone) return;
    kind = failure_kind_;
    text = failure_text_;
  }
  throw_failure(kind, concat(where(), ": ", text));
}

bool MessageGroup::note_failure(FailureKind kind, const std::string& text) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_kind_ != FailureKind::kNone) return false;
  failure_kind_ = kind;
  try {
    failure_text_ = text;
  } catch (const std::exception&) {  // out of memory: the kind must do
  }
  return true;
}

void MessageGroup::fail(FailureKind kind, const std::string& text) noexcept {
  if (note_failure(kind, text)) endpoint_->fail(kind, text);
}

void MessageGroup::fail_and_throw(FailureKind kind, const std::string& text) {
  fail(kind, text);
  throw_if_failed();
  std::abort();  // it has failed
}

void MessageGroup::abort(const std::string& text) noexcept {
  fail(FailureKind::kPeerLost, text);
  const std::lock_guard lock(mutex_);
  for (const std::weak_ptr<MessageGroup>& subgroup : subgroups_)
    if (const auto alive = subgroup.lock()) alive->abort(text);
}

void MessageGroup::leave(const std::string& why) noexcept {
  // A forked child that is torn down must not take its parent out of the group.
  if (getpid() != pid_ || left_.exchange(true)) return;
  try {
    for (const CallLedger::Line* line : {&ledger_.collectives, &ledger_.exchanges})
      if (line->owes())
        fail(FailureKind::kPeerLost,
             concat(who(rank_), " left the group: ", why, " before ", mark_text(line->posted), " had run"));
  } catch (const std::exception&) {
    fail(FailureKind::kPeerLost, "a rank left the group");  // out of memory for the text
  }
}

std::string MessageGroup::where() const {
  std::string text = concat("group '", options_.name, "', rank ", rank_);
  const std::lock_guard lock(call_mutex_);
  if (call_.op != CollectiveOp::kNone) text += concat(", ", call_.to_string(), ", sequence ", call_.sequence);
  return text;
}

}  // namespace polyreme
