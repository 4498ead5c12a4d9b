#include "device/cpu/dry_device.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>

namespace polyreme {
namespace {

class DryDevice;

// Addresses that no process can have: between the halves of the x86-64 and ARM address spaces.
constexpr uint64_t kFirstAddress = uint64_t{1} << 60;
// As the CPU's allocator rounds.
constexpr int64_t kAlignment = 64;

struct Counts {
  std::mutex mutex;
  MemoryStats stats;
  uint64_t next_address = kFirstAddress;

  void add(int64_t bytes) {
    const std::lock_guard lock(mutex);
    stats.in_use_bytes += bytes;
    stats.reserved_bytes = stats.in_use_bytes;
    stats.peak_bytes = std::max(stats.peak_bytes, stats.in_use_bytes);
  }
};

class DryBuffer final : public Buffer {
 public:
  DryBuffer(std::shared_ptr<Counts> counts, void* address, size_t size_bytes, int64_t counted)
      : Buffer(address, size_bytes), counts_(std::move(counts)), counted_(counted) {
    counts_->add(counted_);
  }
  ~DryBuffer() override { counts_->add(-counted_); }

 private:
  void map_host() override { throw DeviceError("a dry run has no values that the host could read or write"); }
  void unmap_host() noexcept override {}
  std::shared_ptr<Counts> counts_;
  int64_t counted_;
};

// What is in flight on a background stream.
struct Pending {
  std::deque<std::vector<Access>> operations;
  uint64_t num_done = 0;

  uint64_t end() const { return num_done + operations.size(); }
  void run_to(uint64_t position) {
    for (; num_done < position; ++num_done) operations.pop_front();
  }
};

struct DryEvent final : Event {
  std::shared_ptr<Pending> pending;  // null: never recorded
  uint64_t position = 0;
  void synchronize() override {
    if (pending) pending->run_to(std::max(position, pending->num_done));
  }
};

class DryStream final : public CpuStream {
 public:
  DryStream(Device& device, StreamKind kind)
      : device_(device), keeps_(kind == StreamKind::kBackground), pending_(std::make_shared<Pending>()) {}

  Device& device() const override { return device_; }
  void enqueue(const OpInfo&, std::vector<Access> accesses, CpuFunction) override {
    if (keeps_) pending_->operations.push_back(std::move(accesses));
  }
  void record(Event& event) override {
    auto& mark = static_cast<DryEvent&>(event);
    mark.pending = pending_;
    mark.position = pending_->end();
  }
  void wait(Event& event) override { event.synchronize(); }
  bool is_idle() override { return pending_->operations.empty(); }
  void synchronize() override { pending_->run_to(pending_->end()); }

 private:
  Device& device_;
  bool keeps_;
  std::shared_ptr<Pending> pending_;
};

class DryDevice final : public Device {
 public:
  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string description() const override { return "cpu, dry run"; }
  std::shared_ptr<Buffer> allocate(size_t size_bytes, const char*) override {
    const auto bytes = static_cast<int64_t>(std::max<size_t>(size_bytes, 1));
    const int64_t counted = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    uint64_t address = 0;
    {
      const std::lock_guard lock(counts_->mutex);
      address = std::exchange(counts_->next_address, counts_->next_address + static_cast<uint64_t>(counted));
    }
    // NOLINTNEXTLINE(performance-no-int-to-ptr): never dereferenced
    return std::make_shared<DryBuffer>(counts_, reinterpret_cast<void*>(address), size_bytes, counted);
  }
  std::unique_ptr<Stream> create_stream(const char*, StreamKind kind) override {
    return std::make_unique<DryStream>(*this, kind);
  }
  std::unique_ptr<Event> create_event() override { return std::make_unique<DryEvent>(); }
  void count_host_memory(int64_t bytes) override { counts_->add(bytes); }
  MemoryStats memory() const override {
    const std::lock_guard lock(counts_->mutex);
    return counts_->stats;
  }
  void reset_peak_memory() override {
    const std::lock_guard lock(counts_->mutex);
    counts_->stats.peak_bytes = counts_->stats.in_use_bytes;
  }

 private:
  std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
};

}  // namespace

std::unique_ptr<Device> make_dry_device() { return std::make_unique<DryDevice>(); }

bool is_dry(const Device& device) { return dynamic_cast<const DryDevice*>(&device) != nullptr; }

}  // namespace polyreme
