#include "device/cpu/deferred_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <exception>
#include <optional>

#include "base/math.h"

// Ordering is checked with vector clocks (Mattern 1989): clock[s] is the number of operations of
// stream s that are known to come before. Every operation carries the clock of its stream at the
// time it was enqueued; two accesses to the same bytes, one of them a write, must be ordered by it.
// The check is exact for the program as it was issued, whatever order the scheduler then picks;
// the random order, the poison and the page protection find what was not declared.

namespace polyreme {
namespace {

using Clock = std::vector<uint64_t>;

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

uint64_t at(const Clock& clock, uint32_t stream) { return stream < clock.size() ? clock[stream] : 0; }

class DeferredDevice;
class DeferredStream;

// An access that later ones must be ordered after.
struct PastAccess {
  uint32_t stream;
  uint64_t sequence;
  int64_t begin_byte, end_byte;
  bool write;
  const char* op_name;
};

class GuardedBuffer final : public Buffer {
 public:
  GuardedBuffer(DeferredDevice& device, void* address, size_t size_bytes, size_t mapped_bytes,
                const char* label)
      : Buffer(address, size_bytes), device_(device), mapped_bytes_(mapped_bytes), label_(label) {}
  // Memory of somebody else: its order is checked, its pages are not guarded.
  GuardedBuffer(DeferredDevice& device, void* address, size_t size_bytes, std::shared_ptr<void> owner)
      : Buffer(address, size_bytes),
        device_(device),
        mapped_bytes_(0),
        label_("host memory"),
        owner_(std::move(owner)) {}
  ~GuardedBuffer() override;

