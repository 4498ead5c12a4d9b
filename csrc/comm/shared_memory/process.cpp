#include "comm/shared_memory/process.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace polyreme {
namespace {

// The first bytes of a file of /proc; empty if it cannot be read. `error` gets errno.
std::string read_start(const char* path, int* error) {
  std::array<char, 1024> text;
  *error = 0;
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    *error = errno;
    return {};
  }
  const ssize_t length = read(fd, text.data(), text.size());
  if (length < 0) *error = errno;
  close(fd);
  return length > 0 ? std::string(text.data(), static_cast<size_t>(length)) : std::string();
}

struct ProcessStat {
  bool found = false;
  bool gone = false;  // the kernel says that there is no such process
  char state = '?';
  uint64_t start_ticks = 0;
};

// proc(5): "pid (name) state ...", the start time being field 22. The name may hold anything.
ProcessStat read_stat(int64_t pid) {
  int error = 0;
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const std::string text = read_start(path.c_str(), &error);
  ProcessStat stat;
  stat.gone = error == ENOENT || error == ESRCH;
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return stat;
  stat.state = text[name_end + 2];
  size_t at = name_end + 1;  // the blank before field 3
  for (int field = 3; field < 22 && at != std::string::npos; ++field) at = text.find(' ', at + 1);
  if (at == std::string::npos) return stat;
  stat.start_ticks = std::strtoull(text.c_str() + at, nullptr, 10);
  stat.found = true;
  return stat;
}

}  // namespace

ProcessIdentity this_process() {
  ProcessIdentity self;
  self.pid = getpid();
  self.start_ticks = read_stat(self.pid).start_ticks;
  struct stat status {};
  if (stat("/proc/self/ns/pid", &status) == 0) self.pid_namespace = status.st_ino;
  return self;
}

char process_state(const ProcessIdentity& process, const ProcessIdentity& observer) {
  const bool visible = process.pid > 0 && process.start_ticks != 0 && observer.start_ticks != 0 &&
                       process.pid_namespace == observer.pid_namespace;
  if (!visible) return '?';
  const ProcessStat stat = read_stat(process.pid);
  if (!stat.found) return stat.gone ? 'X' : '?';
  return stat.start_ticks == process.start_ticks ? stat.state : 'X';
}

bool has_ended(const ProcessIdentity& process, const ProcessIdentity& observer) {
  if (process.pid == observer.pid) return false;
  const char state = process_state(process, observer);
  return state == 'Z' || state == 'X';
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

std::string boot_id() {
  int error = 0;
  std::string id = read_start("/proc/sys/kernel/random/boot_id", &error);
  while (!id.empty() && id.back() == '\n') id.pop_back();
  return id;
}

std::string shared_memory_domain() {
  struct stat folder {};
  if (stat("/dev/shm", &folder) != 0) return concat(boot_id(), "/none");
  return concat(boot_id(), "/", folder.st_dev);
}

CpuMask usable_cpus() {
  CpuMask mask{};
  cpu_set_t set;
  static_assert(sizeof(set) == sizeof(mask));
  if (sched_getaffinity(0, sizeof(set), &set) == 0) std::memcpy(mask.data(), &set, sizeof(set));
  return mask;
}

int count_cpus(const CpuMask& mask) {
  int count = 0;
  for (const uint64_t word : mask) count += std::popcount(word);
  return count;
}

}  // namespace polyreme
