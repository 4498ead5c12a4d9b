#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace polyreme {

// Zeroed memory that all ranks of a group see, page-aligned. Gone with its last owner.
class SharedMemory {
 public:
  SharedMemory(void* address, size_t size_bytes) : address_(address), size_bytes_(size_bytes) {}
  virtual ~SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* address() const { return address_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  void* address_;
  size_t size_bytes_;
};

// A large range of addresses that one rank writes and the others read. Bytes exist where they were committed,
// and read as zeros elsewhere.
class SharedArena : public SharedMemory {
 public:
  using SharedMemory::SharedMemory;
  // Whole pages. False if there is no memory.
  virtual bool commit(size_t offset, size_t size_bytes) noexcept = 0;
  virtual void decommit(size_t offset, size_t size_bytes) noexcept = 0;
};

// Where a transport takes its shared memory from; this is all that tells transports over shared
// memory apart. Thread-safe.
class SharedMemorySource {
 public:
  virtual ~SharedMemorySource() = default;
  // Fresh memory under a fresh name, by which the other ranks attach it. Throws OutOfMemory.
  virtual std::shared_ptr<SharedMemory> create(size_t size_bytes, std::string* name) = 0;
  // Throws CommError if there is none of that name.
  virtual std::shared_ptr<SharedMemory> attach(const std::string& name) = 0;
  // Fresh addresses for an arena, as many as the host has memory, and their read-only view on another rank.
  // Throw NotAvailable or CommError where there are none.
  virtual std::shared_ptr<SharedArena> create_arena(std::string* name) = 0;
  virtual std::shared_ptr<SharedMemory> attach_arena(const std::string& name) = 0;
  // Takes the name away; who has the memory keeps it. Twice is allowed.
  virtual void forget(const std::string& name) noexcept = 0;
};

// Takes a name away when it ends. Empty: nothing to do.
struct SharedName {
  std::shared_ptr<SharedMemorySource> source;
  std::string name;
  ~SharedName() {
    if (!name.empty()) source->forget(name);
  }
};

// posix_fallocate that starts again when a signal ends it. Returns errno, or 0.
int reserve_pages(int fd, int64_t begin, int64_t size_bytes);

// Memory of this process, for ranks that are its threads.
std::shared_ptr<SharedMemorySource> make_heap_source();

// POSIX shared memory of this host, named /polyreme-<job_id>-<random>. Throws InvalidArgument for a
// job id that is not 1 to 100 letters, digits, '.', '_' or '-'.
std::shared_ptr<SharedMemorySource> make_posix_source(const std::string& job_id);

}  // namespace polyreme
