#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/error.h"
#include "device/cpu/isa.h"
#include "device/cpu/thread_pool.h"
#include "device/device.h"

namespace polyreme {

// How a CPU device runs what is enqueued.
// kImmediate: at once, on the calling thread (and the device's pool); those of a background stream on a
// thread
//   of the stream, where an operation has one thread.
// kDeferred:  for tests. Streams run lazily, in random order as far as streams, events and waits
//   allow it; fresh memory is NaN; memory is accessible only inside operations that declared it
//   and inside a HostMapping; an access that is not ordered after a conflicting one of another
//   stream throws DeviceError naming both. What passes here has the ordering that a GPU needs.
enum class CpuExecutor { kImmediate, kDeferred };

struct CpuDeviceOptions {
  int num_threads = 1;
  std::string isa = "auto";
  CpuExecutor executor = CpuExecutor::kImmediate;
  uint64_t schedule_seed = 0;  // kDeferred: the order in which streams advance
};

// What an operation may use while it runs.
struct CpuContext {
  ThreadPool& pool;
  Isa isa;
};

// What an operation is, for recording and error messages.
struct OpInfo {
  const char* name;  // a string literal
  OpKind kind = OpKind::kOther;
  double flops = 0;
  int64_t bytes = 0;
};

// A range of a buffer that an operation reads or writes.
struct Access {
  std::shared_ptr<Buffer> buffer;
  int64_t begin_byte = 0;
  int64_t end_byte = 0;
  bool write = false;
};

using CpuFunction = std::function<void(const CpuContext&)>;

// The CPU side of Stream. `accesses` names all device memory that `function` touches.
class CpuStream : public Stream {
 public:
  virtual void enqueue(const OpInfo& info, std::vector<Access> accesses, CpuFunction function) = 0;
  // Whether an operation has run, or been dropped after an error, when `enqueue` returns. It needs neither
  // accesses nor to own what it uses then.
  virtual bool runs_at_once() const { return false; }
};

// Throws NotAvailable if `stream` belongs to another kind of device.
CpuStream& as_cpu(Stream& stream);

// Throws InvalidArgument for a non-positive number of threads, and as isa_from_name does.
std::unique_ptr<Device> make_cpu_device(const CpuDeviceOptions& options);

}  // namespace polyreme
