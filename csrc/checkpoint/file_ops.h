#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace polyreme {

// A fault that a test injects into the at-th change of the file system (from 1; 0: none).
struct FileFault {
  enum class Kind : uint8_t { kKill, kError, kDelay };
  int64_t at = 0;
  Kind kind = Kind::kKill;  // kKill: SIGKILL before the change, a write half done
  int error_number = 0;     // kError: the change fails with this errno, and so do all later ones if `sticky`
  bool sticky = false;
  double delay_s = 0;  // kDelay: before this change and every later one
};

// Every change that saving and deleting checkpoints make to the file system, one numbered point each: a test
// counts them, and has the process killed, or the call fail, at any of them. Nothing is followed but the path
// of the directory itself: names inside it are flat, and a symbolic link is refused. Files are made with mode
// 0600, directories with 0700. Every call throws CheckpointError with operation, path and errno.
// Thread-safe.
class FileOps {
 public:
  // keeps_trace: for tests; it grows with every change.
  explicit FileOps(FileFault fault = {}, bool keeps_trace = false)
      : fault_(fault), keeps_trace_(keeps_trace) {}

  // Without effect on a directory that exists.
  void make_directory(const std::string& path);
  // A new file of `size` bytes, durable on return except for its name: see sync_directory. `fill` writes it
  // through the file descriptor by write_at.
  void write_file(const std::string& directory, const std::string& name,
                  const std::function<void(int fd, const std::string& path)>& fill);
  void write_at(int fd, const std::string& path, std::span<const std::byte> bytes, int64_t offset);
  // The same from two threads in portions of `portion_bytes`, past the page cache where the file system can
  // and all is aligned to kDirectAlignment: for large data that nobody reads soon, without a copy in between.
  // `prepare` is called with the number of each portion before it is written.
  void write_large(int fd, const std::string& path, std::span<const std::byte> bytes, int64_t offset,
                   int64_t portion_bytes, const std::function<void(int64_t portion)>& prepare);
  // Makes the names inside the directory durable.
  void sync_directory(const std::string& path);
  // Both names are inside `directory`; an existing file `to` is replaced in one step.
  void rename(const std::string& directory, const std::string& from, const std::string& to);
  // Exchanges two names in one step. False where the file system cannot.
  bool exchange(const std::string& directory, const std::string& a, const std::string& b);
  // Without effect if there is none.
  void remove_file(const std::string& directory, const std::string& name);
  void remove_directory(const std::string& path);

  int64_t num_points() const;
  // "write /runs/a/x", one line for each point so far, if it is kept.
  std::vector<std::string> trace() const;

 private:
  // Takes the space of a file at once: one change of the file system's tables instead of one for every write.
  void allocate(int fd, const std::string& path, int64_t size);
  // Counts a point; true if a write is to stop half way and kill.
  bool point(const char* operation, const std::string& path);

  FileFault fault_;
  bool keeps_trace_;
  mutable std::mutex mutex_;
  int64_t num_points_ = 0;
  std::vector<std::string> trace_;
};

// Of memory, offset and size of what goes past the page cache.
constexpr int64_t kDirectAlignment = 4096;

// Throws CheckpointError: "<operation> of '<path>' failed: <text of errno>; <remedy>".
[[noreturn]] void throw_file_error(const char* operation, const std::string& path, int error_number);
// Throws InvalidArgument for a name with a slash, a NUL, a leading dot, or longer than 200 bytes.
void check_flat_name(const std::string& name);

// An open file of a checkpoint, for reading. Follows no symbolic link below `directory` itself, and opens
// regular files only. Throws CheckpointError naming path and reason.
class InputFile {
 public:
  InputFile(const std::string& directory, const std::string& name);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  int64_t size_bytes() const { return size_bytes_; }
  const std::string& path() const { return path_; }
  // Throws CheckpointCorrupt where the file ends before that.
  void read(void* to, int64_t offset, int64_t num_bytes) const;
  // The same past the page cache, unless it has most of it or the file system cannot: without a copy,
  // for what nobody else on this host reads. `to` and `offset` are aligned to kDirectAlignment, and `to` has
  // room for so many bytes rounded up to it.
  void read_direct(void* to, int64_t offset, int64_t num_bytes) const;
  // Starts reading a range into the page cache, where the ranks of a host share it; `read` then waits for
  // less.
  void prefetch(int64_t offset, int64_t num_bytes) const noexcept;

 private:
  std::string path_;
  int fd_ = -1;
  int64_t size_bytes_ = 0;
};

}  // namespace polyreme
