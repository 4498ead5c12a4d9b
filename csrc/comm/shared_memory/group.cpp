#include "comm/shared_memory/group.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <optional>
#include <thread>

#include "base/fence.h"
#include "base/interrupt.h"
#include "base/math.h"

namespace polyreme {
namespace {

using Clock = std::chrono::steady_clock;

// How often a rank that waits looks whether the others live.
constexpr auto kLookInterval = std::chrono::milliseconds(50);
// Two ranks killed together are both named: the second has this long to be found.
constexpr auto kSecondLook = std::chrono::milliseconds(20);

// A rank that left is given this long to end as a process before the others say so: whoever watches the
// processes then sees the cause end first, and the consequences after it.
constexpr auto kTimeToEnd = std::chrono::milliseconds(300);

// Steps before a waiting rank sleeps. Measured on 2 cores: with a core per rank spinning answers in
// 0.1-0.4 us; with more ranks than cores it only keeps the awaited rank from running.
struct WaitingPolicy {
  int pauses;
  int yields;
};
constexpr WaitingPolicy kCorePerRank{4000, 200};
constexpr WaitingPolicy kOversubscribed{100, 50};
// Where other programs run, a yield gives them the CPU for milliseconds; a sleeper that is woken gets it at
// once. After a yield that long, this many waits do without.
constexpr auto kLongYield = std::chrono::microseconds(500);
constexpr int kWaitsWithoutYields = 100;
// Of a rank that came to a meeting, before it wakes who sleeps there.
constexpr int kLooksBeforeRinging = 4;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

int64_t effective_chunk_bytes(int size, int64_t chunk_bytes) {
  return size == 1 ? 0 : round_up(std::max<int64_t>(chunk_bytes, 1), int64_t{64} * size);
}

void copy_text(char* to, size_t capacity, const std::string& text) {
  const size_t length = std::min(text.size(), capacity - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

// The futex is the half of `word` that changes with every arrival.
uint32_t* low_half(std::atomic<uint64_t>& word) {
  static_assert(std::endian::native == std::endian::little);
  return reinterpret_cast<uint32_t*>(&word);
}

// Not the private kind of futex: the sleeper may be another process.
void futex_wait(uint32_t* word, uint32_t expected, std::chrono::nanoseconds limit) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000);
  time.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

void wake(Bell& bell) {
  syscall(SYS_futex, low_half(bell.count), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace

RankIdentity this_rank(int job_rank) { return {this_process(), host_name(), usable_cpus(), job_rank}; }

int64_t SharedGroup::segment_bytes(int size, int64_t chunk_bytes) {
  return SegmentLayout(size, effective_chunk_bytes(size, chunk_bytes)).segment_bytes();
}

void SharedGroup::format(SharedMemory& memory, int size, int64_t chunk_bytes) {
  auto* group = new (memory.address()) GroupBlock{};
  for (int r = 0; r < size; ++r) new (&SegmentLayout::rank_block(memory.address(), r)) RankBlock{};
  group->version = kSegmentVersion;
  group->size = size;
  group->chunk_bytes = effective_chunk_bytes(size, chunk_bytes);
  group->segment_bytes = segment_bytes(size, chunk_bytes);
  group->magic = kSegmentMagic;
}

void SharedGroup::introduce(SharedMemory& memory, int rank, const RankIdentity& identity) {
  RankBlock& block = SegmentLayout::rank_block(memory.address(), rank);
  if (block.pid.load(std::memory_order_acquire) != 0) return;
  block.start_ticks = identity.process.start_ticks;
  block.pid_namespace = identity.process.pid_namespace;
  copy_text(block.host, sizeof(block.host), identity.host);
  block.cpus = identity.cpus;
  block.job_rank = identity.job_rank;
  block.pid.store(identity.process.pid, std::memory_order_release);
}

SharedGroup::SharedGroup(std::shared_ptr<SharedMemory> memory, int rank, int size, int64_t chunk_bytes,
                         Options options)
    : memory_(std::move(memory)),
      rank_(rank),
      size_(size),
      options_(std::move(options)),
      self_(this_process()),
      terms_(static_cast<size_t>(size)) {
  const GroupBlock& header = group();
  const bool ours = memory_->size_bytes() >= sizeof(GroupBlock) && header.magic == kSegmentMagic;
  require<CommError>(ours, "group '", options_.name, "', rank ", rank,
                     ": the shared memory is not a group's segment");
  require<CommError>(header.version == kSegmentVersion, "group '", options_.name, "', rank ", rank,
                     ": the segment has version ", header.version, ", this library ", kSegmentVersion,
                     "; install the same version for all ranks");
  const int64_t expected_chunk = effective_chunk_bytes(size, chunk_bytes);
  if (header.size != size || header.chunk_bytes != expected_chunk ||
      static_cast<int64_t>(memory_->size_bytes()) < segment_bytes(size, chunk_bytes)) {
    fail(FailureKind::kMismatch, concat("rank ", rank, " has size ", size, " and chunk_bytes ",
                                        expected_chunk, ", the segment of rank 0 has ", header.size, " and ",
                                        header.chunk_bytes, "; pass the same CommOptions on all ranks"));
    throw_failure();
  }
  layout_ = SegmentLayout(size, expected_chunk);
  introduce(*memory_, rank_, this_rank(options_.job_rank < 0 ? rank_ : options_.job_rank));
}

SharedGroup::~SharedGroup() { leave("its communicator was destroyed"); }

RankIdentity SharedGroup::identity(int rank) const {
  const RankBlock& from = block(rank);
  RankIdentity identity;
  identity.process.pid = from.pid.load(std::memory_order_acquire);
  if (identity.process.pid == 0) return identity;
  identity.process.start_ticks = from.start_ticks;
  identity.process.pid_namespace = from.pid_namespace;
  identity.host = from.host;
  identity.cpus = from.cpus;
  identity.job_rank = from.job_rank;
  return identity;
}

void SharedGroup::choose_waiting() {
  CpuMask together{};
  for (int r = 0; r < size_; ++r) {
    const CpuMask cpus = identity(r).cpus;
    for (size_t i = 0; i < together.size(); ++i) together[i] |= cpus[i];
  }
  oversubscribed_ = options_.oversubscribed || size_ > count_cpus(together);
}

void SharedGroup::begin(const CollectiveCall& call, std::chrono::milliseconds limit) {
  call_ = PackedCall::of(call);
  current_call_.set(call_);
  limit_ = limit;
  opening_ = true;
}

void SharedGroup::meet() {
  struct Meeting final : Awaited {
    Meeting(const SharedGroup& group, int slot) : group_(group), slot_(slot) {}
    bool has_come(int rank) const {
      return group_.block(rank).mail[slot_].arrived.load(std::memory_order_acquire) >= group_.meetings_;
    }
    Outcome poll() override {
      while (first_missing_ < group_.size_ && has_come(first_missing_)) ++first_missing_;
      return first_missing_ == group_.size_ ? Outcome::kDone : Outcome::kNothing;
    }
    std::vector<int> missing() override {
      std::vector<int> ranks;
      for (int r = 0; r < group_.size_; ++r)
        if (!has_come(r)) ranks.push_back(r);
      return ranks;
    }
    const SharedGroup& group_;
    int slot_;
    int first_missing_ = 0;
  };
  Meeting meeting(*this, slot());
  Mail& mail = mine().mail[slot()];
  if (opening_) mail.call = call_;  // no sooner: a peer that waits would fetch the line once more
  mail.arrived.store(++meetings_, std::memory_order_release);
  // Looks at the others before it looks for sleepers: their lines come in while its own goes out. A fence at
  // once would have the one wait for the other, a third of the time that a small meeting takes.
  bool all_here = false;
  for (int i = 0; i < kLooksBeforeRinging && !all_here; ++i)
    all_here = meeting.poll() == Awaited::Outcome::kDone;
  ring_if_asleep(group().arrivals);
  if (!all_here) await(meeting, group().arrivals);
  if (opening_) compare_calls(meeting.slot_);
}

void SharedGroup::await(Awaited& awaited, Bell& bell) {
  using Outcome = Awaited::Outcome;
  // Counts as a sleeper before it polls for the last time and sleeps: see ring_if_asleep.
  struct Sleeper {
    explicit Sleeper(Bell& of) : bell(of) {
      bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
      full_fence();
    }
    ~Sleeper() { bell.sleepers.fetch_sub(1, std::memory_order_relaxed); }
    Sleeper(const Sleeper&) = delete;
    Bell& bell;
  };
  std::optional<Sleeper> sleeper;
  const WaitingPolicy& policy = oversubscribed_ ? kOversubscribed : kCorePerRank;
  Clock::time_point yielding_since, deadline, next_look;
  for (int idle = 0;; ++idle) {
    if (idle == policy.pauses + policy.yields && !sleeper) sleeper.emplace(bell);
    const uint64_t seen = bell.count.load(std::memory_order_seq_cst);
    const Outcome outcome = awaited.poll();
    if (outcome == Outcome::kDone) break;
    if (outcome == Outcome::kProgress) idle = -1;
    if (idle < policy.pauses) {
      pause_cpu();
      continue;
    }
    if (idle < policy.pauses + policy.yields) {
      if (waits_without_yields_ == 0) {
        if (idle == policy.pauses) yielding_since = Clock::now();
        sched_yield();
        if (Clock::now() - yielding_since < kLongYield) continue;
        waits_without_yields_ = kWaitsWithoutYields;
      }
      --waits_without_yields_;
      idle = policy.pauses + policy.yields - 1;  // sleeps, if it has to wait any longer
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (idle == policy.pauses + policy.yields) {
      deadline = now + limit_;
      next_look = now + kLookInterval;
    }
    // In this order: what a rank completed before it failed or left can be completed by all.
    if (group().failure_state.load(std::memory_order_acquire) != 0) {
      if (awaited.poll() == Outcome::kDone) break;
      throw_failure();
    }
    look_for_departed(awaited);
    if (now >= next_look) {
      check_interrupt();
      look_for_dead(awaited);
      next_look = now + kLookInterval;
    }
    if (now >= deadline) time_out(awaited);
    futex_wait(low_half(bell.count), static_cast<uint32_t>(seen),
               std::max<Clock::duration>(std::min(next_look, deadline) - now, std::chrono::microseconds(1)));
  }
  if (mine().waits_for.load(std::memory_order_relaxed) != 0)
    mine().waits_for.store(0, std::memory_order_relaxed);
}

void SharedGroup::ring(Bell& bell) {
  bell.count.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) > 0) wake(bell);
}

// After a store of what sleepers wait for: either the sleeper is seen here, or it sees that store. Nobody
// writes the bell while nobody sleeps.
void SharedGroup::ring_if_asleep(Bell& bell) {
  full_fence();
  if (bell.sleepers.load(std::memory_order_seq_cst) == 0) return;
  bell.count.fetch_add(1, std::memory_order_seq_cst);
  wake(bell);
}

void SharedGroup::wake_all() noexcept {
  wake(group().arrivals);
  for (int r = 0; r < std::min(size_, group().size); ++r) wake(block(r).channels);
}

void SharedGroup::look_for_departed(Awaited& awaited) {
  if (group().departures.load(std::memory_order_acquire) == 0) return;
  std::vector<bool> departed;
  for (int r = 0; r < size_; ++r) departed.push_back(block(r).departed.load(std::memory_order_acquire) != 0);
  // In this order: a rank that did its part and left afterwards is not missed.
  for (const int r : awaited.missing()) {
    if (!departed[static_cast<size_t>(r)]) continue;
    let_end(r);
    fail_and_throw(FailureKind::kPeerLost, concat(who(r), " left the group after ", completed_text(r), ": ",
                                                  block(r).departure_text));
  }
}

void SharedGroup::let_end(int rank) const {
  const ProcessIdentity process = identity(rank).process;
  if (process.pid == self_.pid) return;  // a thread of ours
  const Clock::time_point deadline = Clock::now() + kTimeToEnd;
  while (!has_ended(process, self_) && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

std::vector<int> SharedGroup::dead_among(const std::vector<int>& ranks) const {
  std::vector<int> dead;
  for (const int r : ranks)
    if (has_ended(identity(r).process, self_)) dead.push_back(r);
  return dead;
}

void SharedGroup::look_for_dead(Awaited& awaited) {
  const std::vector<int> absent = awaited.missing();
  mine().waits_for.store(absent.empty() ? 0 : absent.front() + 1, std::memory_order_relaxed);
  if (dead_among(absent).empty()) return;
  std::this_thread::sleep_for(kSecondLook);
  look_for_departed(awaited);  // an orderly end is told apart
  std::vector<int> dead;
  for (int r = 0; r < size_; ++r)  // also those that died after they had done their part
    if (block(r).departed.load(std::memory_order_acquire) == 0) dead.push_back(r);
  dead = dead_among(dead);
  if (dead.empty() || dead_among(awaited.missing()).empty()) return;
  fail_and_throw(FailureKind::kPeerLost, concat("lost ", progress_text(dead), ": the process has ended"));
}

void SharedGroup::time_out(Awaited& awaited) {
  look_for_dead(awaited);
  const std::vector<int> absent = awaited.missing();
  if (absent.empty()) return;  // they came this very moment
  const CollectiveCall call = call_.unpacked();
  fail_and_throw(FailureKind::kTimeout,
                 concat(who(rank_), " in ", call.to_string(), ", sequence ", call.sequence, ", waited ",
                        static_cast<double>(limit_.count()) / 1000, " s for ", progress_text(absent)));
}

std::string SharedGroup::completed_text(int rank) const {
  const CallLedger& ledger = block(rank).ledger;
  std::string text = mark_text(ledger.collectives.completed);
  if (ledger.exchanges.completed.load(std::memory_order_relaxed) != 0)
    text += concat(" and ", mark_text(ledger.exchanges.completed));
  return text;
}

std::string SharedGroup::progress_text(const std::vector<int>& ranks) const {
  std::string text;
  for (const int r : ranks) {
    const RankBlock& peer = block(r);
    text += concat(text.empty() ? "" : "; ", who(r), ", which last completed ", completed_text(r));
    for (const CallLedger::Line* line : {&peer.ledger.collectives, &peer.ledger.exchanges})
      if (line->owes()) text += concat(" and is in ", mark_text(line->posted));
    const int waits_for = peer.waits_for.load(std::memory_order_relaxed) - 1;
    if (waits_for >= 0) text += concat(", where it waits for rank ", waits_for);
    if (!peer.ledger.owes()) text += " and has called nothing since";
  }
  return text;
}

void SharedGroup::compare_calls(int slot) {
  opening_ = false;
  bool equal = true;
  for (int r = 0; r < size_; ++r) equal = equal && (r == rank_ || block(r).mail[slot].call == call_);
  if (equal) return;
  std::vector<CollectiveCall> calls;
  for (int r = 0; r < size_; ++r) calls.push_back(block(r).mail[slot].call.unpacked());
  fail_and_throw(FailureKind::kMismatch,
                 concat("the ranks called different collectives: ", mismatch_text(calls)));
}

void SharedGroup::publish(const void* address, int64_t bytes) {
  mine().published[slot()] = {peer_memory()->publish(address, bytes), bytes};
}

const char* SharedGroup::published(int rank, int slot) const {
  const RankBlock::Published& memory = block(rank).published[slot];
  return peer_memory()->find(rank, memory.handle, memory.bytes);
}

// In this order on both sides: either the reader sees the failure, or the rank that failed sees the reader.
SharedGroup::Reading::Reading(SharedGroup& group) : reads_(group.mine().reads) {
  reads_.store(1, std::memory_order_seq_cst);
  if (group.group().failure_state.load(std::memory_order_seq_cst) == 0) return;
  reads_.store(0, std::memory_order_release);
  group.throw_failure();
}

void SharedGroup::wait_for_readers() const noexcept {
  if (peer_memory() == nullptr || peer_memory()->outlives_its_rank()) return;
  for (int r = 0; r < size_; ++r)
    while (r != rank_ && block(r).reads.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
}

void SharedGroup::fail(FailureKind kind, const std::string& text) noexcept {
  GroupBlock& shared = group();
  uint32_t expected = 0;
  if (!shared.failure_state.compare_exchange_strong(expected, 1)) return;
  shared.failure_kind = kind;
  copy_text(shared.failure_text, sizeof(shared.failure_text), text);
  shared.failure_state.store(2, std::memory_order_release);
  wake_all();
}

void SharedGroup::abort(const std::string& text) noexcept {
  fail(FailureKind::kPeerLost, text);
  const std::lock_guard lock(subgroups_mutex_);
  for (const std::weak_ptr<SharedGroup>& subgroup : subgroups_)
    if (const auto alive = subgroup.lock()) alive->abort(text);
}

void SharedGroup::add_subgroup(const std::shared_ptr<SharedGroup>& subgroup) {
  const std::lock_guard lock(subgroups_mutex_);
  std::erase_if(subgroups_, [](const std::weak_ptr<SharedGroup>& each) { return each.expired(); });
  subgroups_.push_back(subgroup);
}

void SharedGroup::throw_if_failed() const {
  if (group().failure_state.load(std::memory_order_acquire) != 0) [[unlikely]]
    throw_failure();
}

void SharedGroup::fail_and_throw(FailureKind kind, const std::string& text) {
  fail(kind, text);
  throw_failure();
}

void SharedGroup::throw_failure() const {
  const GroupBlock& shared = group();
  // Whoever is writing the text may have died over it.
  for (int i = 0; i < 100 && shared.failure_state.load(std::memory_order_acquire) != 2; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (shared.failure_state.load(std::memory_order_acquire) != 2)
    throw PeerLost(concat(where(), ": a rank died while it reported a failure"));
  const std::string text = concat(where(), ": ", shared.failure_text);
  polyreme::throw_failure(shared.failure_kind, text);
}

void SharedGroup::leave(const std::string& why) noexcept {
  // A forked child that is torn down must not take its parent out of the group.
  if (getpid() != self_.pid || left_.exchange(true)) return;
  try {
    copy_text(mine().departure_text, sizeof(mine().departure_text), why);
    for (const CallLedger::Line* line : {&ledger().collectives, &ledger().exchanges})
      if (line->owes())
        fail(FailureKind::kPeerLost,
             concat(who(rank_), " left the group: ", why, " before ", mark_text(line->posted), " had run"));
  } catch (const std::exception&) {
    fail(FailureKind::kPeerLost, "a rank left the group");  // out of memory for the text
  }
  mine().departed.store(1, std::memory_order_release);
  group().departures.fetch_add(1, std::memory_order_acq_rel);
  wake_all();
}

std::string SharedGroup::who(int rank) const {
  const RankIdentity peer = identity(rank);
  if (peer.process.pid == 0) return concat("rank ", rank, " (not attached yet)");
  return rank_text(rank, peer.job_rank, peer.host, peer.process.pid);
}

std::string SharedGroup::where() const {
  std::string text = concat("group '", options_.name, "', rank ", rank_);
  const CollectiveCall call = current_call_.get().unpacked();
  if (call.op != CollectiveOp::kNone) text += concat(", ", call.to_string(), ", sequence ", call.sequence);
  return text;
}

}  // namespace polyreme
