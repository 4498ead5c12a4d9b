// Which operation comes after which, and what each touches: finds a wait that is missing.
//
// Every stream has a vector clock (Fidge 1988, Mattern 1989): how far it has seen each stream. Events carry
// clocks from stream to stream, NCCL joins those of its ranks, and the host of a GPU hands on what it has
// waited for. Two operations of different streams on one page of memory, one of which writes, must have seen
// each other. What kernels touch is found out as they touch it: memory is closed when one begins, and the
// first access to each page opens that.
//
// It cannot see: memory of the host, parts of one page apart (4096 bytes: such tensors count as one), and
// orders that other threads of the same rank have not waited for, since a GPU has one host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace polyreme::fake_gpu {

using Clock = std::vector<uint64_t>;  // by stream
void merge(Clock& into, const Clock& from);

// An operation while it runs: `clock` is that of its stream, which has counted it.
struct Operation {
  std::string name;  // with its stream, for people
  size_t stream;
  const Clock& clock;
};

// The arena of all GPUs' memory; forgets what was touched.
void watch_arena(char* arena, size_t bytes);
// Memory that was freed, by a call that has waited for everything.
void forget_memory(const void* begin, size_t bytes);
// The operation reads or writes these bytes. Reports a race as a violation.
void touch(const Operation& operation, const void* begin, size_t bytes, bool writes);
// Runs `body`, and takes note of what it touches of the first `used_bytes` of the arena; closed afterwards.
void run_watched(const Operation& operation, size_t used_bytes, const std::function<void()>& body);

// "launch_cast (elementwise.cu:290)" for a place in a launcher.
std::string name_of_launch(const char* function, const char* file, int line);

}  // namespace polyreme::fake_gpu
