#include "device/cpu/cpu_device.h"

#include <exception>

#include "base/fork.h"
#include "device/cpu/background_stream.h"
#include "device/cpu/cpu_allocator.h"
#include "device/cpu/deferred_device.h"

namespace polyreme {
namespace {

// Memory of somebody else.
class HostBuffer final : public Buffer {
 public:
  HostBuffer(void* address, size_t size_bytes, std::shared_ptr<void> owner)
      : Buffer(address, size_bytes), owner_(std::move(owner)) {}

 private:
  void map_host() override {}
  void unmap_host() noexcept override {}
  std::shared_ptr<void> owner_;
};

class ImmediateDevice;

class ImmediateStream final : public CpuStream {
 public:
  ImmediateStream(ImmediateDevice& device, uint32_t id) : device_(device), id_(id) {}
  Device& device() const override;
  void enqueue(const OpInfo& info, std::vector<Access> accesses, CpuFunction function) override;
  void record(Event& event) override {  // everything has run
    as_event(event).point = nullptr;
    as_event(event).error = error_;
  }
  void wait(Event& event) override {
    const std::exception_ptr error = as_event(event).await();
    if (!error_) error_ = error;
  }
  bool is_idle() override { return true; }
  void synchronize() override {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  ImmediateDevice& device_;
  uint32_t id_;
  std::exception_ptr error_;
};

class ImmediateDevice final : public Device {
 public:
  explicit ImmediateDevice(const CpuDeviceOptions& options)
      : pool_(options.num_threads),
        isa_(isa_from_name(options.isa)),
        allocator_(std::make_shared<CpuAllocator>()) {}

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string description() const override {
    return concat("cpu, ", pool_.num_threads(), pool_.num_threads() == 1 ? " thread, " : " threads, ",
                  isa_name(isa_));
  }
  std::shared_ptr<Buffer> allocate(size_t size_bytes, const char* label) override {
    return allocator_->allocate(size_bytes, label);
  }
  std::shared_ptr<Buffer> wrap_host(void* address, size_t size_bytes,
                                    const std::shared_ptr<void>& owner) override {
    return std::make_shared<HostBuffer>(address, size_bytes, owner);
  }
  std::unique_ptr<Stream> create_stream(const char*, StreamKind kind) override {
    const uint32_t id = next_stream_id_++;
    if (kind == StreamKind::kBackground) return std::make_unique<BackgroundStream>(*this, id, isa_);
    return std::make_unique<ImmediateStream>(*this, id);
  }
  std::unique_ptr<Event> create_event() override { return std::make_unique<PointEvent>(); }
  void count_host_memory(int64_t bytes) override { allocator_->count(bytes); }
  MemoryStats memory() const override { return allocator_->stats(); }
  void reset_peak_memory() override { allocator_->reset_peak(); }

  CpuContext context() {
    fork_guard_.require_own("this device");
    return {pool_, isa_};
  }

 private:
  ThreadPool pool_;
  Isa isa_;
  std::shared_ptr<CpuAllocator> allocator_;
  uint32_t next_stream_id_ = 0;
  ForkGuard fork_guard_;
};

Device& ImmediateStream::device() const { return device_; }

void ImmediateStream::enqueue(const OpInfo& info, std::vector<Access>, CpuFunction function) {
  if (error_) return;
  try {
    run_recorded(info, id_, device_.recorder(), device_.context(), function);
  } catch (...) {
    error_ = std::current_exception();
  }
}

}  // namespace

std::shared_ptr<Buffer> Device::wrap_host(void*, size_t size_bytes, const std::shared_ptr<void>&) {
  throw NotAvailable(concat(description(), " cannot work on ", size_bytes,
                            " bytes of host memory in place; copy them to the device first"));
}

void run_recorded(const OpInfo& info, uint32_t stream_id, FlightRecorder& recorder, const CpuContext& context,
                  const CpuFunction& function) {
  if (!recorder.enabled()) return function(context);
  Span span{
      .name = info.name, .kind = info.kind, .stream = stream_id, .flops = info.flops, .bytes = info.bytes};
  span.start_ns = FlightRecorder::now_ns();
  function(context);
  span.end_ns = FlightRecorder::now_ns();
  recorder.record(span);
}

CpuStream& as_cpu(Stream& stream) {
  auto* cpu = dynamic_cast<CpuStream*>(&stream);
  require<NotAvailable>(cpu != nullptr, "this operation has no implementation for ",
                        stream.device().description(), "; use a CPU device");
  return *cpu;
}

std::unique_ptr<Device> make_cpu_device(const CpuDeviceOptions& options) {
  require(options.num_threads >= 1 && options.num_threads <= 1024, "num_threads is ", options.num_threads,
          "; expected 1 to 1024");
  if (options.executor == CpuExecutor::kDeferred) return make_deferred_device(options);
  return std::make_unique<ImmediateDevice>(options);
}

}  // namespace polyreme
