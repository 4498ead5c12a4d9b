#include "mesh/world.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "base/build_info.h"
#include "base/interrupt.h"
#include "comm/factory.h"
#include "comm/memory_store.h"
#include "comm/rendezvous.h"
#include "comm/shared_memory/process.h"
#include "comm/tcp_store.h"
#include "device/cuda/cuda_device.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

std::unique_ptr<TcpStore> join_store(const WorldOptions& options) {
  const TcpStoreOptions store{.host = options.master_addr,
                              .port = options.master_port,
                              .listen_fd = options.rank == 0 ? options.store_fd : -1,
                              .secret = options.secret,
                              .timeout = options.init_timeout,
                              .greeting_limit = options.greeting_limit,
                              .progress = options.progress};
  if (options.rank == 0) return TcpStore::serve(store);
  return TcpStore::connect(store);
}

// Beside the pid, what tells a process from a later one of the same pid.
std::string process_text() {
  const ProcessIdentity self = this_process();
  return concat(self.start_ticks, " ", self.pid_namespace);
}

// The lowest of the ranks' best levels, unless they pinned one.
std::string common_isa(const std::vector<RankRecord>& records) {
  require_same_field(records, "isa");
  if (records.front().fields.at("isa") != "auto") return records.front().fields.at("isa");
  Isa lowest = isa_from_name(records.front().fields.at("best_isa"));
  for (const RankRecord& record : records)
    for (const Isa isa : {Isa::kAvx2, Isa::kAvx512})
      if (record.fields.at("best_isa") == isa_name(isa)) lowest = std::min(lowest, isa);
  return isa_name(lowest);
}

// The host of each rank as a number, in order of first appearance.
std::vector<int> host_numbers(const std::vector<RankRecord>& records) {
  std::map<std::string, int> numbers;
  std::vector<int> hosts;
  for (const RankRecord& record : records)
    hosts.push_back(
        numbers.try_emplace(record.fields.at("domain"), static_cast<int>(numbers.size())).first->second);
  return hosts;
}

// Names of hosts for people, different for different hosts: "a", "b", and "b (2)" for another one called b.
std::vector<std::string> host_labels(const std::vector<RankRecord>& records, const std::vector<int>& hosts) {
  std::map<std::string, std::vector<int>> hosts_of_name;
  std::vector<std::string> labels;
  for (size_t r = 0; r < records.size(); ++r) {
    std::vector<int>& same_name = hosts_of_name[records[r].host];
    auto place = std::find(same_name.begin(), same_name.end(), hosts[r]);
    if (place == same_name.end()) place = same_name.insert(same_name.end(), hosts[r]);
    const auto number = place - same_name.begin() + 1;
    labels.push_back(number == 1 ? records[r].host : concat(records[r].host, " (", number, ")"));
  }
  return labels;
}

std::unique_ptr<Device> make_device(int gpu, const CpuDeviceOptions& cpu) {
  if (gpu < 0) return make_cpu_device(cpu);
  return make_cuda_device(gpu);
}

std::unique_ptr<Communicator> make_communicator(Store& store, const WorldOptions& options, Device& device,
                                                const std::vector<int>& hosts, const CommOptions& comm) {
  if (device.kind() == DeviceKind::kCuda && options.transport == "auto")
    return make_nccl_communicator(store, options.rank, options.size, device, comm);
  const bool one_host = std::ranges::all_of(hosts, [](int host) { return host == 0; });
  if (options.transport == "shm" || (options.transport == "auto" && one_host))
    return make_shm_communicator(store, options.rank, options.size, options.job_id, comm);
  const TcpEndpointOptions tcp{.interface = options.interface,
                               .store_host = options.master_addr,
                               .secret = options.secret,
                               .init_limit = options.init_timeout,
                               .peer_timeout = options.peer_timeout};
  if (options.transport == "mpi") return make_mpi_communicator(options.rank, options.size, comm);
  if (options.transport == "tcp") return make_tcp_communicator(store, options.rank, options.size, tcp, comm);
  return make_hierarchical_communicator(store, options.rank, hosts, options.job_id, tcp, comm);
}

// What a watch does when the job fails: it breaks the group of all ranks, as soon as there is one.
class GroupBreaker {
 public:
  void fail(const std::string& text) {
    const std::lock_guard lock(mutex_);
    text_ = text;
    if (group_ != nullptr) group_->fail(text);
  }
  // `group` outlives the watch.
  void set_group(Communicator& group) {
    const std::lock_guard lock(mutex_);
    group_ = &group;
    if (!text_.empty()) group.fail(text_);
  }

 private:
  std::mutex mutex_;
  Communicator* group_ = nullptr;
  std::string text_;
};

