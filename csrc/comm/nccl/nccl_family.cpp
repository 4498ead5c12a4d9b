#include "comm/nccl/nccl_family.h"

#include <algorithm>

#include "comm/nccl/nccl_table.h"
#include "comm/net/bytes.h"

namespace polyreme {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kWatchInterval{20};
constexpr milliseconds kStoreInterval{100};
// A collective that runs for longer makes its rank look whether the others still live.
constexpr milliseconds kPeerInterval{250};
// For the answers to an alarm, and for the verdict of the rank that raised it.
constexpr milliseconds kAnswerLimit{1000};
constexpr milliseconds kVerdictLimit{4000};
constexpr milliseconds kFarewell{2000};

void back_off(int round) {
  if (round < 100) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(round < 1000 ? 50 : 1000));
  }
}

// At the beginning of what a rank has put into the store; the largest one if nothing can be told.
uint64_t sequence_in(const std::string& text) {
  const auto number = parse_number(std::string_view(text).substr(0, text.find(' ')));
  return number && *number >= 0 ? static_cast<uint64_t>(*number) : UINT64_MAX;
}

char letter_of(FailureKind kind) { return static_cast<char>('0' + static_cast<int>(kind)); }

std::optional<ProcessIdentity> identity_of(const RankRecord& record) {
  const auto field = [&](const char* name) {
    const auto it = record.fields.find(name);
    return it == record.fields.end() ? std::string() : it->second;
  };
  if (field("boot") != boot_id() || field("start").empty() || field("pid_namespace").empty())
    return std::nullopt;
  const auto start = parse_number(field("start")), pid_namespace = parse_number(field("pid_namespace"));
  if (!start || !pid_namespace) return std::nullopt;
  return ProcessIdentity{record.pid, static_cast<uint64_t>(*start), static_cast<uint64_t>(*pid_namespace)};
}

}  // namespace

NcclFamily::Issuing::Issuing(NcclFamily& family)
    : family_(family),
      lock_(family.device().issue_mutex()),
      scope_(family.device().table(), family.device().index()) {
  family.throw_if_failed();
  family.issuer_ = std::this_thread::get_id();
}
NcclFamily::Issuing::~Issuing() { family_.issuer_ = std::thread::id{}; }

NcclFamily::NcclFamily(Options options) : options_(std::move(options)), self_(this_process()) {
  for (const RankRecord& record : options_.records) local_.push_back(identity_of(record));
  watcher_ = std::thread([this] { watch(); });
}

NcclFamily::~NcclFamily() {
  if (fork_guard_.is_inherited()) {  // the thread is the parent's
    watcher_.detach();
    return;
  }
  {
    const std::lock_guard lock(stop_mutex_);
    stop_ = true;
  }
  stop_wanted_.notify_all();
  watcher_.join();
}

std::string NcclFamily::who(const NcclGroup& group, int rank) const {
  const RankRecord& record = options_.records[static_cast<size_t>(group.members[static_cast<size_t>(rank)])];
  return rank_text(rank, group.members[static_cast<size_t>(rank)], record.host, record.pid);
}

std::string NcclFamily::where(const NcclGroup& group, const CollectiveCall& call) const {
  return concat("group '", group.name, "', ", call.to_string(), ", sequence ", call.sequence, ", ",
                who(group, group.rank));
}

// ---- failures ----------------------------------------------------------------------------------

void NcclFamily::throw_if_failed() const {
  if (!failed_) return;
  const std::lock_guard lock(mutex_);
  throw_failure(failure_, failure_text_);
}

void NcclFamily::fail(FailureKind kind, const std::string& text, const NcclGroup* group,
                      const CollectiveCall* call) {
  if (!failed_) {
    const auto [first_kind, first_text] = publish(kind, text, group, call);
    accept(first_kind, first_text);
  }
  abort_all();
  throw_if_failed();
  throw CommError(text);  // not reached: the failure was accepted
}

void NcclFamily::break_all(FailureKind kind, const std::string& text) noexcept {
  try {
    fail(kind, text);
  } catch (const std::exception&) {  // the failure itself
  }
}

// The failure as the rank describes it that noticed one first.
std::pair<FailureKind, std::string> NcclFamily::publish(FailureKind kind, const std::string& text,
                                                        const NcclGroup* group, const CollectiveCall* call) {
  const std::string& base = options_.base;
  std::string full = text;
  try {
    if (store().add(base + "/raised", 1) == 1) {
      if (kind == FailureKind::kTimeout && group != nullptr) full += absent_ranks(*group, *call);
      store().set(base + "/failure", letter_of(kind) + full);
      store().set(base + "/alarm", group == nullptr ? "-" : group->base);
      return {kind, full};
    }
    // Another rank did, and may ask this one.
    for (const auto deadline = Clock::now() + kVerdictLimit; Clock::now() < deadline;) {
      {
        const std::lock_guard lock(look_mutex_);
        answer_alarm();
      }
      if (const auto first = store().try_get(base + "/failure"))
        return {static_cast<FailureKind>(first->at(0) - '0'), first->substr(1)};
      std::this_thread::sleep_for(milliseconds(10));
    }
    return {kind, full};
  } catch (const std::exception& lost) {
    return {kind, concat(full, "; the other ranks could not be told: ", lost.what())};
  }
}

