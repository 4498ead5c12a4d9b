#include "comm/shared_memory/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "base/error.h"

namespace polyreme {
namespace {

class Mapping final : public SharedMemory {
 public:
  using SharedMemory::SharedMemory;
  ~Mapping() override { munmap(address(), size_bytes()); }
};

// MAP_POPULATE: the page faults come here and not in the first collectives.
std::shared_ptr<SharedMemory> map_bytes(int fd, size_t size_bytes) {
  const int flags = (fd < 0 ? MAP_ANONYMOUS : 0) | MAP_SHARED | MAP_POPULATE;
  void* address = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  require<OutOfMemory>(address != MAP_FAILED, "cannot map ", size_bytes,
                       " bytes of shared memory: ", std::strerror(errno), "; lower chunk_bytes");
  return std::make_shared<Mapping>(address, size_bytes);
}

class HeapSource final : public SharedMemorySource {
 public:
  std::shared_ptr<SharedMemory> create(size_t size_bytes, std::string* name) override {
    auto memory = map_bytes(-1, size_bytes);
    const std::lock_guard lock(mutex_);
    *name = concat("heap-", next_++);
    memory_[*name] = memory;
    return memory;
  }
  std::shared_ptr<SharedMemory> attach(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    const auto found = memory_.find(name);
    require<CommError>(found != memory_.end(), "no shared memory named ", name, " in this process");
    return found->second;
  }
  void forget(const std::string& name) noexcept override {
    const std::lock_guard lock(mutex_);
    memory_.erase(name);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<SharedMemory>> memory_;
  int64_t next_ = 0;
};

// Closes the file when it goes out of scope.
struct OpenFile {
  int fd;
  ~OpenFile() { close(fd); }
};

std::string random_suffix() {
  uint64_t bits = 0;
  require<CommError>(getrandom(&bits, sizeof(bits), 0) == static_cast<ssize_t>(sizeof(bits)),
                     "getrandom: ", std::strerror(errno));
  std::string text;
  for (int i = 0; i < 16; ++i, bits >>= 4) text += "0123456789abcdef"[bits & 15];
  return text;
}

class PosixSource final : public SharedMemorySource {
 public:
  explicit PosixSource(const std::string& job_id) : prefix_("/polyreme-" + job_id + "-") {
    const bool valid =
        !job_id.empty() && job_id.size() <= 100 && std::all_of(job_id.begin(), job_id.end(), [](char c) {
          return std::isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
        });
    require(valid, "the job id '", job_id, "' is not 1 to 100 letters, digits, '.', '_' or '-'");
  }

  std::shared_ptr<SharedMemory> create(size_t size_bytes, std::string* name) override {
    const std::string fresh = prefix_ + random_suffix();
    const OpenFile file{shm_open(fresh.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)};
    require<CommError>(file.fd >= 0, "cannot create shared memory ", fresh, ": ", std::strerror(errno));
    try {
      // Without the reservation a full /dev/shm would be a SIGBUS at the first touch.
      const auto length = static_cast<off_t>(size_bytes);
      int error = ftruncate(file.fd, length) == 0 ? 0 : errno;
      if (error == 0) error = posix_fallocate(file.fd, 0, length);
      if (error != 0) throw OutOfMemory(full_text(file.fd, size_bytes, error));
      auto memory = map_bytes(file.fd, size_bytes);
      *name = fresh;
      return memory;
    } catch (...) {
      forget(fresh);
      throw;
    }
  }

  std::shared_ptr<SharedMemory> attach(const std::string& name) override {
    require<CommError>(name.starts_with(prefix_), "shared memory ", name, " is not of this job (", prefix_,
                       "...)");
    const OpenFile file{shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0)};
    require<CommError>(file.fd >= 0, "cannot open shared memory ", name, ": ", std::strerror(errno),
                       "; all ranks must run on one host and see one /dev/shm");
    struct stat status {};
    require<CommError>(fstat(file.fd, &status) == 0 && status.st_size > 0, "shared memory ", name,
                       " is empty");
    return map_bytes(file.fd, static_cast<size_t>(status.st_size));
  }

  void forget(const std::string& name) noexcept override { shm_unlink(name.c_str()); }

 private:
  static std::string full_text(int fd, size_t size_bytes, int error) {
    struct statvfs status {};
    std::string free_text = "unknown";
    if (fstatvfs(fd, &status) == 0)
      free_text = concat(static_cast<uint64_t>(status.f_bavail) * status.f_frsize, " bytes");
    return concat("cannot reserve ", size_bytes,
                  " bytes of shared memory in /dev/shm: ", std::strerror(error), "; ", free_text,
                  " are free. Lower chunk_bytes, or enlarge /dev/shm (docker run --shm-size, or ",
                  "mount -o remount,size=... /dev/shm)");
  }

  std::string prefix_;
};

}  // namespace

std::shared_ptr<SharedMemorySource> make_heap_source() { return std::make_shared<HeapSource>(); }

std::shared_ptr<SharedMemorySource> make_posix_source(const std::string& job_id) {
  return std::make_shared<PosixSource>(job_id);
}

}  // namespace polyreme
