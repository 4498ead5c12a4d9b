#include "comm/mpi/mpi_endpoint.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <mutex>
#include <optional>
#include <thread>

#include "base/fork.h"
#include "base/interrupt.h"
#include "comm/collective.h"
#include "comm/mpi/mpi_table.h"
#include "comm/shared_memory/process.h"
#include "device/backend_library.h"

namespace polyreme {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr BackendKind kMpiBackend{
    .name = "MPI",
    .file_name = "libpolyreme_mpi.so",
    .symbol = POLYREME_MPI_TABLE_SYMBOL,
    .version = POLYREME_MPI_TABLE_VERSION,
    .size_bytes = sizeof(PolyremeMpiTable),
    .build_remedy = "to use it, install Open MPI with its headers (libopenmpi-dev)",
};

const PolyremeMpiTable& load_mpi() {
  const BackendLibrary library = open_backend(kMpiBackend, backend_path(kMpiBackend));
  require<NotAvailable>(library.table != nullptr, library.message);
  return *static_cast<const PolyremeMpiTable*>(library.table);
}

// A waiting rank polls; the longer it has waited, the more it leaves the CPU to others.
constexpr microseconds kSpin{50};
constexpr milliseconds kYield{2};
constexpr microseconds kNap{100};
// A rank that left has sent all that it owed; so long that may take to arrive.
constexpr milliseconds kTimeToArrive{200};
// How long the others' news have to go out when the endpoint is closed.
constexpr milliseconds kTimeToTell{500};

// Of a group: data has this tag, news the next one.
constexpr int32_t kTagsPerGroup = 2;
constexpr int32_t kLobbyTag = 0;  // where the world's ranks meet before they have a group

// What a rank tells all others apart from the order of messages.
struct News {
  FailureKind kind = FailureKind::kNone;  // kNone: it has left
  char text[2044] = {};
};
// A message of news and its memory, which may have to outlive the endpoint.
struct Letter {
  News news;
  PolyremeMpiBatch* batch = nullptr;
};

// What a rank tells when a group is made.
struct Introduction {
  int64_t pid = 0;
  int32_t next_tag = 0;
  char host[84] = {};
};

// A rank of a group.
struct Member {
  int32_t world_rank;
  std::string host;
  int64_t pid = 0;
};

class MpiEndpoint final : public Endpoint {
 public:
  MpiEndpoint(const PolyremeMpiTable& table, int32_t max_tag, std::vector<Member> members, int rank,
              int32_t tag)
      : table_(table), max_tag_(max_tag), members_(std::move(members)), rank_(rank), tag_(tag) {}
  ~MpiEndpoint() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::string who(int rank) const override {
    const Member& member = members_[static_cast<size_t>(rank)];
    return rank_text(rank, member.world_rank, member.host, member.pid);
  }
  void exchange(std::span<const Message> messages, milliseconds limit) override;
  void fail(FailureKind kind, const std::string& text) noexcept override;
  std::unique_ptr<Endpoint> make_subgroup(const std::vector<int>& members, const std::string& name,
                                          milliseconds limit) override;

  // Exchanges introductions with `members` and takes tags that none of them uses.
  std::unique_ptr<MpiEndpoint> open_group(const std::vector<int>& members, milliseconds limit);
  // Waits for news from now on. Without it the endpoint is closed without a word.
  void listen();

 private:
  struct Failure {
    FailureKind kind;
    std::string text;
  };
  int rank_of(int32_t world_rank) const;
  void run(PolyremeMpiBatch* batch, milliseconds limit);
  void wait(Clock::duration idle) const;
  void read_news();
  void look_for_departed(PolyremeMpiBatch* batch, Clock::duration idle);
  std::vector<int> awaited(PolyremeMpiBatch* batch) const;
  std::string names(const std::vector<int>& ranks) const;
  void tell_all(FailureKind kind, const std::string& text);
  void check(const PolyremeMpiStatus& status, int32_t peer);
  void throw_if_failed();
  [[noreturn]] void fail_and_throw(FailureKind kind, const std::string& text);

  const PolyremeMpiTable& table_;
  const int32_t max_tag_;
  const std::vector<Member> members_;
  const int rank_;
  const int32_t tag_;
  ForkGuard fork_guard_;

  std::unique_ptr<Letter> inbox_;
  std::vector<int> departed_;

