#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "comm/failure.h"
#include "comm/journal.h"
#include "comm/rendezvous.h"
#include "comm/shared_memory/process.h"
#include "comm/store.h"
#include "comm/transport.h"
#include "device/cuda/cuda_device.h"

struct PolyremeNcclTable;
struct PolyremeNcclStatus;

namespace polyreme {

// One group of a family, as its rank sees it.
struct NcclGroup {
  std::string name;
  std::string base;          // of its keys in the store
  std::vector<int> members;  // by rank of the group: the rank in the family's first group
  int rank = 0;
  std::chrono::milliseconds timeout{0};
  CallLedger ledger{};
  // ncclComm_t, null before and after its life; of whoever issues (NcclFamily::Issuing).
  void* comm = nullptr;
  bool finalizing = false;
  std::atomic<bool> retired{false};  // nobody will issue on it any more

  int size() const { return static_cast<int>(members.size()); }
};

// A collective that was issued.
struct NcclCall {
  std::shared_ptr<NcclGroup> group;
  CollectiveCall call;
  JournalEntry entry;
  std::unique_ptr<Event> started, done;  // around it in its stream
  std::atomic<bool> is_done{false};      // and nothing was aborted before
};

// What the communicators of one rank share: a first group and all that were split from it. NCCL demands that
// one thread at a time calls it for a device, and that all communicators of a device are aborted together; so
// a family fails as a whole, and tells the other ranks through the store.
//
// A thread of its own looks 50 times a second after what was issued: whether it has run, waits for too long,
// or failed, here or on another rank. Whoever finds a failure aborts. Keys in the store, below `base`:
//   raised     how many ranks noticed a failure; the first one describes it
//   alarm      the base of the group that waits: ranks answer with mark/<rank>, what they called last there
//   failure    "<kind><text>": why the family is broken
// and below the base of a group: left, left/<rank> (how many, and who destroyed it after which call).
class NcclFamily {
 public:
  struct Options {
    const PolyremeNcclTable& table;
    CudaDevice& device;
    Store& store;
    std::vector<RankRecord> records;  // of the first group
    int rank = 0;
    std::string base;
  };
  explicit NcclFamily(Options options);
  // Ends the communicators once what was issued has run, as far as that takes two seconds, and aborts the
  // rest.
  ~NcclFamily();

  // The right to call NCCL, with the device current. Throws the failure that broke the family, if any.
  class Issuing {
   public:
    explicit Issuing(NcclFamily& family);
    ~Issuing();
    Issuing(const Issuing&) = delete;
    Issuing& operator=(const Issuing&) = delete;

   private:
    NcclFamily& family_;
    std::unique_lock<std::mutex> lock_;
    CudaDeviceScope scope_;
  };

  const PolyremeNcclTable& table() const { return options_.table; }
  CudaDevice& device() const { return options_.device; }
  Store& store() const { return options_.store; }
  // "rank 2 (host a, pid 123)" of a rank of the group.
  std::string who(const NcclGroup& group, int rank) const;
  // "group 'world', all_reduce float32[4] sum, sequence 7, rank 2 (host a, pid 123)"
  std::string where(const NcclGroup& group, const CollectiveCall& call) const;

  void throw_if_failed() const;
  // Breaks the family on all ranks that can be reached, and throws: the failure that came first. A timeout
  // names the ranks that did not call `call`.
  [[noreturn]] void fail(FailureKind kind, const std::string& text, const NcclGroup* group = nullptr,
                         const CollectiveCall* call = nullptr);
  // Throws what broke the family; if nothing did, the store is gone, and `lost` says why.
  [[noreturn]] void fail_without_store(const std::string& lost);
  // As fail, without throwing. Any thread.
  void break_all(FailureKind kind, const std::string& text) noexcept;

  // The next five are for whoever is Issuing. A group is added before its communicator is made, so that a
  // failure meanwhile aborts it.
  void add(const std::shared_ptr<NcclGroup>& group);
  // Fails unless the status is good or "in progress".
  void check(const PolyremeNcclStatus& status, const NcclGroup& group, const CollectiveCall& call);
  // Polls until nothing is in progress on `comm`.
  void settle(void* comm, const NcclGroup& group, const CollectiveCall& call,
              std::chrono::milliseconds limit);
  // Puts what is enqueued next behind all collectives of the family.
  void put_in_order(Stream& stream);
  void add_in_flight(std::shared_ptr<NcclCall> call);

  // Blocks until the call has run. Throws what broke the family, DeviceError if the GPU failed.
  void wait(NcclCall& call);
  // Blocks until all collectives have run.
  void drain();
  // Waits for what other ranks do in the store.
  void await(const std::function<bool()>& is_there, std::chrono::milliseconds limit, const NcclGroup& group,
             const CollectiveCall& call);
  // The rank has left the group, which ends once its collectives have run. Any thread.
  void retire(const std::shared_ptr<NcclGroup>& group) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  void watch();
  void look();
  void answer_alarm();
  void look_for_failure();
  void look_for_lost_peers(const NcclGroup& group, const CollectiveCall& call);
  void look_after_oldest();
  void look_for_errors();
  void sweep();
  void end_retired();
  void farewell();
  std::pair<FailureKind, std::string> publish(FailureKind kind, const std::string& text,
                                              const NcclGroup* group, const CollectiveCall* call);
  std::string last_call(const std::string& group_base) const;
  std::string absent_ranks(const NcclGroup& group, const CollectiveCall& call);
  void accept(FailureKind kind, const std::string& text);
  void accept_lost_store(const std::string& lost);
  void abort_all();
  bool is_issuing() const { return issuer_.load() == std::this_thread::get_id(); }

  const Options options_;
  const ProcessIdentity self_;
  std::vector<std::optional<ProcessIdentity>>
      local_;  // the processes of this host, by rank of the first group
  std::atomic<std::thread::id> issuer_{};
  std::vector<std::shared_ptr<NcclGroup>> groups_;  // with a communicator; of whoever issues

  mutable std::mutex mutex_;  // of the rest
  std::atomic<bool> failed_{false};
  std::vector<std::weak_ptr<NcclGroup>> known_;
  FailureKind failure_ = FailureKind::kNone;
  std::string failure_text_;
  std::deque<std::shared_ptr<NcclCall>> in_flight_;  // in the order in which they run
  std::optional<Clock::time_point> running_since_;   // of the oldest one

  std::mutex look_mutex_;  // one thread at a time looks
  std::optional<Clock::time_point> alarmed_;
  Clock::time_point next_look_{}, next_peer_look_{};

  std::mutex stop_mutex_;
  std::condition_variable stop_wanted_;
  bool stop_ = false;
  ForkGuard fork_guard_;
  std::thread watcher_;
};

}  // namespace polyreme
