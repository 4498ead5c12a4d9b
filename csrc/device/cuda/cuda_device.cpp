#include "device/cuda/cuda_device.h"

#include <deque>
#include <map>

#include "base/error.h"
#include "device/cuda/cuda_allocator.h"
#include "device/cuda/cuda_table.h"
#include "device/cuda_loader.h"

namespace polyreme {
namespace {

template <typename... Parts>
void check(const PolyremeCudaStatus& status, int index, const Parts&... call) {
  require<DeviceError>(status.code == 0, "cuda:", index, ": ", call..., " failed: ", status.text);
}

class CudaEventImpl final : public CudaEvent {
 public:
  CudaEventImpl(const PolyremeCudaTable& table, int index) : table_(table), index_(index) {
    const CudaDeviceScope scope(table, index);
    check(table.create_event(&handle_), index, "cudaEventCreate");
  }
  ~CudaEventImpl() override { table_.destroy_event(handle_); }
  void synchronize() override { check(table_.synchronize_event(handle_), index_, "cudaEventSynchronize"); }
  bool is_reached() const override {
    int32_t reached = 0;
    check(table_.query_event(handle_, &reached), index_, "cudaEventQuery");
    return reached != 0;
  }
  void* handle() const { return handle_; }

 private:
  const PolyremeCudaTable& table_;
  const int index_;
  void* handle_ = nullptr;
};

// What the streams of a device still work on. Any thread.
class InFlight {
 public:
  using Buffers = std::vector<std::shared_ptr<Buffer>>;

  // An event to record behind an operation, from those that were used before.
  std::unique_ptr<CudaEventImpl> take_event(const PolyremeCudaTable& table, int index) {
    const std::lock_guard lock(mutex_);
    if (spare_.empty()) return std::make_unique<CudaEventImpl>(table, index);
    auto event = std::move(spare_.back());
    spare_.pop_back();
    return event;
  }
  void keep(const void* stream, std::unique_ptr<CudaEventImpl> passed, Buffers buffers) {
    const std::lock_guard lock(mutex_);
    queues_[stream].push_back({std::move(passed), std::move(buffers)});
  }
  // Lets go of what the streams have passed: of `stream`, or of all if it is null.
  void sweep(const void* stream) {
    std::vector<Buffers> passed;  // die outside of the lock
    const std::lock_guard lock(mutex_);
    for (auto& [owner, queue] : queues_) {
      if (stream != nullptr && owner != stream) continue;
      while (!queue.empty() && queue.front().passed->is_reached()) {
        passed.push_back(std::move(queue.front().buffers));
        spare_.push_back(std::move(queue.front().passed));
        queue.pop_front();
      }
    }
    std::erase_if(queues_, [](const auto& entry) { return entry.second.empty(); });
  }

 private:
  struct Entry {
    std::unique_ptr<CudaEventImpl> passed;
    Buffers buffers;
  };
  std::mutex mutex_;
  std::map<const void*, std::deque<Entry>> queues_;  // by stream
  std::vector<std::unique_ptr<CudaEventImpl>> spare_;
};

// Two words of page-locked memory. Streams own them as they own buffers, until the copy that fills them has
// passed.
class PinnedWords final : public Buffer {
 public:
  static constexpr size_t kBytes = 2 * sizeof(int32_t);
  using Spare = std::vector<std::shared_ptr<void>>;

  PinnedWords(std::shared_ptr<void> memory, std::shared_ptr<Spare> spare, std::shared_ptr<std::mutex> mutex)
      : Buffer(memory.get(), kBytes),
        memory_(std::move(memory)),
        spare_(std::move(spare)),
        mutex_(std::move(mutex)) {}
  ~PinnedWords() override {
    const std::lock_guard lock(*mutex_);
    spare_->push_back(std::move(memory_));
  }

 private:
  void map_host() override {}
  void unmap_host() noexcept override {}

  std::shared_ptr<void> memory_;
  std::shared_ptr<Spare> spare_;
  std::shared_ptr<std::mutex> mutex_;
};

class CudaDeviceImpl final : public CudaDevice {
 public:
  CudaDeviceImpl(const PolyremeCudaTable& table, int index)
      : table_(table), index_(index), allocator_(std::make_shared<CudaAllocator>(table, index)) {
    PolyremeCudaGpu gpu{};
    check(table.device_info(index, &gpu), index, "cudaGetDeviceProperties");
    uuid_ = gpu.uuid;
    description_ = concat("cuda:", index, ", ", gpu.name, ", compute capability ", gpu.compute_major, ".",
                          gpu.compute_minor);
  }

