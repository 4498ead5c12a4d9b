#include "comm/journal.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "base/fence.h"
#include "comm/net/socket.h"
#include "comm/shared_memory/memory.h"
#include "comm/shared_memory/process.h"

namespace polyreme {
namespace {

using namespace journal_layout;

constexpr uint32_t kMaxGroups = 256;
constexpr uint32_t kMaxEvents = 64;
constexpr size_t kHeaderBytes = 4096;

int64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

template <size_t N>
void copy_text(char (&to)[N], std::string_view text) {
  const size_t length = std::min(N, text.size());
  std::memcpy(to, text.data(), length);
  std::memset(to + length, 0, N - length);
}

// Names of the numbers 0, 1, ... up to the first one without.
template <typename Enum, size_t N, size_t Bytes>
void copy_names(char (&to)[N][Bytes], const char* (*name)(Enum)) {
  for (size_t i = 0; i < N && !std::string_view(name(static_cast<Enum>(i))).starts_with("unknown"); ++i)
    copy_text(to[i], name(static_cast<Enum>(i)));
}

const char* state_name(OperationState state) {
  switch (state) {
    case OperationState::kEnqueued:
      return "enqueued";
    case OperationState::kRunning:
      return "running";
    case OperationState::kDone:
      return "done";
    case OperationState::kFailed:
      return "failed";
  }
  return state == OperationState{} ? "nothing" : "unknown";
}

// The directory, made if it is not there.
FileDescriptor open_directory(const std::string& path) {
  const int error = mkdir(path.c_str(), 0700) == 0 ? 0 : errno;
  require<CommError>(error == 0 || error == EEXIST, "cannot make the record directory ", path, ": ",
                     std::strerror(error));
  FileDescriptor directory(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  require<CommError>(static_cast<bool>(directory), "cannot open the record directory ", path, ": ",
                     std::strerror(errno));
  struct stat status {};
  const bool ours = fstat(directory.get(), &status) == 0 && status.st_uid == geteuid();
  require(ours && (status.st_mode & 022) == 0, "the record directory ", path,
          " belongs to, or can be written by, another user; name a directory of your own, mode 0700");
  return directory;
}

// A fresh file of that name, private to this user; an old one of ours goes.
FileDescriptor make_file(const FileDescriptor& directory, const char* name, const std::string& path,
                         size_t size_bytes) {
  struct stat old {};
  if (fstatat(directory.get(), name, &old, AT_SYMLINK_NOFOLLOW) == 0) {
    require(S_ISREG(old.st_mode) && old.st_uid == geteuid(), path,
            " is not a journal of this user; remove it, or record elsewhere");
    unlinkat(directory.get(), name, 0);
  }
  FileDescriptor file(openat(directory.get(), name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  require<CommError>(static_cast<bool>(file), "cannot make the journal ", path, ": ", std::strerror(errno));
  // Without the reservation a full disk would be a SIGBUS in the middle of an operation.
  const int error = reserve_pages(file.get(), 0, static_cast<int64_t>(size_bytes));
  if (error != 0) unlinkat(directory.get(), name, 0);
  require<OutOfMemory>(error == 0, "no room for the journal ", path, ", ", size_bytes,
                       " bytes: ", std::strerror(error));
  return file;
}

}  // namespace

Journal::Journal(const JournalOptions& options) : num_slots_(options.num_slots) {
  require(num_slots_ >= 1 && num_slots_ <= 1 << 20, "journal: num_slots is ", num_slots_,
          "; expected 1 to 2^20");
  const size_t events_at = kHeaderBytes + kMaxGroups * sizeof(Group);
  const size_t ring_at = events_at + kMaxEvents * sizeof(EventRecord);
  size_bytes_ = ring_at + num_slots_ * sizeof(Operation);

  const bool in_file = !options.directory.empty();
  FileDescriptor file;
  if (in_file) {
    char name[32];
    std::snprintf(name, sizeof(name), "rank-%05d.journal", options.rank);
    const FileDescriptor directory = open_directory(options.directory);
    path_ = options.directory + "/" + name;
    file = make_file(directory, name, path_, size_bytes_);
  }
  address_ = mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | (in_file ? 0 : MAP_ANONYMOUS),
                  file.get(), 0);
  require<OutOfMemory>(address_ != MAP_FAILED, "cannot map the journal, ", size_bytes_,
                       " bytes: ", std::strerror(errno));
  char* const base = static_cast<char*>(address_);
  groups_ = reinterpret_cast<Group*>(base + kHeaderBytes);
  events_ = reinterpret_cast<EventRecord*>(base + events_at);
  ring_ = reinterpret_cast<Operation*>(base + ring_at);
  write_header(options);
}

Journal::~Journal() {
  close();
  munmap(address_, size_bytes_);
}

void Journal::write_header(const JournalOptions& options) {
  Header& head = header();
  head.version = kVersion;
  head.header_bytes = kHeaderBytes;
  head.group_bytes = sizeof(Group);
  head.max_groups = kMaxGroups;
  head.event_bytes = sizeof(EventRecord);
  head.max_events = kMaxEvents;
  head.operation_bytes = sizeof(Operation);
  head.num_slots = num_slots_;
  head.rank = options.rank;
  head.world_size = options.world_size;
  head.pid = getpid();
  head.start_ns = clock_ns(CLOCK_MONOTONIC);
  head.wall_offset_ns = clock_ns(CLOCK_REALTIME) - head.start_ns;
  copy_text(head.host, host_name());
  copy_text(head.boot_id, boot_id());
  copy_text(head.job_id, options.job_id);
  copy_names(head.operation_names, collective_name);
  copy_names(head.dtype_names, dtype_name);
  copy_names(head.reduction_names, reduce_op_name);
  copy_names(head.state_names, state_name);
  // Last: a half-made journal is none.
  head.magic.store(std::bit_cast<uint64_t>(std::to_array(kMagic)), std::memory_order_release);
}

uint32_t Journal::add_group(std::string_view name, int rank, int size, const Origin& origin) noexcept {
  const uint32_t number = std::min(header().num_groups.fetch_add(1), kMaxGroups - 1);
  if (number == kMaxGroups - 1) {  // stands for many: never ready
    header().num_groups.store(kMaxGroups);
    return number;
  }
  Group& group = groups_[number];
  copy_text(group.name, name);
  group.rank = rank;
  group.size = size;
  group.parent = origin.parent;
  group.color = origin.color;
  group.split_sequence = origin.split_sequence;
  group.ready.store(1, std::memory_order_release);
  return number;
}

uint64_t Journal::enqueue(uint32_t group, const CollectiveCall& call, int64_t num_bytes,
                          const char (&label)[kLabelBytes], const JournalParts& parts) noexcept {
  const uint64_t ticket = header().num_operations.fetch_add(1, std::memory_order_relaxed);
  Operation& slot = ring_[ticket % num_slots_];
  slot.mark.store(2 * ticket + 1, std::memory_order_relaxed);
  release_fence();  // what is written below stays below
  slot.sequence = call.sequence;
  slot.count = call.count;
  slot.num_bytes = num_bytes;
  slot.enqueued_ns = clock_ns(CLOCK_MONOTONIC);
  slot.started_ns.store(0, std::memory_order_relaxed);
  slot.ended_ns.store(0, std::memory_order_relaxed);
  slot.group = group;
  slot.root = call.root;
  slot.operation = static_cast<uint8_t>(call.op);
  slot.dtype = static_cast<uint8_t>(call.dtype);
  slot.reduction = static_cast<uint8_t>(call.reduce);
  slot.state.store(static_cast<uint8_t>(OperationState::kEnqueued), std::memory_order_relaxed);
  std::memcpy(slot.label, label, kLabelBytes);
  slot.num_parts = parts.num;
  slot.counts_hash = call.counts_hash;
  std::memcpy(slot.parts, parts.first, sizeof(slot.parts));
  slot.mark.store(2 * ticket + 2, std::memory_order_release);
  return ticket;
}

// Nothing once the ring has gone over it.
Operation* Journal::slot_of(uint64_t ticket) const {
  Operation& slot = ring_[ticket % num_slots_];
  return slot.mark.load(std::memory_order_acquire) == 2 * ticket + 2 ? &slot : nullptr;
}

void Journal::start(uint64_t ticket, bool at_once) noexcept {
  Operation* const slot = slot_of(ticket);
  if (slot == nullptr) return;
  slot->started_ns.store(at_once ? slot->enqueued_ns : clock_ns(CLOCK_MONOTONIC), std::memory_order_relaxed);
  slot->state.store(static_cast<uint8_t>(OperationState::kRunning), std::memory_order_release);
}

void Journal::end(uint64_t ticket, bool failed) noexcept {
  Operation* const slot = slot_of(ticket);
  if (slot == nullptr) return;
  slot->ended_ns.store(clock_ns(CLOCK_MONOTONIC), std::memory_order_relaxed);
  const OperationState state = failed ? OperationState::kFailed : OperationState::kDone;
  slot->state.store(static_cast<uint8_t>(state), std::memory_order_release);
}

void Journal::withdraw(uint64_t ticket) noexcept {
  Operation* const slot = slot_of(ticket);
  if (slot != nullptr) slot->mark.store(2 * ticket + 1, std::memory_order_release);
}

void Journal::note(JournalEvent kind, std::string_view text, int64_t duration_ns) noexcept {
  const uint32_t number = header().num_events.fetch_add(1);
  if (number >= kMaxEvents) return;
  EventRecord& event = events_[number];
  event.time_ns = clock_ns(CLOCK_MONOTONIC);
  event.duration_ns = duration_ns;
  copy_text(event.text, text);
  event.kind.store(static_cast<uint32_t>(kind), std::memory_order_release);
}

void Journal::set_heard() noexcept {
  header().heard_ns.store(clock_ns(CLOCK_MONOTONIC), std::memory_order_relaxed);
}

void Journal::close() noexcept {
  if (header().pid == getpid()) header().ended_ns.store(clock_ns(CLOCK_MONOTONIC));  // not a forked child
}

GroupJournal::GroupJournal(std::shared_ptr<Journal> journal, std::string_view name, int rank, int size,
                           const Journal::Origin& origin)
    : journal_(std::move(journal)), group_(journal_ ? journal_->add_group(name, rank, size, origin) : 0) {}

void GroupJournal::set_label(std::string_view label) noexcept { copy_text(label_, label); }

}  // namespace polyreme