// "; rank 1 (...) has not called it, its last call was ...": asks the other ranks.
std::string NcclFamily::absent_ranks(const NcclGroup& group, const CollectiveCall& call) {
  const std::string& base = options_.base;
  store().set(base + "/alarm", group.base);
  const auto deadline = Clock::now() + kAnswerLimit;
  std::string text;
  for (int r = 0; r < group.size(); ++r) {
    if (r == group.rank) continue;
    const std::string key = concat(base, "/mark/", group.members[static_cast<size_t>(r)]);
    std::optional<std::string> mark;
    while (!(mark = store().try_get(key)) && Clock::now() < deadline)
      std::this_thread::sleep_for(milliseconds(10));
    if (!mark) {
      text += concat("; ", who(group, r), " does not answer");
    } else if (call.op == CollectiveOp::kExchange) {  // numbered by each rank for itself
      text += concat("; the last collective of ", who(group, r), " was ", mark->substr(mark->find(' ') + 1));
    } else if (sequence_in(*mark) < call.sequence) {
      text += concat("; ", who(group, r), " has not called it, its last call was ",
                     mark->substr(mark->find(' ') + 1));
    }
  }
  return text.empty() ? "; all ranks have called it: look at their GPUs and the links between them" : text;
}

void NcclFamily::accept(FailureKind kind, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (failed_) return;
  failure_ = kind;
  failure_text_ = text;
  for (const auto& call : in_flight_) call->entry.end(true);
  failed_ = true;
}

// Without effect on a family that is broken already.
void NcclFamily::accept_lost_store(const std::string& lost) {
  const RankRecord& host = options_.records.front();
  accept(FailureKind::kPeerLost, concat("the store of the job is gone, which rank 0 (host ", host.host,
                                        ", pid ", host.pid, ") serves: ", lost));
}

void NcclFamily::fail_without_store(const std::string& lost) {
  accept_lost_store(lost);
  abort_all();
  throw_if_failed();
  throw PeerLost(lost);  // not reached: the failure was accepted
}

// Afterwards the kernels of the aborted communicators end, and their streams go on. NCCL may block here; the
// launcher's limit on a rank that does not end stands behind it.
void NcclFamily::abort_all() {
  std::unique_lock<std::mutex> lock;
  if (!is_issuing()) lock = std::unique_lock(device().issue_mutex());  // whoever has it sees `failed_` soon
  std::vector<void*> comms;
  for (const auto& group : groups_)
    if (group->comm != nullptr) comms.push_back(std::exchange(group->comm, nullptr));
  groups_.clear();
  if (comms.empty()) return;
  const CudaDeviceScope scope(device().table(), device().index());
  table().abort(comms.data(), static_cast<int32_t>(comms.size()));  // nothing is left to do if it fails
}

void NcclFamily::check(const PolyremeNcclStatus& status, const NcclGroup& group, const CollectiveCall& call) {
  if (status.code == POLYREME_NCCL_SUCCESS || status.code == POLYREME_NCCL_IN_PROGRESS) return;
  const std::string text = concat(where(group, call), ": ", status.text);
  if (status.code == POLYREME_NCCL_CUDA_ERROR) {
    break_all(FailureKind::kPeerLost, text);
    throw DeviceError(text);
  }
  fail(FailureKind::kPeerLost, text);
}

void NcclFamily::settle(void* comm, const NcclGroup& group, const CollectiveCall& call, milliseconds limit) {
  const auto start = Clock::now();
  for (int round = 0;; ++round) {
    const PolyremeNcclStatus status = table().async_error(comm);
    check(status, group, call);
    if (status.code == POLYREME_NCCL_SUCCESS) return;
    if (failed_) abort_all();
    throw_if_failed();
    look();
    const auto waited = Clock::now() - start;
    if (waited > kPeerInterval) look_for_lost_peers(group, call);
    if (waited > limit)
      fail(FailureKind::kTimeout,
           concat(where(group, call), ": NCCL found no connection to the other ranks in ", limit.count(),
                  " ms"),
           &group, &call);
    back_off(round);
  }
}

void NcclFamily::add(const std::shared_ptr<NcclGroup>& group) {
  groups_.push_back(group);
  const std::lock_guard lock(mutex_);
  std::erase_if(known_, [](const auto& known) { return known.expired(); });
  known_.push_back(group);
}