  // Throws DeviceError if a conflicting earlier access is not in `clock`.
  void check_order(const Access& access, const Clock& clock, const char* who) const;
  void remember(const Access& access, uint32_t stream, uint64_t sequence, const char* op_name);
  // Nested: accessible while at least one opener is left.
  void open() {
    if (open_count_++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  void close() noexcept {
    if (--open_count_ == 0) protect(PROT_NONE);
  }

 private:
  void map_host() override;
  void unmap_host() noexcept override { close(); }
  void protect(int protection) const noexcept {
    if (!owner_) mprotect(address(), mapped_bytes_, protection);
  }

  DeferredDevice& device_;
  size_t mapped_bytes_;
  const char* label_;
  std::shared_ptr<void> owner_;  // null for memory of our own
  int open_count_ = 0;
  std::vector<PastAccess> past_;
};

// Reached once a stream has executed its first `sequence` tasks. The stream is named by its id,
// since it may be gone by then.
struct Point {
  uint32_t stream = 0;
  uint64_t sequence = 0;
};

class DeferredEvent final : public Event {
 public:
  explicit DeferredEvent(DeferredDevice& device) : device_(device) {}
  void synchronize() override;

  std::optional<Point> point;  // empty: never recorded
  Clock clock;

 private:
  DeferredDevice& device_;
};

// An operation, or a wait for a point of another stream.
struct Task {
  OpInfo info{"wait"};
  std::vector<Access> accesses;
  CpuFunction function;
  std::optional<Point> awaited;
};

class DeferredStream final : public CpuStream {
 public:
  DeferredStream(DeferredDevice& device, uint32_t id, const char* name)
      : device_(device), id_(id), name_(name) {}
  // Executes what is left: work that was enqueued happens, as on a GPU.
  ~DeferredStream() override;

  Device& device() const override;
  void enqueue(const OpInfo& info, std::vector<Access> accesses, CpuFunction function) override;
  void record(Event& event) override;
  void wait(Event& event) override;
  bool is_idle() override { return tasks_.empty(); }
  void synchronize() override;

  bool runnable() const;
  void run_front();
  uint64_t executed() const { return executed_; }
  // The error of its first `sequence` tasks, or null.
  std::exception_ptr error_at(uint64_t sequence) const { return failed_at_ <= sequence ? error_ : nullptr; }
  const char* name() const { return name_; }

 private:
  uint64_t push(Task task);

  DeferredDevice& device_;
  uint32_t id_;
  const char* name_;
  std::deque<Task> tasks_;
  uint64_t issued_ = 0;
  uint64_t executed_ = 0;
  Clock clock_;
  std::exception_ptr error_;
  uint64_t failed_at_ = 0;  // the task that set error_
};

class DeferredDevice final : public Device {
 public:
  explicit DeferredDevice(const CpuDeviceOptions& options)
      : pool_(options.num_threads), isa_(isa_from_name(options.isa)), random_state_(options.schedule_seed) {}

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string description() const override { return concat("cpu, deferred, ", isa_name(isa_)); }
  std::shared_ptr<Buffer> allocate(size_t size_bytes, const char* label) override;
  std::shared_ptr<Buffer> wrap_host(void* address, size_t size_bytes,
                                    const std::shared_ptr<void>& owner) override {
    return std::make_shared<GuardedBuffer>(*this, address, size_bytes, owner);
  }
  std::unique_ptr<Stream> create_stream(const char* name, StreamKind) override {
    auto stream = std::make_unique<DeferredStream>(*this, static_cast<uint32_t>(streams_.size()), name);
    streams_.push_back(stream.get());
    return stream;
  }
  std::unique_ptr<Event> create_event() override { return std::make_unique<DeferredEvent>(*this); }
  void count_host_memory(int64_t bytes) override { count(bytes); }
  MemoryStats memory() const override { return stats_; }
  void reset_peak_memory() override { stats_.peak_bytes = stats_.in_use_bytes; }

  // Whether the point was reached. A stream that is gone has reached all of its points.
  bool reached(const Point& point) const {
    return !streams_[point.stream] || streams_[point.stream]->executed() >= point.sequence;
  }
  // The error that its stream had there, or null.
  std::exception_ptr error_at(const Point& point) const {
    return streams_[point.stream] ? streams_[point.stream]->error_at(point.sequence) : nullptr;
  }
  // Runs tasks in random allowed order until the point is reached.
  void run_until(const Point& point);
  void forget(uint32_t stream_id) { streams_[stream_id] = nullptr; }
  void count(int64_t bytes) {
    stats_.in_use_bytes += bytes;
    stats_.reserved_bytes = stats_.in_use_bytes;
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.in_use_bytes);
  }
  CpuContext context() { return {pool_, isa_}; }
  Clock& host_clock() { return host_clock_; }
  const char* stream_name(uint32_t id) const { return streams_[id] ? streams_[id]->name() : "(destroyed)"; }

 private:
  // splitmix64: Steele et al. 2014. The executor's own, so that a seed replays a schedule.
  uint64_t random() {
    uint64_t z = (random_state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  ThreadPool pool_;
  Isa isa_;
  uint64_t random_state_;
  std::vector<DeferredStream*> streams_;  // by id; null once destroyed
  Clock host_clock_;                      // what the host has waited for
  MemoryStats stats_;
};

GuardedBuffer& guarded(const Access& access) { return static_cast<GuardedBuffer&>(*access.buffer); }

GuardedBuffer::~GuardedBuffer() {
  if (owner_) return;
  munmap(address(), mapped_bytes_);
  device_.count(-static_cast<int64_t>(mapped_bytes_));
}

void GuardedBuffer::check_order(const Access& access, const Clock& clock, const char* who) const {
  for (const PastAccess& past : past_) {
    const bool overlaps = past.begin_byte < access.end_byte && access.begin_byte < past.end_byte;
    if (!overlaps || !(past.write || access.write) || at(clock, past.stream) >= past.sequence) continue;
    throw DeviceError(
        concat(who, access.write ? " writes" : " reads", " buffer '", label_, "' bytes [", access.begin_byte,
               ", ", access.end_byte, "), which operation '", past.op_name, "' on stream '",
               device_.stream_name(past.stream), "' ", past.write ? "writes" : "reads",
               ", without being ordered after it; record an event there and wait for it first"));
  }
}

void GuardedBuffer::remember(const Access& access, uint32_t stream, uint64_t sequence, const char* op_name) {
  // check_order has passed, so a write supersedes every access inside its range, and a later
  // access of the same stream supersedes an equal earlier one.
  std::erase_if(past_, [&](const PastAccess& past) {
    const bool inside = access.begin_byte <= past.begin_byte && past.end_byte <= access.end_byte;
    return inside && (access.write || (past.stream == stream && !past.write));
  });
  past_.push_back({stream, sequence, access.begin_byte, access.end_byte, access.write, op_name});
}

void GuardedBuffer::map_host() {
  const Access all{nullptr, 0, static_cast<int64_t>(size_bytes()), true};
  check_order(all, device_.host_clock(), "the host");
  open();
}

void DeferredEvent::synchronize() {
  if (!point) return;
  device_.run_until(*point);
  merge(device_.host_clock(), clock);
}

DeferredStream::~DeferredStream() {
  device_.run_until({id_, issued_});
  device_.forget(id_);
}

bool DeferredStream::runnable() const {
  return !tasks_.empty() && (!tasks_.front().awaited || device_.reached(*tasks_.front().awaited));
}

Device& DeferredStream::device() const { return device_; }

uint64_t DeferredStream::push(Task task) {
  tasks_.push_back(std::move(task));
  merge(clock_, device_.host_clock());
  if (clock_.size() <= id_) clock_.resize(id_ + 1);
  return clock_[id_] = ++issued_;
}

void DeferredStream::enqueue(const OpInfo& info, std::vector<Access> accesses, CpuFunction function) {
  // What this operation comes after: earlier ones of this stream, and what the host waited for.
  Clock before = clock_;
  merge(before, device_.host_clock());
  const std::string who = concat("operation '", info.name, "' on stream '", name_, "'");
  for (const Access& access : accesses) guarded(access).check_order(access, before, who.c_str());
  const std::vector<Access> to_remember = accesses;
  const uint64_t sequence = push({info, std::move(accesses), std::move(function)});
  for (const Access& access : to_remember) guarded(access).remember(access, id_, sequence, info.name);
}

void DeferredStream::record(Event& event) {
  auto& deferred = static_cast<DeferredEvent&>(event);
  merge(clock_, device_.host_clock());
  deferred.point = Point{id_, issued_};
  deferred.clock = clock_;
}

void DeferredStream::wait(Event& event) {
  const auto& deferred = static_cast<DeferredEvent&>(event);
  if (!deferred.point || deferred.point->stream == id_) return;
  Task task;
  task.awaited = deferred.point;
  push(std::move(task));
  merge(clock_, deferred.clock);
}

void DeferredStream::run_front() {
  Task task = std::move(tasks_.front());
  tasks_.pop_front();
  if (task.awaited && !error_) {
    error_ = device_.error_at(*task.awaited);
    failed_at_ = executed_ + 1;
  }
  if (task.function && !error_) {
    for (const Access& access : task.accesses) guarded(access).open();
    try {
      run_recorded(task.info, id_, device_.recorder(), device_.context(), task.function);
    } catch (...) {
      error_ = std::current_exception();
      failed_at_ = executed_ + 1;
    }
    for (const Access& access : task.accesses) guarded(access).close();
  }
  ++executed_;
}

void DeferredStream::synchronize() {
  device_.run_until({id_, issued_});
  merge(device_.host_clock(), clock_);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

std::shared_ptr<Buffer> DeferredDevice::allocate(size_t size_bytes, const char* label) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto mapped = static_cast<size_t>(
      round_up(static_cast<int64_t>(std::max<size_t>(size_bytes, 1)), static_cast<int64_t>(page)));
  void* address = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  require<OutOfMemory>(address != MAP_FAILED, "out of memory: ", size_bytes, " bytes for '", label, "' with ",
                       stats_.in_use_bytes, " bytes in use");
  std::memset(address, 0xff, mapped);  // NaN in every floating-point type
  mprotect(address, mapped, PROT_NONE);
  count(static_cast<int64_t>(mapped));
  return std::make_shared<GuardedBuffer>(*this, address, size_bytes, mapped, label);
}

void DeferredDevice::run_until(const Point& point) {
  std::vector<DeferredStream*> ready;
  while (!reached(point)) {
    ready.clear();
    for (DeferredStream* candidate : streams_)
      if (candidate && candidate->runnable()) ready.push_back(candidate);
    // An event marks work that was already issued, so waits form no cycle: some stream can go on.
    ready[random() % ready.size()]->run_front();
  }
}

}  // namespace

std::unique_ptr<Device> make_deferred_device(const CpuDeviceOptions& options) {
  return std::make_unique<DeferredDevice>(options);
}

}  // namespace polyreme
