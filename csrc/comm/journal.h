#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "comm/collective.h"

namespace polyreme {

// How far a journalled operation came. Failed: it threw.
enum class OperationState : uint8_t { kEnqueued = 1, kRunning, kDone, kFailed };
// What else a rank writes down. kStall: the store did not hear it for a while; kFailure: why it gave up.
enum class JournalEvent : uint32_t { kNone, kStall, kFailure };

// The layout of a journal: header, groups, events, ring of operations. The header tells all sizes and the
// names of all numbers, so a reader needs no list of its own. Fixed-size text is cut, and filled with zeros.
// Whoever changes the layout raises kVersion.
namespace journal_layout {

inline constexpr char kMagic[8] = {'P', 'L', 'Y', 'J', 'R', 'N', 'L', '\n'};
inline constexpr uint32_t kVersion = 2;
inline constexpr size_t kLabelBytes = 32;
inline constexpr size_t kMaxParts = 4;

struct Header {
  std::atomic<uint64_t> magic;  // the bytes of kMagic
  uint32_t version, header_bytes;
  uint32_t group_bytes, max_groups;
  uint32_t event_bytes, max_events;
  uint32_t operation_bytes, num_slots;
  int32_t rank, world_size;
  int64_t pid;
  int64_t start_ns;        // CLOCK_MONOTONIC, as all times
  int64_t wall_offset_ns;  // what is to be added for the time since 1970
  char host[64], boot_id[40], job_id[104];
  char operation_names[32][16], dtype_names[16][12], reduction_names[8][12], state_names[8][12];
  std::atomic<uint64_t> num_operations;  // begun so far; the ring holds the last num_slots of them
  std::atomic<uint32_t> num_groups, num_events;
  std::atomic<int64_t> heard_ns;  // when the watch last ran
  std::atomic<int64_t> ended_ns;  // 0 if the journal was not closed in order
};

// Which group this is on another rank: of the world, the n-th without a parent; else the one that the same
// split of the same parent made for the same color.
struct Group {
  char name[64];
  int32_t rank, size;
  uint32_t parent;  // kNoParent; smaller than its own number
  int32_t color;
  uint64_t split_sequence;
  std::atomic<uint32_t> ready;
  uint32_t reserved;
};
inline constexpr uint32_t kNoParent = UINT32_MAX;

struct EventRecord {
  std::atomic<uint32_t> kind;  // JournalEvent, written last
  uint32_t reserved;
  int64_t time_ns, duration_ns;
  char text[488];
};

// The slot of operation n is n % num_slots. `mark` is 2n + 2 when it was written, odd before: a reader
// leaves odd ones out. Times and state change later on, each by one store.
struct Operation {
  std::atomic<uint64_t> mark;
  uint64_t sequence;
  int64_t count, num_bytes;
  int64_t enqueued_ns;
  std::atomic<int64_t> started_ns, ended_ns;  // 0 before
  uint32_t group;
  int32_t root;
  uint8_t operation, dtype, reduction;
  std::atomic<uint8_t> state;  // OperationState
  char label[kLabelBytes];
  uint32_t num_parts;        // of an exchange; the first ones are told
  uint64_t counts_hash;      // of the call
  int32_t parts[kMaxParts];  // the peer of a send; of a receive, ~peer
};

static_assert(sizeof(Header) <= 4096 && sizeof(Group) == 96 && sizeof(EventRecord) == 512 &&
              sizeof(Operation) == 128);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace journal_layout

struct JournalOptions {
  // Where rank-00003.journal goes: made with mode 0700 if it is not there. Empty: memory of this process.
  std::string directory;
  int rank = 0;
  int world_size = 1;
  std::string job_id;
  uint32_t num_slots = 1 << 14;  // operations in the ring
};

// With whom a rank exchanges.
struct JournalParts {
  uint32_t num = 0;
  int32_t first[journal_layout::kMaxParts] = {};
  void add(bool sends, int peer) {
    if (num < journal_layout::kMaxParts) first[num] = sends ? peer : ~peer;
    ++num;
  }
};

// What one process did in its groups: a ring of the last operations. In a file the ring is mapped memory,
// so that it outlives even SIGKILL, without any code that runs at the end. Writing takes no lock, no
// memory and no system call. From any thread; the ring wraps around 2^14 operations later, so no operation
// is in flight that long.
class Journal {
 public:
  // Throws InvalidArgument for a directory or an old journal there that is not this user's own,
  // OutOfMemory if there is no room for the file (2 MiB), CommError if it cannot be made.
  explicit Journal(const JournalOptions& options);
  ~Journal();  // closes it
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  struct Origin {
    uint32_t parent = journal_layout::kNoParent;
    int color = 0;
    uint64_t split_sequence = 0;
  };
  // Returns the number of the group. When the table is full (256), all further ones share the last number,
  // and cannot be told apart.
  uint32_t add_group(std::string_view name, int rank, int size, const Origin& origin) noexcept;

