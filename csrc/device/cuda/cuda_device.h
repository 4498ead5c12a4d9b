#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "device/device.h"

struct PolyremeCudaTable;

namespace polyreme {

// The CUDA side of Stream. Errors of CUDA are DeviceError with the call and CUDA's text; the ones of running
// kernels stick to the device and come with any later call. Arguments that kernels find to be bad are told by
// synchronize().
class CudaStream : public Stream {
 public:
  virtual void* handle() const = 0;  // cudaStream_t
  // Calls `issue` at once, with the device current, to enqueue work on the handle. `buffers`, all memory that
  // this work touches, live until the stream has passed it, also if `issue` throws half-way.
  virtual void enqueue(std::vector<std::shared_ptr<Buffer>> buffers,
                       const std::function<void(void* stream)>& issue) = 0;
  // What an operation finds out while it runs, and cannot throw itself: copies the two words of `result` to
  // the host behind what was enqueued, and the next synchronize() calls `check` with them. What `check`
  // throws comes out of it; the operations behind have run all the same.
  virtual void check_later(const std::shared_ptr<Buffer>& result,
                           std::function<void(const int32_t* words)> check) = 0;
};
// Throws NotAvailable if `stream` belongs to another kind of device.
CudaStream& as_cuda(Stream& stream);

class CudaEvent : public Event {
 public:
  // Whether the recorded point was reached, or nothing was recorded yet. Any thread.
  virtual bool is_reached() const = 0;
};
CudaEvent& as_cuda(Event& event);

// One GPU. Memory that was freed is kept for reuse, once all streams have passed the work that touched it. It
// is not visible to the host: a HostMapping throws DeviceError, copy_to_host and copy_from_host are the way.
// Allocation and buffers: any thread.
class CudaDevice : public Device {
 public:
  virtual int index() const = 0;
  virtual const std::string& uuid() const = 0;  // "GPU-..."
  virtual const PolyremeCudaTable& table() const = 0;
  // Held by whoever issues collectives on this GPU: NCCL forbids two threads at once on one device.
  virtual std::mutex& issue_mutex() = 0;
};
// Throws NotAvailable if `device` is of another kind.
CudaDevice& as_cuda(Device& device);

// Throws NotAvailable with the remedy where CUDA or the GPU is missing.
std::unique_ptr<CudaDevice> make_cuda_device(int index);
// The same over a table that the caller has; it must outlive everything that comes from the device.
std::unique_ptr<CudaDevice> make_cuda_device(const PolyremeCudaTable& table, int index);

// Makes a GPU the calling thread's current one, and the one before again at the end.
class CudaDeviceScope {
 public:
  CudaDeviceScope(const PolyremeCudaTable& table, int index);
  ~CudaDeviceScope();
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;

 private:
  const PolyremeCudaTable& table_;
  int previous_ = 0;
};

// Page-locked host memory, which copies reach without staging. Freed when the last owner lets go; throws
// OutOfMemory.
std::shared_ptr<void> allocate_pinned(CudaDevice& device, size_t size_bytes);

// Copies in `stream`, from `begin_byte` of the buffer on. The host's bytes must stay as they are until the
// stream has passed; only with pinned memory the call returns before. Throw InvalidArgument for bytes outside
// of the buffer.
void copy_from_host(const std::shared_ptr<Buffer>& to, int64_t begin_byte, const void* host,
                    int64_t size_bytes, Stream& stream);
void copy_to_host(void* host, const std::shared_ptr<Buffer>& from, int64_t begin_byte, int64_t size_bytes,
                  Stream& stream);

}  // namespace polyreme