// ---- calls ---------------------------------------------------------------------------------------

void NcclFamily::put_in_order(Stream& stream) {
  const std::lock_guard lock(mutex_);
  if (!in_flight_.empty()) stream.wait(*in_flight_.back()->done);
}

void NcclFamily::add_in_flight(std::shared_ptr<NcclCall> call) {
  const std::lock_guard lock(mutex_);
  in_flight_.push_back(std::move(call));
}

// The order of the calls is one chain of events: only the oldest one can be running.
void NcclFamily::sweep() {
  const std::lock_guard lock(mutex_);
  while (!in_flight_.empty() && !failed_) {
    NcclCall& oldest = *in_flight_.front();
    if (!as_cuda(*oldest.done).is_reached()) {
      if (!running_since_ && as_cuda(*oldest.started).is_reached()) {
        running_since_ = Clock::now();
        oldest.entry.start();
      }
      return;
    }
    if (failed_) return;  // an abort may have ended it
    oldest.group->ledger.of(oldest.call.op).completed = CallLedger::mark_of(oldest.call);
    oldest.entry.end(false);
    oldest.is_done = true;
    in_flight_.pop_front();
    running_since_.reset();
  }
}

void NcclFamily::wait(NcclCall& call) {
  for (int round = 0; !call.is_done; ++round) {
    throw_if_failed();
    try {
      sweep();
    } catch (const DeviceError& failure) {
      break_all(FailureKind::kPeerLost, concat(where(*call.group, call.call), ": ", failure.what()));
      throw;
    }
    if (!call.is_done) back_off(round);
  }
}

void NcclFamily::drain() {
  std::shared_ptr<NcclCall> last;
  {
    const std::lock_guard lock(mutex_);
    if (!in_flight_.empty()) last = in_flight_.back();
  }
  if (last) wait(*last);
}

void NcclFamily::await(const std::function<bool()>& is_there, milliseconds limit, const NcclGroup& group,
                       const CollectiveCall& call) {
  const auto start = Clock::now();
  for (int round = 0;; ++round) {
    throw_if_failed();
    if (is_there()) return;
    const auto waited = Clock::now() - start;
    if (waited > kPeerInterval) look_for_lost_peers(group, call);
    if (waited > limit)
      fail(FailureKind::kTimeout, concat(where(group, call), ": waited for ", limit.count(), " ms"), &group,
           &call);
    back_off(round + 100);
  }
}

void NcclFamily::retire(const std::shared_ptr<NcclGroup>& group) noexcept {
  group->retired = true;
  if (failed_ || fork_guard_.is_inherited()) return;
  try {
    const uint64_t last = CallLedger::sequence_of(group->ledger.collectives.posted);
    store().set(concat(group->base, "/left/", group->rank), std::to_string(last));
    store().add(group->base + "/left", 1);
  } catch (const std::exception&) {  // the store is gone: the others know
  }
}

// ---- the thread that looks after it ----------------------------------------------------------------

void NcclFamily::watch() {
  std::unique_lock lock(stop_mutex_);
  while (!stop_wanted_.wait_for(lock, kWatchInterval, [this] { return stop_; })) {
    lock.unlock();
    try {
      if (failed_) abort_all();
      look();
      look_after_oldest();
      look_for_errors();
      end_retired();
    } catch (const CommError& failure) {  // broke the family, whose callers will be told; or is of the store
      accept_lost_store(failure.what());
    } catch (const std::exception& failure) {
      break_all(FailureKind::kPeerLost, failure.what());
    }
    lock.lock();
  }
  lock.unlock();
  farewell();
}

// Whether another rank has failed.
void NcclFamily::look() {
  const std::unique_lock lock(look_mutex_, std::try_to_lock);
  if (!lock || failed_ || Clock::now() < next_look_) return;
  next_look_ = Clock::now() + kStoreInterval;
  try {
    look_for_failure();
  } catch (const Error& lost) {
    accept_lost_store(lost.what());
  }
}

// "7 all_reduce (sequence 7)": what this rank called last in the group of that base.
std::string NcclFamily::last_call(const std::string& group_base) const {
  const std::lock_guard lock(mutex_);
  for (const std::weak_ptr<NcclGroup>& known : known_)
    if (const auto group = known.lock(); group && group->base == group_base) {
      const auto& mark = group->ledger.collectives.posted;
      return concat(CallLedger::sequence_of(mark), " ", mark_text(mark));
    }
  return "0 to leave the group";
}

// Tells a rank that asks what this one called last. Needs look_mutex_.
void NcclFamily::answer_alarm() {
  if (alarmed_) return;
  const auto alarm = store().try_get(options_.base + "/alarm");
  if (!alarm) return;
  alarmed_ = Clock::now();
  store().set(concat(options_.base, "/mark/", options_.rank), last_call(*alarm));
}