  // Returns a ticket for the functions below.
  uint64_t enqueue(uint32_t group, const CollectiveCall& call, int64_t num_bytes,
                   const char (&label)[journal_layout::kLabelBytes], const JournalParts& parts = {}) noexcept;
  // `at_once`: when it was enqueued, for which no clock is read again.
  void start(uint64_t ticket, bool at_once = false) noexcept;
  void end(uint64_t ticket, bool failed) noexcept;
  // It was never issued: the device refused it.
  void withdraw(uint64_t ticket) noexcept;

  // The first 64 are kept.
  void note(JournalEvent kind, std::string_view text, int64_t duration_ns = 0) noexcept;
  void set_heard() noexcept;
  // The process ends in order. What comes after that is still written.
  void close() noexcept;

  // Empty in memory.
  const std::string& path() const { return path_; }
  const void* address() const { return address_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  journal_layout::Header& header() const { return *static_cast<journal_layout::Header*>(address_); }
  void write_header(const JournalOptions& options);
  journal_layout::Operation* slot_of(uint64_t ticket) const;

  std::string path_;
  size_t size_bytes_ = 0;
  void* address_ = nullptr;
  uint32_t num_slots_;
  journal_layout::Group* groups_ = nullptr;
  journal_layout::EventRecord* events_ = nullptr;
  journal_layout::Operation* ring_ = nullptr;
};

// One operation on its way. Without a journal it does nothing.
class JournalEntry {
 public:
  JournalEntry() = default;
  // Another one. Counting owners is atomic: it is left out where the journal stays the same.
  void renew(const std::shared_ptr<Journal>& journal, uint64_t ticket) {
    if (journal_ != journal) journal_ = journal;
    ticket_ = ticket;
  }
  void start(bool at_once = false) const noexcept {
    if (journal_) journal_->start(ticket_, at_once);
  }
  void end(bool failed) const noexcept {
    if (journal_) journal_->end(ticket_, failed);
  }
  void withdraw() const noexcept {
    if (journal_) journal_->withdraw(ticket_);
  }

 private:
  std::shared_ptr<Journal> journal_;
  uint64_t ticket_ = 0;
};

// One group's way into the journal: what a communicator holds. Belongs to one thread at a time.
class GroupJournal {
 public:
  GroupJournal() = default;
  GroupJournal(std::shared_ptr<Journal> journal, std::string_view name, int rank, int size)
      : GroupJournal(std::move(journal), name, rank, size, Journal::Origin()) {}
  // Of a group that a split of this one made.
  GroupJournal subgroup(std::string_view name, int rank, int size, int color, uint64_t split_sequence) const {
    return {journal_, name, rank, size, {group_, color, split_sequence}};
  }

  // Goes with the operations that are enqueued from now on; cut to 32 bytes.
  void set_label(std::string_view label) noexcept;
  JournalEntry enqueue(const CollectiveCall& call, int64_t num_bytes,
                       const JournalParts& parts = {}) const noexcept {
    JournalEntry entry;
    enqueue(entry, call, num_bytes, parts);
    return entry;
  }
  // Into an entry whose own operation is over.
  void enqueue(JournalEntry& entry, const CollectiveCall& call, int64_t num_bytes,
               const JournalParts& parts = {}) const noexcept {
    if (journal_) entry.renew(journal_, journal_->enqueue(group_, call, num_bytes, label_, parts));
  }

 private:
  GroupJournal(std::shared_ptr<Journal> journal, std::string_view name, int rank, int size,
               const Journal::Origin& origin);

  std::shared_ptr<Journal> journal_;
  uint32_t group_ = 0;
  char label_[journal_layout::kLabelBytes] = {};
};

}  // namespace polyreme
