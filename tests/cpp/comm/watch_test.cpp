// Named after the faults of the catalogue. Times that are waited for are budgets after which a test has
// failed; those that are slept are what the fault takes.

#include "comm/watch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <future>
#include <random>
#include <thread>

#include "comm/mp/rank_processes.h"
#include "comm/tcp_store/roll.h"

namespace polyreme {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kInterval = milliseconds(250);
constexpr auto kTimeout = milliseconds(1500);
constexpr auto kHang = seconds(20);

// Where a watch puts its failure.
class Failure {
 public:
  std::function<void(const std::string&)> sink() {
    return [this](const std::string& text) { promise_.set_value(text); };  // throws if called twice
  }
  bool comes_within(milliseconds limit) { return text_.wait_for(limit) == std::future_status::ready; }
  std::string text(milliseconds limit = kHang) { return comes_within(limit) ? text_.get() : "no failure"; }

 private:
  std::promise<std::string> promise_;
  std::future<std::string> text_ = promise_.get_future();
};

WatchOptions options_of(const TcpStoreOptions& store, int rank, Failure& failure) {
  return {store, rank, kInterval, kTimeout, failure.sink(), nullptr};
}

// The ranks of a job do not end before all watch.
void meet(RankProcesses& self, Store& store, int size) {
  if (store.add("watching", 1) == size) store.set("all watch", "");
  store.get("all watch", kHang);
  self.ready();
}

// Watches, says "ready", and ends with what the watch says.
void watch_until_failure(RankProcesses& self, Store&, int rank) {
  Failure failure;
  Watch watch(options_of(self.store_options(), rank, failure));
  self.ready();
  throw PeerLost(failure.text());
}

struct Job {
  explicit Job(int size, const RankProcesses::RankMain& rank_main = watch_until_failure)
      : ranks(size, rank_main) {
    for (int r = 0; r < size; ++r) ranks.wait_until_ready(r);
  }
  // What all of these say; they must agree.
  std::string verdict_of(const std::vector<RankResult>& results, const std::vector<size_t>& survivors) {
    for (const size_t r : survivors) EXPECT_EQ(results[r].outcome, results[survivors[0]].outcome);
    return results[survivors[0]].outcome;
  }
  RankProcesses ranks;
};

std::string rank_text(int rank, pid_t pid) {
  return concat("rank ", rank, " (host ", host_name(), ", pid ", pid, ")");
}

// ---- with real processes ----

TEST(WatchMp, F16_AKilledRankIsNamedEverywhere) {
  Job job(4);
  const std::string culprit = rank_text(2, job.ranks.pid(2));
  job.ranks.kill(2, SIGKILL);
  EXPECT_EQ(
      job.verdict_of(job.ranks.wait(kHang), {0, 1, 3}),
      concat("PeerLost: lost ", culprit, ": its connection to the store was closed; the process has ended"));
}

TEST(WatchMp, F30_TwoKilledAtOnceAreBothNamed) {
  Job job(4);
  const std::string first = rank_text(1, job.ranks.pid(1)), second = rank_text(2, job.ranks.pid(2));
  job.ranks.kill(1, SIGKILL);
  job.ranks.kill(2, SIGKILL);
  const std::string verdict = job.verdict_of(job.ranks.wait(kHang), {0, 3});
  EXPECT_NE(verdict.find(first), std::string::npos) << verdict;
  EXPECT_NE(verdict.find(second), std::string::npos) << verdict;
}

TEST(WatchMp, F25_AStoppedRankIsSilent) {
  Job job(3);
  const std::string culprit = rank_text(2, job.ranks.pid(2));
  job.ranks.kill(2, SIGSTOP);
  std::this_thread::sleep_for(kTimeout + kInterval);
  kill(job.ranks.pid(2), SIGCONT);  // it hears the verdict, too
  const std::string verdict = job.verdict_of(job.ranks.wait(kHang), {0, 1, 2});
  EXPECT_EQ(verdict, concat("PeerLost: lost ", culprit, ": no heartbeat for 1.5 s; the process is stopped"));
}

TEST(WatchMp, F26_AShortStopIsAStallAndNothingElse) {
  Job job(3, [](RankProcesses& self, Store& store, int rank) {
    Failure failure;
    Watch watch(options_of(self.store_options(), rank, failure));
    meet(self, store, 3);
    const std::string text = failure.text(kTimeout + 2 * kInterval);
    require<PeerLost>(text == "no failure", text);
    require(rank != 2 || watch.num_stalls() == 1, "stalls: ", watch.num_stalls());
  });
  job.ranks.kill(2, SIGSTOP);
  std::this_thread::sleep_for(kTimeout / 2);
  kill(job.ranks.pid(2), SIGCONT);
  EXPECT_EQ(job.verdict_of(job.ranks.wait(kHang), {0, 1, 2}), "ok");
}

TEST(WatchMp, F26_AShortStopOfTheStoresHostIsNoFailure) {
  Job job(3, [](RankProcesses& self, Store& store, int rank) {
    Failure failure;
    Watch watch(options_of(self.store_options(), rank, failure));
    meet(self, store, 3);
    const std::string text = failure.text(kTimeout + 2 * kInterval);
    require<PeerLost>(text == "no failure", text);
    require(rank == 0 || watch.num_stalls() == 1, "stalls: ", watch.num_stalls());
  });
  job.ranks.kill(0, SIGSTOP);
  std::this_thread::sleep_for(kTimeout / 2);
  kill(job.ranks.pid(0), SIGCONT);
  EXPECT_EQ(job.verdict_of(job.ranks.wait(kHang), {0, 1, 2}), "ok");
}

// As by Ctrl-Z, or a laptop that is closed: nobody may take its own absence for that of the others.
TEST(WatchMp, F26_AWholeJobThatIsSuspendedGoesOn) {
  Job job(3, [](RankProcesses& self, Store& store, int rank) {
    Failure failure;
    Watch watch(options_of(self.store_options(), rank, failure));
    meet(self, store, 3);
    const std::string text = failure.text(kTimeout + 6 * kInterval);
    require<PeerLost>(text == "no failure", text);
  });
  for (const int rank : {0, 1, 2}) job.ranks.kill(rank, SIGSTOP);
  std::this_thread::sleep_for(kTimeout + 2 * kInterval);
  for (const int rank : {0, 1, 2}) kill(job.ranks.pid(rank), SIGCONT);
  EXPECT_EQ(job.verdict_of(job.ranks.wait(kHang), {0, 1, 2}), "ok");
}

TEST(WatchMp, F08_TheStoresHostIsKilled) {
  Job job(3);
  const std::string host = rank_text(0, job.ranks.pid(0));
  job.ranks.kill(0, SIGKILL);
  const std::string verdict = job.verdict_of(job.ranks.wait(kHang), {1, 2});
  EXPECT_TRUE(verdict.starts_with("PeerLost: lost the store, host of " + host)) << verdict;
  EXPECT_TRUE(verdict.ends_with(": the connection was closed; the process has ended")) << verdict;
}

TEST(WatchMp, F08_TheStoresHostIsStopped) {
  Job job(3);
  job.ranks.kill(0, SIGSTOP);
  std::this_thread::sleep_for(kTimeout + 2 * kInterval);
  const pid_t stopped = job.ranks.pid(0);
  kill(stopped, SIGKILL);
  const std::string verdict = job.verdict_of(job.ranks.wait(kHang), {1, 2});
  EXPECT_TRUE(verdict.starts_with("PeerLost: lost the store, host of " + rank_text(0, stopped))) << verdict;
  EXPECT_TRUE(verdict.ends_with(": no answer for 1.5 s; the process is stopped")) << verdict;
}

TEST(WatchMp, F33_AFrozenWatchIsSilentToOthersAndNoticedAtHome) {
  Job job(3, [](RankProcesses& self, Store&, int rank) {
    Failure failure;
    Watch watch(options_of(self.store_options(), rank, failure));
    if (rank == 1) watch.freeze();
    self.ready();
    throw PeerLost(failure.text());
  });
  const std::string culprit = rank_text(1, job.ranks.pid(1));
  const std::vector<RankResult> results = job.ranks.wait(kHang);
  const std::string verdict = job.verdict_of(results, {0, 2});
  EXPECT_EQ(verdict, concat("PeerLost: lost ", culprit, ": no heartbeat for 1.5 s; the process is alive"));
  EXPECT_EQ(results[1].outcome, concat("PeerLost: ", culprit, ": its own watch has not run for 2.625 s"));
}

TEST(WatchMp, ACleanEndIsNoFailure) {
  for (const int leaver : {0, 2}) {
    Job job(3, [leaver](RankProcesses& self, Store& store, int rank) {
      Failure failure;
      Watch watch(options_of(self.store_options(), rank, failure));
      meet(self, store, 3);
      if (rank == leaver) return;
      const std::string text = failure.text(kTimeout + kInterval);
      require<PeerLost>(text == "no failure", text);
    });
    EXPECT_EQ(job.verdict_of(job.ranks.wait(kHang), {0, 1, 2}), "ok") << "rank " << leaver << " left";
  }
}

TEST(WatchMp, AForkedChildMayDropItsCopy) {
  Job job(2, [](RankProcesses& self, Store& store, int rank) {
    Failure failure;
    auto watch = std::make_unique<Watch>(options_of(self.store_options(), rank, failure));
    const pid_t child = fork();
    if (child == 0) {
      watch.reset();
      _exit(0);
    }
    int status = 1;
    require(waitpid(child, &status, 0) == child && status == 0, "the child ended with ", status);
    meet(self, store, 2);
    require(!failure.comes_within(2 * kInterval), "a failure");
  });
  EXPECT_EQ(job.verdict_of(job.ranks.wait(kHang), {0, 1}), "ok");
}

// ---- in one process ----

class WatchTest : public testing::Test {
 protected:
  TcpStoreOptions options() const { return {.port = server_->port(), .secret = "s"}; }
  std::unique_ptr<TcpStore> server_ = TcpStore::serve({.secret = "s"});
};

TEST_F(WatchTest, F22_TheFirstReportReachesAllAtOnce) {
  Failure failures[3];
  std::vector<std::unique_ptr<Watch>> watches;
  for (int r = 0; r < 3; ++r) {
    WatchOptions watch_options = options_of(options(), r, failures[r]);
    watch_options.heartbeat_interval = seconds(100);  // nobody waits for the next beat
    watch_options.peer_timeout = seconds(1000);
    watches.push_back(std::make_unique<Watch>(watch_options));
  }
  watches[1]->report("rank 1 failed: ValueError: boom");
  watches[2]->report("rank 2 failed, because of rank 1");
  for (Failure& failure : failures) EXPECT_EQ(failure.text(), "rank 1 failed: ValueError: boom");
  EXPECT_EQ(watches[0]->failure(), "rank 1 failed: ValueError: boom");

  Failure late;
  const Watch latecomer(options_of(options(), 3, late));
  EXPECT_EQ(late.text(), "rank 1 failed: ValueError: boom");
}

TEST_F(WatchTest, TheJournalKeepsTheFailure) {
  Failure failure;
  WatchOptions watch_options = options_of(options(), 0, failure);
  watch_options.journal = std::make_shared<Journal>(JournalOptions{});
  Watch watch(watch_options);
  watch.report("out of memory");
  EXPECT_EQ(watch.failure(), "out of memory");
  const auto* head = static_cast<const journal_layout::Header*>(watch_options.journal->address());
  EXPECT_EQ(head->num_events.load(), 1U);
  EXPECT_GT(head->heard_ns.load(), 0);
}

TEST_F(WatchTest, ASecondProcessOfARankIsRefused) {
  Failure first, second;
  const Watch watch(options_of(options(), 5, first));
  EXPECT_THROW(Watch(options_of(options(), 5, second)), CommError);
}

TEST_F(WatchTest, IntervalsThatMakeNoSenseAreRefused) {
  Failure failure;
  WatchOptions watch_options = options_of(options(), 0, failure);
  watch_options.peer_timeout = kInterval;
  EXPECT_THROW(Watch{watch_options}, InvalidArgument);
}

TEST_F(WatchTest, TheStoreEndsInOrderWithoutWaitingForIdleWatches) {
  Failure failure;
  Watch watch(options_of(options(), 1, failure));
  server_.reset();
  EXPECT_FALSE(failure.comes_within(kTimeout));
  watch.report("nobody hears this any more");
  EXPECT_EQ(watch.failure(), "");
}

// ---- parts ----

TEST(Roll, NamesWhoIsSilentAndOnlyOnce) {
  const Watched watched = this_watched(milliseconds(100), milliseconds(1000));
  Roll roll;
  EXPECT_TRUE(roll.join(0, watched, seconds(0)));
  EXPECT_TRUE(roll.join(1, watched, seconds(0)));
  EXPECT_FALSE(roll.join(1, watched, seconds(0)));
  EXPECT_EQ(roll.beat(0, milliseconds(150)), milliseconds(0));
  EXPECT_EQ(roll.beat(0, milliseconds(900)), milliseconds(750));
  roll.look(milliseconds(1000));
  EXPECT_EQ(roll.failure(), "");
  roll.look(milliseconds(1100));
  EXPECT_EQ(roll.failure(),
            concat("lost ", rank_text(1, getpid()), ": no heartbeat for 1 s; the process is alive"));
  roll.fail("another");
  roll.look(seconds(10));
  EXPECT_EQ(roll.failure().find("another"), std::string::npos);
  EXPECT_EQ(roll.failure().find("rank 0"), std::string::npos);
}

TEST(AwakeClock, APauseCountsAsMuchAsItMay) {
  AwakeClock clock;
  std::this_thread::sleep_for(milliseconds(60));
  EXPECT_EQ(clock.advance(milliseconds(20)), milliseconds(20));
  EXPECT_LT(clock.advance(seconds(1)), milliseconds(1020));
}

TEST(Watched, GoesOverTheWire) {
  const Watched self = this_watched(kInterval, kTimeout);
  const auto decoded = decode_watched(encode(self));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(encode(*decoded), encode(self));
  for (const std::string text : {"", "1", "1 2 3 4 5 boot", "0 2 3 4 5 b h", "-1 2 3 4 5 b h",
                                 "x 2 3 4 5 b h", "1 99999999999999999999 3 4 5 b h"})
    EXPECT_FALSE(decode_watched(text)) << text;
  EXPECT_FALSE(decode_watched("1 2 3 4 5 b " + std::string(1 << 20, 'h')));
  std::minstd_rand random(7);
  for (int i = 0; i < 2000; ++i) {
    std::string text = encode(self);
    for (int k = 0; k < 3; ++k) text[random() % text.size()] = static_cast<char>(random());
    decode_watched(text);
  }
}

}  // namespace
}  // namespace polyreme