  std::mutex mutex_;  // of what follows
  std::optional<Failure> failure_;
  std::list<std::unique_ptr<Letter>> sent_;
};

int MpiEndpoint::rank_of(int32_t world_rank) const {
  for (int r = 0; r < size(); ++r)
    if (members_[static_cast<size_t>(r)].world_rank == world_rank) return r;
  return -1;
}

void MpiEndpoint::listen() {
  if (size() == 1) return;
  if (!inbox_) inbox_ = std::make_unique<Letter>();
  const PolyremeMpiMessage message{0, -1, tag_ + 1, 1, &inbox_->news, sizeof(News)};
  check(table_.post(&message, 1, &inbox_->batch), -1);
}

MpiEndpoint::~MpiEndpoint() {
  if (fork_guard_.is_inherited()) return;  // MPI is the parent's
  try {
    if (!failure_ && inbox_) tell_all(FailureKind::kNone, "");
    const Clock::time_point deadline = Clock::now() + kTimeToTell;
    for (const auto& letter : sent_) {
      PolyremeMpiProgress progress{.num_left = 1};
      while (table_.test(letter->batch, &progress).code == POLYREME_MPI_SUCCESS && progress.num_left > 0 &&
             Clock::now() < deadline)
        std::this_thread::yield();
    }
  } catch (const std::exception&) {  // they will miss this rank
  }
  if (inbox_) sent_.push_back(std::move(inbox_));
  for (auto& letter : sent_)
    if (letter->batch != nullptr && table_.end(letter->batch) == 0) static_cast<void>(letter.release());
}

void MpiEndpoint::exchange(std::span<const Message> messages, milliseconds limit) {
  fork_guard_.require_own("a group over MPI");
  throw_if_failed();
  std::vector<PolyremeMpiMessage> posted;
  for (const Message& message : messages)
    posted.push_back({message.kind == Message::Kind::kSend,
                      members_[static_cast<size_t>(message.peer)].world_rank, tag_, 0, message.data,
                      message.num_bytes});
  PolyremeMpiBatch* batch = nullptr;
  const PolyremeMpiStatus status = table_.post(posted.data(), static_cast<int32_t>(posted.size()), &batch);
  struct Ender {
    const PolyremeMpiTable& table;
    PolyremeMpiBatch* batch;
    ~Ender() { table.end(batch); }
  } ender{table_, batch};
  check(status, -1);
  run(batch, limit);
}

void MpiEndpoint::run(PolyremeMpiBatch* batch, milliseconds limit) {
  Clock::time_point last_move = Clock::now();
  while (true) {
    PolyremeMpiProgress progress{};
    const PolyremeMpiStatus status = table_.test(batch, &progress);
    check(status, progress.peer);
    if (progress.num_left == 0) return;
    const Clock::time_point now = Clock::now();
    if (progress.num_ended > 0) last_move = now;
    if (now - last_move >= limit)
      fail_and_throw(FailureKind::kTimeout, concat("waited ", static_cast<double>(limit.count()) / 1000,
                                                   " s for ", names(awaited(batch))));
    read_news();
    throw_if_failed();
    look_for_departed(batch, now - last_move);
    wait(now - last_move);
  }
}

void MpiEndpoint::wait(Clock::duration idle) const {
  if (idle > kYield) {
    check_interrupt();
    std::this_thread::sleep_for(kNap);
  } else if (idle > kSpin) {
    sched_yield();
  }
}

void MpiEndpoint::read_news() {
  if (!inbox_) return;
  PolyremeMpiProgress progress{};
  const PolyremeMpiStatus status = table_.test(inbox_->batch, &progress);
  check(status, progress.peer);
  if (progress.num_left > 0) return;
  table_.end(inbox_->batch);
  inbox_->batch = nullptr;
  News& news = inbox_->news;
  if (news.kind == FailureKind::kNone) {
    departed_.push_back(rank_of(progress.peer));
  } else {
    news.text[sizeof(news.text) - 1] = '\0';
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = {news.kind, news.text};
    table_.give_up();
  }
  listen();
}

void MpiEndpoint::look_for_departed(PolyremeMpiBatch* batch, Clock::duration idle) {
  if (departed_.empty() || idle < kTimeToArrive) return;
  std::vector<int> lost;
  for (const int r : awaited(batch))
    if (std::find(departed_.begin(), departed_.end(), r) != departed_.end()) lost.push_back(r);
  if (!lost.empty()) fail_and_throw(FailureKind::kPeerLost, concat("lost ", names(lost), ": left the group"));
}

std::vector<int> MpiEndpoint::awaited(PolyremeMpiBatch* batch) const {
  int32_t last = 0;
  for (const Member& member : members_) last = std::max(last, member.world_rank);
  std::vector<uint8_t> is_pending(static_cast<size_t>(last) + 1);
  table_.pending(batch, is_pending.data());
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r)
    if (is_pending[static_cast<size_t>(members_[static_cast<size_t>(r)].world_rank)] != 0) ranks.push_back(r);
  return ranks;
}