// Ranks that are threads, each with a GPU of its own: they have to meet, so each opens its group in a thread.
void join_by_nccl(Store& store, std::vector<std::unique_ptr<Device>>& devices,
                  std::vector<std::unique_ptr<Communicator>>& communicators, const CommOptions& comm) {
  const auto size = static_cast<int>(devices.size());
  std::vector<std::exception_ptr> failures(devices.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < devices.size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        communicators[rank] =
            make_nccl_communicator(store, static_cast<int>(rank), size, *devices[rank], comm);
      } catch (...) {
        failures[rank] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

// Which of the ranks that rank 0 has met have died before they were watched. Looked for by it alone, on its
// own host, while it waits for them.
std::string dead_on_arrival(const std::vector<RankRecord>& records) {
  const ProcessIdentity self = this_process();
  for (const RankRecord& record : records) {
    if (record.fields.at("domain") != records.front().fields.at("domain")) continue;
    ProcessIdentity process{.pid = record.pid};
    std::istringstream(record.fields.at("process")) >> process.start_ticks >> process.pid_namespace;
    if (has_ended(process, self))
      return concat("lost rank ", record.rank, " (host ", record.host, ", pid ", record.pid,
                    "): the process ended before the ranks had their group");
  }
  return "";
}

// Opens the group of all ranks. What the watch learns meanwhile ends it, and the other ranks learn how it
// ended.
std::unique_ptr<Communicator> open_group(Store& store, const WorldOptions& options, Device& device,
                                         const std::vector<RankRecord>& records, const CommOptions& comm,
                                         Watch& watch) {
  const InterruptScope scope([&] {
    if (options.rank == 0 && watch.failure().empty()) {
      const std::string dead = dead_on_arrival(records);
      if (!dead.empty()) watch.report(dead);
    }
    const std::string failure = watch.failure();
    require<PeerLost>(failure.empty(), "rank ", options.rank, ", opening the group of all ranks: ", failure);
  });
  try {
    return make_communicator(store, options, device, host_numbers(records), comm);
  } catch (const std::exception& failure) {
    watch.report(concat(watch.self_text(), " failed: ", failure.what()));
    throw;
  }
}

}  // namespace

Stream& World::background() {
  if (!background_) background_ = device_->create_stream("background", StreamKind::kBackground);
  return *background_;
}

void World::all_gather_host(const void* own, int64_t own_count, void* all, int64_t all_count, DType dtype,
                            std::span<const int64_t> counts) {
  Stream& stream = background();
  if (device_->kind() == DeviceKind::kCpu) {
    const auto view = [&](void* data, int64_t count) {
      // Lives until the collective has run, as it is waited for below.
      return Tensor(device_->wrap_host(data, static_cast<size_t>(count) * dtype_size(dtype), nullptr), dtype,
                    {count});
    };
    // What is sent is only read.
    communicator_->all_gather(view(const_cast<void*>(own), own_count), view(all, all_count), stream, counts)
        ->wait();
    return;
  }
  const Tensor from = empty(*device_, dtype, {own_count}, "what a rank tells"),
               to = empty(*device_, dtype, {all_count}, "what all ranks tell");
  copy_from_host(stream, own, from);
  // Before the way back is enqueued, in which the host would wait for the other ranks without a limit.
  communicator_->all_gather(from, to, stream, counts)->wait();
  copy_to_host(stream, to, all);
  stream.synchronize();
}

std::vector<std::string> World::all_gather_bytes(const std::string& own, const std::string& what) {
  communicator_->set_label(what);
  const auto own_size = static_cast<int64_t>(own.size());
  std::vector<int64_t> sizes(static_cast<size_t>(size()));
  all_gather_host(&own_size, 1, sizes.data(), size(), DType::kI64, {});
  int64_t total = 0;
  for (const int64_t n : sizes) total += n;
  std::string all(static_cast<size_t>(total), '\0');
  all_gather_host(own.data(), own_size, all.data(), total, DType::kU8, sizes);
  communicator_->set_label("");
  std::vector<std::string> result;
  size_t at = 0;
  for (const int64_t n : sizes) {
    result.push_back(all.substr(at, static_cast<size_t>(n)));
    at += static_cast<size_t>(n);
  }
  return result;
}

void World::stop_background(const std::string& reason) noexcept {
  if (!background_ || is_inherited()) return;
  try {
    if (background_->is_idle()) return;
    communicator_->abort(reason);
    background_->synchronize();
  } catch (const std::exception&) {  // that of what was aborted, or of a GPU that is lost
  }
}

void World::report_failure(const std::string& text) noexcept {
  if (watch_) watch_->report(watch_->self_text() + " failed: " + text);
}

void World::leave() noexcept {
  watch_.reset();
  if (journal_) journal_->close();
}

std::vector<std::unique_ptr<World>> make_local_worlds(int size, LocalDevice kind, const CpuDeviceOptions& cpu,
                                                      std::chrono::milliseconds timeout) {
  const CommOptions comm{.timeout = timeout};
  std::vector<std::unique_ptr<Communicator>> communicators = make_local_communicators(size, comm);
  std::vector<std::unique_ptr<Device>> devices;
  for (int rank = 0; rank < size; ++rank)
    devices.push_back(make_device(kind == LocalDevice::kCpu       ? -1
                                  : kind == LocalDevice::kGpuEach ? rank
                                                                  : 0,
                                  cpu));
  const auto store = std::make_shared<MemoryStore>();
  if (kind == LocalDevice::kGpuEach && size > 1) join_by_nccl(*store, devices, communicators, comm);
  const std::vector<std::string> hosts(communicators.size(), "localhost");
  std::vector<std::unique_ptr<World>> worlds;
  for (size_t rank = 0; rank < communicators.size(); ++rank)
    worlds.push_back(
        std::make_unique<World>(store, std::move(devices[rank]), std::move(communicators[rank]), hosts));
  return worlds;
}

std::unique_ptr<World> make_world(const WorldOptions& options) {
  constexpr std::array<const char*, 4> kTransports = {"auto", "shm", "tcp", "mpi"};
  require(std::ranges::find(kTransports, options.transport) != kTransports.end(), "unknown transport '",
          options.transport, "'; expected auto, shm, tcp or mpi");
  const auto journal = std::make_shared<Journal>(JournalOptions{.directory = options.record_dir,
                                                                .rank = options.rank,
                                                                .world_size = options.size,
                                                                .job_id = options.job_id});
  const CommOptions comm{.timeout = options.timeout, .reduce_mode = options.reduce_mode, .journal = journal};
  if (options.size == 1)
    return std::make_unique<World>(std::make_shared<MemoryStore>(), make_device(options.gpu, options.device),
                                   std::move(make_local_communicators(1, comm).front()),
                                   std::vector<std::string>{"localhost"}, journal);
  const std::string sums = options.reduce_mode == ReduceMode::kOrdered ? "ordered" : "fast";
  const Isa best =
      isa_from_name(options.device.isa);  // throws for what this CPU lacks, before anybody is met
  // So does a GPU; a CPU's level is known later.
  std::unique_ptr<Device> device = options.gpu < 0 ? nullptr : make_device(options.gpu, options.device);
  std::unique_ptr<TcpStore> store = join_store(options);
  const std::vector<RankRecord> records = rendezvous(*store, {.rank = options.rank,
                                                              .world_size = options.size,
                                                              .fields = {{"version", build_info().version},
                                                                         {"isa", options.device.isa},
                                                                         {"best_isa", isa_name(best)},
                                                                         {"domain", shared_memory_domain()},
                                                                         {"process", process_text()},
                                                                         {"transport", options.transport},
                                                                         {"device", device ? "cuda" : "cpu"},
                                                                         {"sums", sums}},
                                                              .limit = options.init_timeout,
                                                              .progress = options.progress});
  require_same_field(records, "version");
  require_same_field(records, "transport");
  require_same_field(records, "sums");
  require_same_field(records, "device");
  if (!device) {
    CpuDeviceOptions cpu = options.device;
    cpu.isa = common_isa(records);
    device = make_cpu_device(cpu);
  }
  // Before the group is opened, where ranks may have to wait for one that has died.
  const auto breaker = std::make_shared<GroupBreaker>();
  auto watch = std::make_unique<Watch>(
      WatchOptions{.store = {.host = options.master_addr,
                             .port = store->port(),
                             .secret = options.secret,
                             .timeout = options.init_timeout,
                             .greeting_limit = options.init_timeout},
                   .rank = options.rank,
                   .heartbeat_interval = options.heartbeat_interval,
                   .peer_timeout = options.peer_timeout,
                   .on_failure = [breaker](const std::string& text) { breaker->fail(text); },
                   .journal = journal});
  std::unique_ptr<Communicator> communicator = open_group(*store, options, *device, records, comm, *watch);
  breaker->set_group(*communicator);
  auto world =
      std::make_unique<World>(std::move(store), std::move(device), std::move(communicator),
                              host_labels(records, host_numbers(records)), journal, std::move(watch));
  world->communicator().barrier(options.init_timeout);  // nobody ends before the others have found its store
  return world;
}

}  // namespace polyreme