  DeviceKind kind() const override { return DeviceKind::kCuda; }
  std::string description() const override { return description_; }
  std::shared_ptr<Buffer> allocate(size_t size_bytes, const char* label) override;
  std::unique_ptr<Stream> create_stream(const char* name, StreamKind kind) override;
  std::unique_ptr<Event> create_event() override { return std::make_unique<CudaEventImpl>(table_, index_); }
  MemoryStats memory() const override { return allocator_->stats(); }
  void reset_peak_memory() override { allocator_->reset_peak(); }

  int index() const override { return index_; }
  const std::string& uuid() const override { return uuid_; }
  const PolyremeCudaTable& table() const override { return table_; }
  std::mutex& issue_mutex() override { return issue_mutex_; }
  InFlight& in_flight() { return in_flight_; }
  std::shared_ptr<PinnedWords> take_words() {
    std::shared_ptr<void> memory;
    {
      const std::lock_guard lock(*words_mutex_);
      if (!spare_words_->empty()) {
        memory = std::move(spare_words_->back());
        spare_words_->pop_back();
      }
    }
    if (!memory) memory = allocate_pinned(*this, PinnedWords::kBytes);
    return std::make_shared<PinnedWords>(std::move(memory), spare_words_, words_mutex_);
  }

 private:
  const PolyremeCudaTable& table_;
  const int index_;
  std::string uuid_;
  std::string description_;
  std::mutex issue_mutex_;
  std::shared_ptr<CudaAllocator> allocator_;
  std::shared_ptr<PinnedWords::Spare> spare_words_ = std::make_shared<PinnedWords::Spare>();
  std::shared_ptr<std::mutex> words_mutex_ = std::make_shared<std::mutex>();
  InFlight in_flight_;
};

class CudaStreamImpl final : public CudaStream {
 public:
  explicit CudaStreamImpl(CudaDeviceImpl& device) : device_(device), table_(device.table()) {
    const CudaDeviceScope scope(table_, device.index());
    check(table_.create_stream(&handle_), device.index(), "cudaStreamCreate");
  }
  // CUDA itself ends the stream once its work is done; the device keeps the buffers until then.
  ~CudaStreamImpl() override { table_.destroy_stream(handle_); }

  Device& device() const override { return device_; }
  void* handle() const override { return handle_; }
  void record(Event& event) override {
    const CudaDeviceScope scope(table_, device_.index());
    check(table_.record_event(event_handle(event), handle_), device_.index(), "cudaEventRecord");
  }
  void wait(Event& event) override {
    check(table_.wait_event(handle_, event_handle(event)), device_.index(), "cudaStreamWaitEvent");
  }
  bool is_idle() override {
    CudaEventImpl end(table_, device_.index());
    record(end);
    return end.is_reached();
  }
  void synchronize() override {
    check(table_.synchronize_stream(handle_), device_.index(), "cudaStreamSynchronize");
    device_.in_flight().sweep(handle_);
    for (const auto& [words, check_words] : std::exchange(checks_, {}))
      check_words(static_cast<const int32_t*>(words->address()));
  }
  void check_later(const std::shared_ptr<Buffer>& result,
                   std::function<void(const int32_t* words)> check_words) override {
    std::shared_ptr<PinnedWords> words = device_.take_words();
    enqueue({result, words}, [&](void* handle) {
      check(table_.copy(words->address(), result->address(), PinnedWords::kBytes, handle), device_.index(),
            "cudaMemcpyAsync of a result");
    });
    checks_.emplace_back(std::move(words), std::move(check_words));
  }
  void enqueue(std::vector<std::shared_ptr<Buffer>> buffers,
               const std::function<void(void* stream)>& issue) override {
    const CudaDeviceScope scope(table_, device_.index());
    device_.in_flight().sweep(handle_);
    std::unique_ptr<CudaEventImpl> passed = device_.in_flight().take_event(table_, device_.index());
    std::exception_ptr failed;
    try {
      issue(handle_);
    } catch (...) {
      failed = std::current_exception();
    }
    const PolyremeCudaStatus recorded = table_.record_event(passed->handle(), handle_);
    device_.in_flight().keep(handle_, std::move(passed), std::move(buffers));
    if (failed) std::rethrow_exception(failed);
    check(recorded, device_.index(), "cudaEventRecord");
  }

 private:
  static void* event_handle(Event& event) { return static_cast<CudaEventImpl&>(as_cuda(event)).handle(); }

