#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "telemetry/flight_recorder.h"

namespace polyreme {

class Device;

enum class DeviceKind { kCpu, kCuda };

// A block of device memory. Freed when the last owner lets go; operations that were enqueued own
// the buffers they touch, so letting go early is safe. The address may be computed with but is
// dereferenced only inside an operation, or through a HostMapping.
class Buffer {
 public:
  Buffer(void* address, size_t size_bytes) : address_(address), size_bytes_(size_bytes) {}
  virtual ~Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* address() const { return address_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  friend class HostMapping;
  // Makes the memory readable and writable for the host. Throws DeviceError if an operation that
  // touches it was not yet waited for, or if this memory is not visible to the host.
  virtual void map_host() = 0;
  virtual void unmap_host() noexcept = 0;

  void* address_;
  size_t size_bytes_;
};

// The host may dereference the buffer's memory while this object lives. See Buffer::map_host.
class HostMapping {
 public:
  explicit HostMapping(std::shared_ptr<Buffer> buffer) : buffer_(std::move(buffer)) { buffer_->map_host(); }
  ~HostMapping() { buffer_->unmap_host(); }
  HostMapping(const HostMapping&) = delete;
  HostMapping& operator=(const HostMapping&) = delete;

 private:
  std::shared_ptr<Buffer> buffer_;
};

// A point in a stream that other streams or the host can wait for. Re-recording moves it.
class Event {
 public:
  virtual ~Event() = default;
  // Blocks the host until the recorded point was reached. Returns at once if never recorded.
  virtual void synchronize() = 0;
};

// An in-order queue of operations of one device. Used by one host thread at a time.
//
// Errors of operations are kept: the operations after the failed one do not run, and
// `synchronize` throws the first error.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual Device& device() const = 0;
  // Marks the current end of the stream in `event`.
  virtual void record(Event& event) = 0;
  // Operations enqueued after this call start once `event`'s recorded point was reached.
  virtual void wait(Event& event) = 0;
  // Whether everything that was enqueued has run.
  virtual bool is_idle() = 0;
  // Blocks until the stream is empty. Rethrows the first error of its operations.
  virtual void synchronize() = 0;
};

// What a stream is for. kBackground: its operations run beside those of other streams, also on a device
// that otherwise runs operations while they are enqueued; for collectives that overlap computation.
enum class StreamKind : uint8_t { kCompute, kBackground };

// Bytes of a device's memory. `reserved` includes what is cached for reuse.
struct MemoryStats {
  int64_t in_use_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t reserved_bytes = 0;
};

// A place where operations run and memory lives. Must outlive its streams, events and buffers.
class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceKind kind() const = 0;
  // One line for people: "cpu, 2 threads, avx512".
  virtual std::string description() const = 0;
  // Uninitialised memory, aligned to 64 bytes. `label` (a string literal) is named in errors.
  // Throws OutOfMemory with the size that was asked for and what is in use.
  virtual std::shared_ptr<Buffer> allocate(size_t size_bytes, const char* label) = 0;
  // Memory of the host that somebody else owns as a buffer of this device; it lives as long as `owner`.
  // Throws NotAvailable where operations cannot use such memory.
  virtual std::shared_ptr<Buffer> wrap_host(void* address, size_t size_bytes,
                                            const std::shared_ptr<void>& owner);
  // Counts in memory() what was taken elsewhere for this device, and given back (negative).
  virtual void count_host_memory(int64_t) {}
  // `name` (a string literal) is named in errors about ordering.
  virtual std::unique_ptr<Stream> create_stream(const char* name, StreamKind kind = StreamKind::kCompute) = 0;
  virtual std::unique_ptr<Event> create_event() = 0;
  virtual MemoryStats memory() const = 0;
  virtual void reset_peak_memory() = 0;

  // Spans of the operations that this device executed.
  FlightRecorder& recorder() { return recorder_; }

 private:
  FlightRecorder recorder_;
};

}  // namespace polyreme
