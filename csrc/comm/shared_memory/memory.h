#pragma once

#include <cstddef>
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

// Where a transport takes its shared memory from; this is all that tells transports over shared
// memory apart. Thread-safe.
class SharedMemorySource {
 public:
  virtual ~SharedMemorySource() = default;
  // Fresh memory under a fresh name, by which the other ranks attach it. Throws OutOfMemory.
  virtual std::shared_ptr<SharedMemory> create(size_t size_bytes, std::string* name) = 0;
  // Throws CommError if there is none of that name.
  virtual std::shared_ptr<SharedMemory> attach(const std::string& name) = 0;
  // Takes the name away; who has the memory keeps it. Twice is allowed.
  virtual void forget(const std::string& name) noexcept = 0;
};

// Memory of this process, for ranks that are its threads.
std::shared_ptr<SharedMemorySource> make_heap_source();

// POSIX shared memory of this host, named /polyreme-<job_id>-<random>. Throws InvalidArgument for a
// job id that is not 1 to 100 letters, digits, '.', '_' or '-'.
std::shared_ptr<SharedMemorySource> make_posix_source(const std::string& job_id);

}  // namespace polyreme