  CudaDeviceImpl& device_;
  const PolyremeCudaTable& table_;
  void* handle_ = nullptr;
  std::vector<std::pair<std::shared_ptr<PinnedWords>, std::function<void(const int32_t*)>>> checks_;
};

std::shared_ptr<Buffer> CudaDeviceImpl::allocate(size_t size_bytes, const char* label) {
  if (auto buffer = allocator_->try_cached(size_bytes, label)) return buffer;
  in_flight_.sweep(nullptr);
  if (auto buffer = allocator_->try_cached(size_bytes, label)) return buffer;
  return allocator_->allocate(size_bytes, label);
}

std::unique_ptr<Stream> CudaDeviceImpl::create_stream(const char*, StreamKind) {
  return std::make_unique<CudaStreamImpl>(*this);
}

// Enqueues a copy that touches [begin_byte, begin_byte + size_bytes) of `buffer`.
void copy(
    const std::shared_ptr<Buffer>& buffer, int64_t begin_byte, int64_t size_bytes, Stream& stream,
    const std::function<PolyremeCudaStatus(const PolyremeCudaTable&, char* device, void* handle)>& issue) {
  require(begin_byte >= 0 && size_bytes >= 0 &&
              begin_byte <= static_cast<int64_t>(buffer->size_bytes()) - size_bytes,
          "copy of bytes [", begin_byte, ", ", begin_byte + size_bytes, ") of a buffer of ",
          buffer->size_bytes());
  if (size_bytes == 0) return;
  const CudaDevice& device = as_cuda(stream.device());
  as_cuda(stream).enqueue({buffer}, [&](void* handle) {
    check(issue(device.table(), static_cast<char*>(buffer->address()) + begin_byte, handle), device.index(),
          "cudaMemcpyAsync of ", size_bytes, " bytes");
  });
}

template <typename To, typename From>
To& as_kind(From& object, const char* what) {
  auto* cuda = dynamic_cast<To*>(&object);
  require<NotAvailable>(cuda != nullptr, "this operation needs ", what,
                        " of a CUDA device; the one given is of the CPU");
  return *cuda;
}

}  // namespace

CudaStream& as_cuda(Stream& stream) { return as_kind<CudaStream>(stream, "a stream"); }
CudaEvent& as_cuda(Event& event) { return as_kind<CudaEvent>(event, "an event"); }
CudaDevice& as_cuda(Device& device) { return as_kind<CudaDevice>(device, "memory or a stream"); }

CudaDeviceScope::CudaDeviceScope(const PolyremeCudaTable& table, int index) : table_(table) {
  check(table.get_device(&previous_), index, "cudaGetDevice");
  check(table.set_device(index), index, "cudaSetDevice");
}
CudaDeviceScope::~CudaDeviceScope() { table_.set_device(previous_); }

std::unique_ptr<CudaDevice> make_cuda_device(int index) { return make_cuda_device(load_cuda(), index); }

std::unique_ptr<CudaDevice> make_cuda_device(const PolyremeCudaTable& table, int index) {
  int32_t count = 0;
  check(table.device_count(&count), index, "cudaGetDeviceCount");
  require<NotAvailable>(index >= 0 && index < count, "there is no cuda:", index, "; this process sees ",
                        count, " GPUs (CUDA_VISIBLE_DEVICES may hide others)");
  return std::make_unique<CudaDeviceImpl>(table, index);
}

std::shared_ptr<void> allocate_pinned(CudaDevice& device, size_t size_bytes) {
  const PolyremeCudaTable& table = device.table();
  const CudaDeviceScope scope(table, device.index());
  void* address = nullptr;
  const PolyremeCudaStatus status = table.allocate_pinned(size_bytes, &address);
  require<OutOfMemory>(status.code == 0, "out of page-locked memory: ", size_bytes,
                       " bytes [cudaMallocHost: ", status.text, "]");
  return {address, [&table](void* memory) { table.release_pinned(memory); }};
}

void copy_from_host(const std::shared_ptr<Buffer>& to, int64_t begin_byte, const void* host,
                    int64_t size_bytes, Stream& stream) {
  copy(to, begin_byte, size_bytes, stream, [&](const PolyremeCudaTable& table, char* device, void* handle) {
    return table.copy(device, host, static_cast<uint64_t>(size_bytes), handle);
  });
}

void copy_to_host(void* host, const std::shared_ptr<Buffer>& from, int64_t begin_byte, int64_t size_bytes,
                  Stream& stream) {
  copy(from, begin_byte, size_bytes, stream, [&](const PolyremeCudaTable& table, char* device, void* handle) {
    return table.copy(host, device, static_cast<uint64_t>(size_bytes), handle);
  });
}

}  // namespace polyreme