void NcclFamily::look_for_failure() {
  answer_alarm();
  if (!alarmed_) return;
  if (const auto failure = store().try_get(options_.base + "/failure")) {
    accept(static_cast<FailureKind>(failure->at(0) - '0'), failure->substr(1));
  } else if (Clock::now() - *alarmed_ > kVerdictLimit) {
    accept(FailureKind::kPeerLost, "a rank raised an alarm and went silent before it could say why");
  }
}

// A process of this host that ended, or a rank that destroyed the group before it made `call`.
void NcclFamily::look_for_lost_peers(const NcclGroup& group, const CollectiveCall& call) {
  {
    const std::unique_lock lock(look_mutex_, std::try_to_lock);
    if (!lock || failed_ || Clock::now() < next_peer_look_) return;
    next_peer_look_ = Clock::now() + kPeerInterval;
  }
  const bool somebody_left = store().add(group.base + "/left", 0) > 0;
  for (int r = 0; r < group.size(); ++r) {
    if (r == group.rank) continue;
    const auto& process = local_[static_cast<size_t>(group.members[static_cast<size_t>(r)])];
    if (process && has_ended(*process, self_))
      fail(FailureKind::kPeerLost, concat(where(group, call), ": ", who(group, r), " has ended"));
    if (!somebody_left) continue;
    const auto left = store().try_get(concat(group.base, "/left/", r));
    if (left && call.op != CollectiveOp::kExchange && sequence_in(*left) < call.sequence)
      fail(FailureKind::kPeerLost,
           concat(where(group, call), ": ", who(group, r), " left the group before it"));
  }
}

// Whether the collective that runs now runs for too long.
void NcclFamily::look_after_oldest() {
  sweep();
  std::shared_ptr<NcclCall> oldest;
  Clock::duration running{};
  {
    const std::lock_guard lock(mutex_);
    if (in_flight_.empty() || !running_since_) return;
    oldest = in_flight_.front();
    running = Clock::now() - *running_since_;
  }
  const NcclGroup& group = *oldest->group;
  if (running > kPeerInterval) look_for_lost_peers(group, oldest->call);
  if (running > group.timeout)
    fail(FailureKind::kTimeout,
         concat(where(group, oldest->call), ": no end after ", group.timeout.count(), " ms"), &group,
         &oldest->call);
}

// Whether NCCL found something: its network threads notice lost peers of other hosts.
void NcclFamily::look_for_errors() {
  std::string text;
  {
    const std::unique_lock lock(device().issue_mutex(), std::try_to_lock);
    if (!lock) return;  // whoever issues looks itself
    for (const auto& group : groups_) {
      if (group->comm == nullptr) continue;
      const PolyremeNcclStatus status = table().async_error(group->comm);
      if (status.code != POLYREME_NCCL_SUCCESS && status.code != POLYREME_NCCL_IN_PROGRESS && text.empty())
        text = concat("group '", group->name, "', ", who(*group, group->rank), ": ", status.text);
    }
  }
  if (!text.empty()) fail(FailureKind::kPeerLost, text);
}

// Finalizes the communicators that nobody uses any more, then destroys them; never while another thread
// issues.
void NcclFamily::end_retired() {
  if (failed_) return;
  const std::unique_lock lock(device().issue_mutex(), std::try_to_lock);
  if (!lock) return;
  const CudaDeviceScope scope(device().table(), device().index());
  for (const auto& group : groups_) {
    if (!group->retired || group->comm == nullptr || group->ledger.owes()) continue;
    if (!group->finalizing) {
      group->finalizing = true;
      table().finalize(group->comm);
    } else if (const int32_t state = table().async_error(group->comm).code;
               state != POLYREME_NCCL_IN_PROGRESS) {
      void* const comm = std::exchange(group->comm, nullptr);
      if (state == POLYREME_NCCL_SUCCESS) {
        table().destroy(comm);
      } else {
        table().abort(&comm, 1);
      }
    }
  }
  std::erase_if(groups_, [](const auto& group) { return group->comm == nullptr; });
}

void NcclFamily::farewell() {
  const auto deadline = Clock::now() + kFarewell;
  try {
    while (!failed_ && Clock::now() < deadline) {
      {
        const std::lock_guard lock(device().issue_mutex());
        if (groups_.empty()) return;
      }
      sweep();
      look();
      end_retired();
      std::this_thread::sleep_for(milliseconds(1));
    }
  } catch (const std::exception&) {  // abort it is
  }
  try {
    abort_all();
  } catch (const std::exception&) {  // a device that is lost takes its communicators along
  }
}

}  // namespace polyreme
