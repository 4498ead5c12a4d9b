#include "comm/rendezvous.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

#include "comm/rank_threads.h"
#include "comm/tcp_store.h"

namespace polyreme {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Each entry joins from a thread of its own. Returns "ok" or "<class>: <message>" for each.
std::vector<std::string> meet(const std::vector<RendezvousOptions>& options,
                              const std::function<void(size_t, const std::vector<RankRecord>&)>& check = {}) {
  TcpStoreOptions store_options;
  store_options.secret = "s";
  const auto server = TcpStore::serve(store_options);
  store_options.port = server->port();
  std::vector<std::string> outcomes(options.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < options.size(); ++i)
    threads.emplace_back([&, i] {
      try {
        const auto store = TcpStore::connect(store_options);
        const auto records = rendezvous(*store, options[i]);
        if (check) check(i, records);
        outcomes[i] = "ok";
      } catch (...) {
        outcomes[i] = outcome_of(std::current_exception());
      }
    });
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

RendezvousOptions rank_of(int rank, int world_size, milliseconds limit = seconds(20)) {
  RendezvousOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.limit = limit;
  options.fields = {
      {"isa", rank == 1 ? "avx2" : "avx512"}, {"version", "1"}, {"odd: name", std::string("\0:9", 3)}};
  return options;
}

void expect_text(const std::string& outcome, const std::string& type, const std::vector<std::string>& parts) {
  EXPECT_TRUE(outcome.starts_with(type)) << outcome;
  for (const std::string& part : parts)
    EXPECT_NE(outcome.find(part), std::string::npos) << "no '" << part << "' in " << outcome;
}

TEST(Rendezvous, AllLearnWhatAllSaid) {
  for (const int size : {1, 2, 5}) {
    std::vector<RendezvousOptions> options;
    for (int r = size - 1; r >= 0; --r) options.push_back(rank_of(r, size));
    const auto outcomes = meet(options, [&](size_t, const std::vector<RankRecord>& records) {
      ASSERT_EQ(records.size(), static_cast<size_t>(size));
      for (int r = 0; r < size; ++r) {
        const RankRecord& record = records[static_cast<size_t>(r)];
        EXPECT_EQ(record.rank, r);
        EXPECT_EQ(record.pid, getpid());
        EXPECT_FALSE(record.host.empty());
        EXPECT_EQ(record.fields, rank_of(r, size).fields);
      }
      require_same_field(records, "version");
      if (size > 1) {
        EXPECT_THROW(require_same_field(records, "isa"), InvalidArgument);
      }
    });
    EXPECT_EQ(outcomes, std::vector<std::string>(static_cast<size_t>(size), "ok"));
  }
}

TEST(Rendezvous, F01_LateRanksAreWaitedForWithProgress) {
  std::mutex mutex;
  std::vector<std::string> lines;
  auto first = rank_of(0, 3);
  first.progress_interval = milliseconds(50);
  first.progress = [&](const std::string& line) {
    const std::lock_guard lock(mutex);
    lines.push_back(line);
  };
  TcpStoreOptions store_options;
  const auto server = TcpStore::serve(store_options);
  store_options.port = server->port();
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r)
    threads.emplace_back([&, r] {
      const auto store = TcpStore::connect(store_options);
      if (r == 2) std::this_thread::sleep_for(milliseconds(400));
      EXPECT_EQ(rendezvous(*store, r == 0 ? first : rank_of(r, 3)).size(), 3u);
    });
  for (std::thread& thread : threads) thread.join();
  ASSERT_FALSE(lines.empty());
  EXPECT_EQ(lines.back(), "rendezvous: 2/3 joined, waiting for rank(s) 2");
}

TEST(Rendezvous, F02_MissingRanksAreNamedByAll) {
  for (const std::string& outcome : meet({rank_of(0, 4, milliseconds(300)), rank_of(2, 4, seconds(20))}))
    expect_text(outcome, "Timeout", {"2/4 joined", "rank(s) 1, 3", "0.3 s"});
}

TEST(Rendezvous, TwoProcessesOfOneRank) {
  for (const std::string& outcome : meet({rank_of(0, 2), rank_of(0, 2)}))
    expect_text(outcome, "InvalidArgument", {"two processes have RANK=0", concat("pid ", getpid())});
}

TEST(Rendezvous, F03_WorldSizesThatDiffer) {
  for (const std::string& outcome : meet({rank_of(0, 4), rank_of(1, 4), rank_of(2, 4), rank_of(3, 5)}))
    expect_text(outcome, "InvalidArgument", {"WORLD_SIZE differs", "5 on rank 3"});
}

// Rank 0 of two, while the other rank wrote `value` under `key`.
std::string outcome_beside(const std::string& key, const std::string& value) {
  const auto store = TcpStore::serve({});
  store->set("rendezvous/" + key, value);
  // A verdict is the last word; otherwise rank 0 judges that all have joined.
  store->add(key == "verdict" ? "rendezvous/judged" : "rendezvous/joined", 1);
  try {
    rendezvous(*store, rank_of(0, 2));
  } catch (...) {
    return outcome_of(std::current_exception());
  }
  return "ok";
}

TEST(Rendezvous, MalformedRecords) {
  EXPECT_EQ(outcome_beside("rank/1", "1:h2:12"), "ok");
  for (const char* record :
       {"", "1", "1:", "2:h", "-1:h", "x:h", "1:h", "1:h1:x", "1:h0:", "1:h2:12x", "1:h2:121:a",
        "1:h2:121:a2:b", "99999999999999999999:h", "1:h20:99999999999999999999",
        "1:h1:118446744073709551595:"})  // 2^64 - 21: back to where this field begins
    expect_text(outcome_beside("rank/1", record), "CommError", {"malformed", "same polyreme"});
}

TEST(Rendezvous, AVerdictWithoutText) {
  expect_text(outcome_beside("verdict", ""), "CommError", {"malformed", "same polyreme"});
}

TEST(Rendezvous, ImpossibleRanks) {
  for (const auto& options : {rank_of(2, 2), rank_of(-1, 2), rank_of(0, 0)}) {
    const auto outcomes = meet({options});
    expect_text(outcomes[0], "InvalidArgument", {options.world_size == 0 ? "WORLD_SIZE is 0" : "RANK is "});
  }
}

}  // namespace
}  // namespace polyreme
