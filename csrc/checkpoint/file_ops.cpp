#include "checkpoint/file_ops.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <thread>

#include "base/error.h"

namespace polyreme {
namespace {

constexpr unsigned kRenameExchange = 2;  // RENAME_EXCHANGE of renameat2(2)

const char* remedy(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
      return "free space, or keep fewer checkpoints";
    case EROFS:
    case EACCES:
    case EPERM:
      return "make the directory writable for this user";
    case EIO:
      return "the storage has failed: look at the kernel's log, save elsewhere";
    case ELOOP:
    case ENOTDIR:
      return "a symbolic link or a file lies where a directory of checkpoints is expected: remove it";
    default:
      return "check the directory of the checkpoints";
  }
}

// Closes on leaving, whatever happened.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// `path` may be reached through links; it must itself be a directory.
int open_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) throw_file_error("open", path, errno);
  return fd;
}

constexpr int64_t kNumWriters = 2;  // one computes checksums, or waits for the lock, while the other writes
constexpr int64_t kLeastDirectBytes = 16 * kDirectAlignment;

// Whether reads and writes go past the page cache. False if the file system cannot.
bool set_direct(int fd, bool is_direct) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, is_direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

// How much of a range the page cache has: cachestat(2) of Linux 6.5, whose name older headers lack. 0 if it
// is not known.
int64_t cached_bytes(int fd, int64_t offset, int64_t num_bytes) {
  constexpr long kCacheStat = 451;
  const std::array<int64_t, 2> range = {offset, num_bytes};
  std::array<int64_t, 5> pages{};  // cached, dirty, in writeback, evicted, recently so
  if (::syscall(kCacheStat, fd, range.data(), pages.data(), 0U) != 0) return 0;
  return pages[0] * ::sysconf(_SC_PAGESIZE);
}

}  // namespace

void throw_file_error(const char* operation, const std::string& path, int error_number) {
  const char* symbol = ::strerrorname_np(error_number);
  throw CheckpointError(concat(operation, " of '", path, "' failed: ", std::strerror(error_number), " (",
                               symbol ? symbol : "errno", " ", error_number, "); ", remedy(error_number)));
}

void check_flat_name(const std::string& name) {
  require(!name.empty() && name.size() <= 200 && name.find('/') == std::string::npos &&
              name.find('\0') == std::string::npos && name != "." && name != "..",
          "'", name.substr(0, 200),
          "' is no name of a file inside a checkpoint; expected up to 200 bytes without a slash");
}

bool FileOps::point(const char* operation, const std::string& path) {
  int64_t index = 0;
  {
    const std::lock_guard lock(mutex_);
    if (keeps_trace_) trace_.push_back(concat(operation, " ", path));
    index = ++num_points_;
  }
  if (fault_.at == 0 || index < fault_.at) return false;
  switch (fault_.kind) {
    case FileFault::Kind::kKill:
      if (index > fault_.at) return false;
      if (std::strncmp(operation, "write", 5) == 0) return true;
      ::kill(::getpid(), SIGKILL);
      break;
    case FileFault::Kind::kError:
      if (index == fault_.at || fault_.sticky) throw_file_error(operation, path, fault_.error_number);
      break;
    case FileFault::Kind::kDelay:
      std::this_thread::sleep_for(std::chrono::duration<double>(fault_.delay_s));
      break;
  }
  return false;
}

int64_t FileOps::num_points() const {
  const std::lock_guard lock(mutex_);
  return num_points_;
}

std::vector<std::string> FileOps::trace() const {
  const std::lock_guard lock(mutex_);
  return trace_;
}

void FileOps::make_directory(const std::string& path) {
  point("mkdir", path);
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) throw_file_error("mkdir", path, errno);
  const Descriptor directory(open_directory(path));
}

