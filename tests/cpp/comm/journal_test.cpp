#include "comm/journal.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/error.h"

namespace polyreme {
namespace {

using journal_layout::Header;
using journal_layout::Operation;

constexpr size_t kGroupsAt = 4096, kMaxGroups = 256, kMaxEvents = 64;

class TemporaryFolder {
 public:
  TemporaryFolder() : path_(testing::TempDir() + "polyreme-journal-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp");
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

const Header& header_of(const void* address) { return *static_cast<const Header*>(address); }
const journal_layout::Group& group_of(const void* address, size_t number) {
  return reinterpret_cast<const journal_layout::Group*>(static_cast<const char*>(address) +
                                                        kGroupsAt)[number];
}
const Operation& slot_of(const void* address, size_t number) {
  const Header& head = header_of(address);
  const size_t at = head.header_bytes + kMaxGroups * sizeof(journal_layout::Group) +
                    kMaxEvents * sizeof(journal_layout::EventRecord);
  return reinterpret_cast<const Operation*>(static_cast<const char*>(address) + at)[number];
}

CollectiveCall call_of(uint64_t sequence) {
  return {.sequence = sequence, .count = 10 * static_cast<int64_t>(sequence), .op = CollectiveOp::kAllReduce};
}

TEST(Journal, KeepsTheLastOperationsOfItsGroups) {
  const auto journal = std::make_shared<Journal>(JournalOptions{.rank = 1, .world_size = 4, .num_slots = 8});
  GroupJournal world(journal, "world", 1, 4);
  GroupJournal pair = world.subgroup("pair", 0, 2, 7, 3);
  pair.set_label("a label that is longer than thirty-two bytes");
  for (uint64_t n = 1; n <= 11; ++n) {
    const JournalEntry entry = (n == 11 ? pair : world).enqueue(call_of(n), 40);
    if (n < 10) entry.start();
    if (n < 9) entry.end(n == 8);
  }
  const void* const memory = journal->address();
  EXPECT_EQ(header_of(memory).num_operations.load(), 11U);
  EXPECT_EQ(group_of(memory, 0).parent, journal_layout::kNoParent);
  const journal_layout::Group& second = group_of(memory, 1);
  EXPECT_STREQ(second.name, "pair");
  EXPECT_EQ(std::tuple(second.rank, second.size, second.parent, second.color, second.split_sequence),
            std::tuple(0, 2, 0U, 7, 3U));
  for (uint64_t n = 4; n <= 11; ++n) {
    const Operation& slot = slot_of(memory, (n - 1) % 8);
    EXPECT_EQ(slot.mark.load(), 2 * n);
    EXPECT_EQ(slot.sequence, n);
    EXPECT_EQ(slot.count, static_cast<int64_t>(10 * n));
    const auto state = static_cast<OperationState>(slot.state.load());
    EXPECT_EQ(state, n < 8    ? OperationState::kDone
                     : n == 8 ? OperationState::kFailed
                     : n == 9 ? OperationState::kRunning
                              : OperationState::kEnqueued);
    EXPECT_EQ(slot.started_ns.load() >= slot.enqueued_ns, n < 10);
    EXPECT_EQ(slot.ended_ns.load() >= slot.enqueued_ns, n < 9);
    EXPECT_EQ(slot.group, n == 11 ? 1U : 0U);
    EXPECT_EQ(std::string(slot.label, n == 11 ? 32 : 0), n == 11 ? "a label that is longer than thir" : "");
  }
  EXPECT_STREQ(header_of(memory).operation_names[static_cast<size_t>(CollectiveOp::kAllReduce)],
               "all_reduce");
  EXPECT_STREQ(header_of(memory).state_names[4], "failed");
}

TEST(Journal, ALateEndDoesNotTouchTheOperationThatTookItsSlot) {
  Journal journal({.num_slots = 2});
  const char label[journal_layout::kLabelBytes] = {};
  const uint64_t first = journal.enqueue(0, call_of(1), 0, label);
  journal.enqueue(0, call_of(2), 0, label);
  journal.enqueue(0, call_of(3), 0, label);
  journal.start(first);
  journal.end(first, true);
  EXPECT_EQ(slot_of(journal.address(), 0).sequence, 3U);
  EXPECT_EQ(slot_of(journal.address(), 0).ended_ns.load(), 0);
}

TEST(Journal, AWithdrawnOperationIsNone) {
  const auto journal = std::make_shared<Journal>(JournalOptions{});
  GroupJournal(journal, "g", 0, 1).enqueue(call_of(1), 0).withdraw();
  EXPECT_EQ(slot_of(journal->address(), 0).mark.load() % 2, 1U);
}

TEST(Journal, ManyGroupsAndEventsDoNotOverflow) {
  Journal journal({});
  for (uint32_t i = 0; i < 600; ++i)
    EXPECT_EQ(journal.add_group("g", 0, 1, {}), std::min<uint32_t>(i, kMaxGroups - 1));
  EXPECT_EQ(group_of(journal.address(), kMaxGroups - 1).ready.load(), 0U);
  EXPECT_EQ(header_of(journal.address()).num_groups.load(), kMaxGroups);
  for (int i = 0; i < 100; ++i) journal.note(JournalEvent::kStall, std::string(1000, 'x'));
  EXPECT_EQ(header_of(journal.address()).num_events.load(), 100U);
}

TEST(Journal, WritersOnThreadsKeepTheirRecordsApart) {
  const auto journal = std::make_shared<Journal>(JournalOptions{.num_slots = 1 << 12});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&journal, t] {
      const GroupJournal group(journal, "g", t, 4);
      for (uint64_t n = 1; n <= 1000; ++n) {
        const JournalEntry entry = group.enqueue({.sequence = n, .root = t}, 0);
        entry.start();
        entry.end(false);
      }
    });
  for (std::thread& thread : threads) thread.join();
  std::vector<uint64_t> last(4);
  for (size_t i = 0; i < 4000; ++i) {
    const Operation& slot = slot_of(journal->address(), i);
    ASSERT_EQ(slot.mark.load(), 2 * i + 2);
    ASSERT_EQ(slot.state.load(), static_cast<uint8_t>(OperationState::kDone));
    ASSERT_EQ(slot.sequence, ++last[static_cast<size_t>(slot.root)]);
  }
}

// ---- files ----

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Journal, TheFileOutlivesSigkill) {
  const TemporaryFolder folder;
  const std::string path = folder / "record/rank-00003.journal";
  const pid_t child = fork();
  if (child == 0) {
    const auto journal = std::make_shared<Journal>(
        JournalOptions{.directory = folder / "record", .rank = 3, .world_size = 4, .job_id = "job"});
    const GroupJournal group(journal, "world", 3, 4);
    group.enqueue(call_of(7), 280).start();
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  struct stat info {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  ASSERT_EQ(stat((folder / "record").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700U);
  const std::string bytes = read_file(path);
  const Header& head = header_of(bytes.data());
  EXPECT_EQ(std::memcmp(&head.magic, journal_layout::kMagic, sizeof(journal_layout::kMagic)), 0);
  EXPECT_EQ(head.rank, 3);
  EXPECT_EQ(head.pid, child);
  EXPECT_EQ(head.ended_ns.load(), 0);
  EXPECT_EQ(slot_of(bytes.data(), 0).sequence, 7U);
  EXPECT_EQ(slot_of(bytes.data(), 0).state.load(), static_cast<uint8_t>(OperationState::kRunning));
}

TEST(Journal, ReplacesItsOwnOldFileAndNoOther) {
  const TemporaryFolder folder;
  const std::string path = folder / "rank-00000.journal";
  { const Journal journal({.directory = folder / ""}); }
  EXPECT_NE(header_of(read_file(path).data()).ended_ns.load(), 0);
  { const Journal journal({.directory = folder / "", .job_id = "second"}); }
  EXPECT_STREQ(header_of(read_file(path).data()).job_id, "second");

  std::filesystem::remove(path);
  std::ofstream(folder / "precious") << "keep me";
  std::filesystem::create_symlink(folder / "precious", path);
  EXPECT_THROW(Journal({.directory = folder / ""}), InvalidArgument);
  EXPECT_EQ(read_file(folder / "precious"), "keep me");
}

TEST(Journal, RefusesADirectoryThatOthersCanWrite) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "open");
  chmod((folder / "open").c_str(), 0777);
  EXPECT_THROW(Journal({.directory = folder / "open"}), InvalidArgument);
  std::ofstream(folder / "file") << "";
  EXPECT_THROW(Journal({.directory = folder / "file"}), CommError);
  EXPECT_THROW(Journal({.directory = folder / "no/such"}), CommError);
}

// The figure is reported, and asserted nowhere.
TEST(Journal, OverheadPerOperation) {
  const auto journal = std::make_shared<Journal>(JournalOptions{});
  const GroupJournal group(journal, "world", 0, 1);
  constexpr int kCount = 200'000;
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t n = 0; n < kCount; ++n) {
    const JournalEntry entry = group.enqueue(call_of(n), 40);
    entry.start();
    entry.end(false);
  }
  const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
  RecordProperty("ns_per_operation", static_cast<int>(elapsed.count() / kCount));
  std::printf("journal: %.0f ns per operation (three times taken)\n", elapsed.count() / kCount);
  EXPECT_EQ(header_of(journal->address()).num_operations.load(), static_cast<uint64_t>(kCount));
}

}  // namespace
}  // namespace polyreme