std::string MpiEndpoint::names(const std::vector<int>& ranks) const {
  std::string text;
  for (const int r : ranks) text += concat(text.empty() ? "" : ", ", who(r));
  return text;
}

void MpiEndpoint::check(const PolyremeMpiStatus& status, int32_t peer) {
  if (status.code == POLYREME_MPI_SUCCESS) return;
  const int rank = rank_of(peer);
  const bool is_size = status.code == POLYREME_MPI_WRONG_SIZE;
  fail_and_throw(is_size ? FailureKind::kMismatch : FailureKind::kPeerLost,
                 concat(status.text, rank < 0 ? "" : concat(", from ", who(rank))));
}

void MpiEndpoint::throw_if_failed() {
  Failure failure;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) return;
    failure = *failure_;
  }
  throw_failure(failure.kind, failure.text);
}

void MpiEndpoint::fail(FailureKind kind, const std::string& text) noexcept {
  if (fork_guard_.is_inherited()) return;
  try {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
      failure_ = {kind, text};
    }
    table_.give_up();
    tell_all(kind, text);
  } catch (const std::exception&) {  // they will miss this rank
  }
}

void MpiEndpoint::fail_and_throw(FailureKind kind, const std::string& text) {
  fail(kind, text);
  throw_if_failed();
  throw PeerLost(text);
}

void MpiEndpoint::tell_all(FailureKind kind, const std::string& text) {
  if (size() == 1) return;
  auto letter = std::make_unique<Letter>();
  letter->news.kind = kind;
  const size_t length = std::min(text.size(), sizeof(letter->news.text) - 1);
  std::memcpy(letter->news.text, text.data(), length);
  const auto num_bytes = static_cast<int64_t>(offsetof(News, text) + length + 1);
  std::vector<PolyremeMpiMessage> messages;
  for (int r = 0; r < size(); ++r)
    if (r != rank_)
      messages.push_back(
          {1, members_[static_cast<size_t>(r)].world_rank, tag_ + 1, 0, &letter->news, num_bytes});
  table_.post(messages.data(), static_cast<int32_t>(messages.size()), &letter->batch);
  const std::lock_guard lock(mutex_);
  sent_.push_back(std::move(letter));
}

std::unique_ptr<MpiEndpoint> MpiEndpoint::open_group(const std::vector<int>& ranks, milliseconds limit) {
  std::vector<Introduction> all(ranks.size());
  const auto place = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
  Introduction& own = all[static_cast<size_t>(place)];
  own.pid = getpid();
  own.next_tag = table_.reserve_tags(kLobbyTag + kTagsPerGroup);
  const std::string host = host_name();
  std::memcpy(own.host, host.data(), std::min(host.size(), sizeof(own.host) - 1));
  std::vector<Message> messages;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == rank_) continue;
    messages.push_back({Message::Kind::kSend, ranks[i], &own, sizeof(own)});
    messages.push_back({Message::Kind::kReceive, ranks[i], &all[i], sizeof(own)});
  }
  exchange(messages, limit);

  int32_t tag = 0;
  std::vector<Member> members;
  for (size_t i = 0; i < ranks.size(); ++i) {
    all[i].host[sizeof(all[i].host) - 1] = '\0';
    tag = std::max(tag, all[i].next_tag);
    members.push_back({members_[static_cast<size_t>(ranks[i])].world_rank, all[i].host, all[i].pid});
  }
  require<CommError>(tag >= 0 && tag <= max_tag_ - kTagsPerGroup, "MPI has no tags left for another group (",
                     max_tag_, " in all); make fewer groups");
  table_.reserve_tags(tag + kTagsPerGroup);
  auto group =
      std::make_unique<MpiEndpoint>(table_, max_tag_, std::move(members), static_cast<int>(place), tag);
  group->listen();
  return group;
}

std::unique_ptr<Endpoint> MpiEndpoint::make_subgroup(const std::vector<int>& members, const std::string&,
                                                     milliseconds limit) {
  return open_group(members, limit);
}

}  // namespace

std::unique_ptr<Endpoint> make_mpi_endpoint(const std::string& name, milliseconds limit) {
  const PolyremeMpiTable& table = load_mpi();
  PolyremeMpiWorld world{};
  const PolyremeMpiStatus status = table.start(&world);
  require<NotAvailable>(status.code == POLYREME_MPI_SUCCESS, "group '", name, "': ", status.text);
  std::vector<Member> members;
  std::vector<int> ranks;
  for (int r = 0; r < world.size; ++r) {
    members.push_back({r, "not known yet"});
    ranks.push_back(r);
  }
  MpiEndpoint lobby(table, world.max_tag, std::move(members), world.rank, kLobbyTag);
  return lobby.open_group(ranks, limit);
}

}  // namespace polyreme