void FileOps::write_file(const std::string& directory, const std::string& name,
                         const std::function<void(int fd, const std::string& path)>& fill) {
  check_flat_name(name);
  const std::string path = directory + "/" + name;
  const Descriptor parent(open_directory(directory));
  point("create", path);
  Descriptor file(
      ::openat(parent.get(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (file.get() < 0) throw_file_error("create", path, errno);
  fill(file.get(), path);
  point("fsync", path);
  if (::fsync(file.get()) != 0) throw_file_error("fsync", path, errno);
  if (::close(file.release()) != 0) throw_file_error("close", path, errno);
}

void FileOps::write_at(int fd, const std::string& path, std::span<const std::byte> bytes, int64_t offset) {
  const bool dies = point("write", path);
  if (dies) bytes = bytes.first(bytes.size() / 2);
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd, bytes.data(), bytes.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    // A file system may want another alignment, and what is left of a short write has none.
    if (written < 0 && errno == EINVAL && (::fcntl(fd, F_GETFL) & O_DIRECT) != 0 && set_direct(fd, false))
      continue;
    if (written <= 0) throw_file_error("write", path, written < 0 ? errno : EIO);
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += written;
  }
  if (dies) ::kill(::getpid(), SIGKILL);
}

void FileOps::allocate(int fd, const std::string& path, int64_t size) {
  point("allocate", path);
  // Where the file system cannot, the writes do it; a full disk is better known now.
  if (::fallocate(fd, 0, 0, size) != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EIO))
    throw_file_error("allocate", path, errno);
}

void FileOps::write_large(int fd, const std::string& path, std::span<const std::byte> bytes, int64_t offset,
                          int64_t portion_bytes, const std::function<void(int64_t portion)>& prepare) {
  const auto size = static_cast<int64_t>(bytes.size());
  const int64_t num_portions = (size + portion_bytes - 1) / portion_bytes;
  const auto address = reinterpret_cast<uintptr_t>(bytes.data());
  const bool is_direct =
      (static_cast<uint64_t>(offset) | static_cast<uint64_t>(portion_bytes) | address) % kDirectAlignment ==
          0 &&
      size >= kLeastDirectBytes && set_direct(fd, true);
  if (is_direct) allocate(fd, path, offset + size);
  // What is left at the end goes through the page cache, alone in its page.
  const int64_t body = is_direct ? size / kDirectAlignment * kDirectAlignment : size;
  const auto write_part = [&](int64_t begin, int64_t end) {
    if (begin < end)
      write_at(fd, path, bytes.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
               offset + begin);
  };
  std::atomic<int64_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;
  const auto write_portions = [&] {
    try {
      for (int64_t i = next++; i < num_portions; i = next++) {
        prepare(i);
        write_part(i * portion_bytes, std::min(body, (i + 1) * portion_bytes));
      }
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
      next = num_portions;
    }
  };
  {
    std::vector<std::jthread> threads;
    for (int64_t i = 1; i < std::min(kNumWriters, num_portions); ++i) threads.emplace_back(write_portions);
    write_portions();
  }
  if (error) std::rethrow_exception(error);
  if (is_direct) set_direct(fd, false);
  write_part(body, size);
}

void FileOps::sync_directory(const std::string& path) {
  const Descriptor directory(open_directory(path));
  point("fsync", path);
  if (::fsync(directory.get()) != 0) throw_file_error("fsync", path, errno);
}

void FileOps::rename(const std::string& directory, const std::string& from, const std::string& to) {
  const Descriptor parent(open_directory(directory));
  point("rename", directory + "/" + to);
  if (::renameat(parent.get(), from.c_str(), parent.get(), to.c_str()) != 0)
    throw_file_error("rename", directory + "/" + to, errno);
}

bool FileOps::exchange(const std::string& directory, const std::string& a, const std::string& b) {
  const Descriptor parent(open_directory(directory));
  point("exchange", directory + "/" + b);
  if (::syscall(SYS_renameat2, parent.get(), a.c_str(), parent.get(), b.c_str(), kRenameExchange) == 0)
    return true;
  if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) return false;
  throw_file_error("exchange", directory + "/" + b, errno);
}

void FileOps::remove_file(const std::string& directory, const std::string& name) {
  const Descriptor parent(open_directory(directory));
  point("unlink", directory + "/" + name);
  if (::unlinkat(parent.get(), name.c_str(), 0) != 0 && errno != ENOENT)
    throw_file_error("unlink", directory + "/" + name, errno);
}

void FileOps::remove_directory(const std::string& path) {
  point("rmdir", path);
  if (::rmdir(path.c_str()) != 0 && errno != ENOENT) throw_file_error("rmdir", path, errno);
}

InputFile::InputFile(const std::string& directory, const std::string& name) : path_(directory + "/" + name) {
  check_flat_name(name);
  const Descriptor parent(open_directory(directory));
  // Non-blocking: a pipe that lies there must not hold us up.
  Descriptor file(::openat(parent.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (file.get() < 0) {
    if (errno == ENOENT) throw CheckpointCorrupt(concat("'", path_, "' is missing"));
    throw_file_error("open", path_, errno);
  }
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_file_error("stat", path_, errno);
  require<CheckpointCorrupt>(S_ISREG(status.st_mode), "'", path_, "' is not a regular file");
  size_bytes_ = status.st_size;
  fd_ = file.release();
}

InputFile::~InputFile() {
  if (fd_ >= 0) ::close(fd_);
}

void InputFile::read(void* to, int64_t offset, int64_t num_bytes) const {
  auto* at = static_cast<char*>(to);
  while (num_bytes > 0) {
    const ssize_t count = ::pread(fd_, at, static_cast<size_t>(num_bytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_file_error("read", path_, errno);
    require<CheckpointCorrupt>(count > 0, "'", path_, "' ends at byte ", offset, "; expected ", num_bytes,
                               " more");
    at += count;
    offset += count;
    num_bytes -= count;
  }
}

void InputFile::read_direct(void* to, int64_t offset, int64_t num_bytes) const {
  int64_t done = 0;
  if (2 * cached_bytes(fd_, offset, num_bytes) < num_bytes && set_direct(fd_, true)) {
    const int64_t rounded = (num_bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
    done = std::clamp<int64_t>(::pread(fd_, to, static_cast<size_t>(rounded), offset), 0, num_bytes);
    set_direct(fd_, false);
  }
  read(static_cast<char*>(to) + done, offset + done, num_bytes - done);  // nothing, unless it was cut short
}

void InputFile::prefetch(int64_t offset, int64_t num_bytes) const noexcept {
  ::posix_fadvise(fd_, offset, num_bytes, POSIX_FADV_WILLNEED);  // a hint: what it answers does not matter
}

}  // namespace polyreme
