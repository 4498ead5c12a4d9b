#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace polyreme {

// Enough to tell, later, whether this very process still lives: a pid alone is reused.
struct ProcessIdentity {
  int64_t pid = 0;
  uint64_t start_ticks = 0;    // since boot; 0 where /proc cannot be read
  uint64_t pid_namespace = 0;  // processes of another namespace cannot be looked up
};

ProcessIdentity this_process();
// As proc(5) has it: R, S, D, T, Z, ...; X if the process has ended; ? where nothing can be found out.
char process_state(const ProcessIdentity& process, const ProcessIdentity& observer);
// False also where nothing can be found out: another pid namespace, or no /proc.
bool has_ended(const ProcessIdentity& process, const ProcessIdentity& observer);

std::string host_name();
// Equal for all processes of one running kernel.
std::string boot_id();
// Equal for processes that can share memory: of one kernel, with one /dev/shm (containers have their own).
std::string shared_memory_domain();

// The CPUs that a process may run on, as bits.
using CpuMask = std::array<uint64_t, 16>;
CpuMask usable_cpus();
int count_cpus(const CpuMask& mask);

}  // namespace polyreme
