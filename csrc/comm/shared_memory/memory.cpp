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
#include <utility>

#include "base/error.h"
#include "base/fork.h"

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
  std::shared_ptr<SharedArena> create_arena(std::string*) override { throw no_arena(); }
  std::shared_ptr<SharedMemory> attach_arena(const std::string&) override { throw no_arena(); }
  void forget(const std::string& name) noexcept override {
    const std::lock_guard lock(mutex_);
    memory_.erase(name);
  }

 private:
  static NotAvailable no_arena() { return NotAvailable("threads read each other's memory as it is"); }

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<SharedMemory>> memory_;
  int64_t next_ = 0;
};

// Closes the file when it goes out of scope.
struct OpenFile {
  int fd;
  ~OpenFile() {
    if (fd >= 0) close(fd);
  }
};

class PosixArena final : public SharedArena {
 public:
  PosixArena(void* address, size_t size_bytes, int fd) : SharedArena(address, size_bytes), file_{fd} {}
  ~PosixArena() override { munmap(address(), size_bytes()); }

  // Without the reservation a full /dev/shm would be a SIGBUS at the first touch.
  bool commit(size_t offset, size_t size_bytes) noexcept override {
    if (fork_guard_.is_inherited()) return false;
    if (reserve_pages(file_.fd, static_cast<int64_t>(offset), static_cast<int64_t>(size_bytes)) == 0)
      return true;
    decommit(offset, size_bytes);  // the part that was had
    return false;
  }
  void decommit(size_t offset, size_t size_bytes) noexcept override {
    if (fork_guard_.is_inherited()) return;  // the pages are the parent's, too
    fallocate(file_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(size_bytes));
  }

 private:
  OpenFile file_;
  ForkGuard fork_guard_;
};

size_t host_memory_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

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
    require<CommError>(file.fd >= 0, "cannot create shared memory ", fresh, ": ", std::strerror(errno),
                       "; make /dev/shm writable, or go without it: POLYREME_TRANSPORT=tcp");
    try {
      // Without the reservation a full /dev/shm would be a SIGBUS at the first touch.
      const auto length = static_cast<off_t>(size_bytes);
      int error = ftruncate(file.fd, length) == 0 ? 0 : errno;
      if (error == 0) error = reserve_pages(file.fd, 0, length);
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
    const OpenFile file{open_existing(name, O_RDWR)};
    return map_bytes(file.fd, size_of(file.fd, name));
  }

  std::shared_ptr<SharedArena> create_arena(std::string* name) override {
    const std::string fresh = prefix_ + random_suffix();
    const size_t size_bytes = host_memory_bytes();
    OpenFile file{shm_open(fresh.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)};
    require<CommError>(file.fd >= 0, "cannot create shared memory ", fresh, ": ", std::strerror(errno),
                       "; make /dev/shm writable, or go without it: POLYREME_TRANSPORT=tcp");
    void* address = MAP_FAILED;
    if (ftruncate(file.fd, static_cast<off_t>(size_bytes)) == 0)
      address = map_arena(file.fd, size_bytes, PROT_READ | PROT_WRITE);
    if (address == MAP_FAILED) {
      const int error = errno;
      forget(fresh);
      throw CommError(concat("cannot map an arena of ", size_bytes, " bytes: ", std::strerror(error)));
    }
    *name = fresh;
    return std::make_shared<PosixArena>(address, size_bytes, std::exchange(file.fd, -1));
  }

  std::shared_ptr<SharedMemory> attach_arena(const std::string& name) override {
    const OpenFile file{open_existing(name, O_RDONLY)};
    const size_t size_bytes = size_of(file.fd, name);
    void* address = map_arena(file.fd, size_bytes, PROT_READ);
    require<CommError>(address != MAP_FAILED, "cannot map the arena ", name, ": ", std::strerror(errno));
    return std::make_shared<Mapping>(address, size_bytes);
  }

  void forget(const std::string& name) noexcept override { shm_unlink(name.c_str()); }

 private:
  // Addresses alone: no memory is set aside for them, and none of it is dumped with a core.
  static void* map_arena(int fd, size_t size_bytes, int protection) {
    void* address = mmap(nullptr, size_bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (address != MAP_FAILED && protection == PROT_READ) madvise(address, size_bytes, MADV_DONTDUMP);
    return address;
  }
  int open_existing(const std::string& name, int flags) const {
    require<CommError>(name.starts_with(prefix_), "shared memory ", name, " is not of this job (", prefix_,
                       "...)");
    const int fd = shm_open(name.c_str(), flags | O_CLOEXEC, 0);
    require<CommError>(fd >= 0, "cannot open shared memory ", name, ": ", std::strerror(errno),
                       "; all ranks must run on one host and see one /dev/shm");
    return fd;
  }
  static size_t size_of(int fd, const std::string& name) {
    struct stat status {};
    require<CommError>(fstat(fd, &status) == 0 && status.st_size > 0, "shared memory ", name, " is empty");
    return static_cast<size_t>(status.st_size);
  }
  static std::string full_text(int fd, size_t size_bytes, int error) {
    struct statvfs status {};
    std::string free_text = "unknown";
    if (fstatvfs(fd, &status) == 0)
      free_text = concat(static_cast<uint64_t>(status.f_bavail) * status.f_frsize, " bytes");
    return concat("cannot reserve ", size_bytes,
                  " bytes of shared memory in /dev/shm: ", std::strerror(error), "; ", free_text,
                  " are free. Enlarge /dev/shm (docker run --shm-size, or ",
                  "mount -o remount,size=... /dev/shm), or go without it: POLYREME_TRANSPORT=tcp");
  }

  std::string prefix_;
};

}  // namespace

int reserve_pages(int fd, int64_t begin, int64_t size_bytes) {
  int error = 0;
  do {
    error = posix_fallocate(fd, static_cast<off_t>(begin), static_cast<off_t>(size_bytes));
  } while (error == EINTR);
  return error;
}

std::shared_ptr<SharedMemorySource> make_heap_source() { return std::make_shared<HeapSource>(); }

std::shared_ptr<SharedMemorySource> make_posix_source(const std::string& job_id) {
  return std::make_shared<PosixSource>(job_id);
}

}  // namespace polyreme
