#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/fork.h"
#include "comm/communicator.h"
#include "comm/store.h"
#include "comm/watch.h"
#include "device/cpu/cpu_device.h"

namespace polyreme {

// Who this process is and how it finds the others. Python reads the launcher's environment.
struct WorldOptions {
  int rank = 0;
  int size = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  int store_fd = -1;   // rank 0: a listening socket to adopt instead of binding master_port
  std::string secret;  // shared by the ranks of the job
  std::string job_id;  // names the job's shared memory
  // "auto": shared memory between ranks of one host, TCP between hosts; NCCL between GPUs. "shm", "tcp" or
  // "mpi": that alone, with GPUs by way of the host's memory, so that ranks may share one. The same on all
  // ranks.
  std::string transport = "auto";
  // See ReduceMode; the same on all ranks.
  ReduceMode reduce_mode = ReduceMode::kOrdered;
  std::string interface;  // see TcpEndpointOptions
  std::chrono::milliseconds init_timeout{std::chrono::minutes(5)};
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};  // of one collective among live ranks
  // How long whoever holds the port may stay silent before it counts as a foreign program.
  std::chrono::milliseconds greeting_limit{std::chrono::seconds(3)};
  std::function<void(const std::string&)> progress;  // who is missing, every two seconds
  // See WatchOptions. Every rank may have its own.
  std::chrono::milliseconds heartbeat_interval{std::chrono::seconds(2)};
  std::chrono::milliseconds peer_timeout{std::chrono::seconds(30)};
  std::string record_dir;  // where the journal goes; empty: into memory
  CpuDeviceOptions device;
  // Of the GPUs that this process sees, the one that takes the CPU's place; -1: none. All ranks have one, or
  // none.
  int gpu = -1;
};

// This rank, its device, and the group of all ranks. Single owner; outlives meshes and engines.
class World {
 public:
  // `watch`: over the other ranks; of this world alone, and on_failure breaks `communicator`.
  World(std::shared_ptr<Store> store, std::unique_ptr<Device> device,
        std::unique_ptr<Communicator> communicator, std::vector<std::string> hosts,
        std::shared_ptr<Journal> journal = nullptr, std::unique_ptr<Watch> watch = nullptr)
      : store_(std::move(store)),
        journal_(std::move(journal)),
        device_(std::move(device)),
        communicator_(std::move(communicator)),
        hosts_(std::move(hosts)),
        watch_(std::move(watch)) {}

  // Does not wait for the other ranks: collectives in flight fail, here and there.
  ~World() { stop_background("its world was destroyed"); }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return communicator_->rank(); }
  int size() const { return communicator_->size(); }
  Device& device() const { return *device_; }
  Communicator& communicator() const { return *communicator_; }
  // What the ranks tell each other outside of collectives, from any thread. Keys begin with the name of the
  // module that uses them.
  Store& store() const { return *store_; }
  // Every rank's `own`, by rank. Collective, on the background stream; `what` is named in errors.
  std::vector<std::string> all_gather_bytes(const std::string& own, const std::string& what);
  // For collectives beside the host's thread; made at the first call, which one thread makes at a time.
  Stream& background();
  // Whether a fork of the world's process looks at it, which must neither use nor destroy it: its threads are
  // not there.
  bool is_inherited() const { return fork_guard_.is_inherited(); }
  // Ends `background()`: what waits for other ranks fails, here and there. For a process that ends.
  void stop_background(const std::string& reason) noexcept;
  // Tells all ranks that this one has failed, and why; without effect on a world without a watch.
  void report_failure(const std::string& text) noexcept;
  // Null for one rank, and for ranks that are threads.
  Watch* watch() const { return watch_.get(); }
  // Says goodbye to the other ranks and closes the journal: for a process that ends. Twice is allowed.
  void leave() noexcept;
  // Where each rank runs, by rank; the same list on every rank.
  const std::vector<std::string>& hosts() const { return hosts_; }

 private:
  // Every rank's elements, one after the other, in memory of the host; counts as Communicator::all_gather's.
  void all_gather_host(const void* own, int64_t own_count, void* all, int64_t all_count, DType dtype,
                       std::span<const int64_t> counts);

  std::shared_ptr<Store> store_;  // rank 0 serves it until the world ends
  std::shared_ptr<Journal> journal_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Communicator> communicator_;
  std::vector<std::string> hosts_;
  std::unique_ptr<Stream> background_;
  std::unique_ptr<Watch> watch_;
  ForkGuard fork_guard_;
};

// Meets the other ranks; all agree on the lowest common instruction-set level. Blocks up
// to init_timeout. Throws Timeout naming the missing ranks, InvalidArgument for contradicting ones,
// NotAvailable where there is no such GPU.
std::unique_ptr<World> make_world(const WorldOptions& options);
// Where ranks that are threads compute: on the CPU, on a GPU each over NCCL, or all on the first GPU, by way
// of the host's memory.
enum class LocalDevice { kCpu, kGpuEach, kSharedGpu };
// `size` ranks as threads of this process, for tests: one World for each thread. `cpu` is for kCpu.
std::vector<std::unique_ptr<World>> make_local_worlds(int size, LocalDevice kind, const CpuDeviceOptions& cpu,
                                                      std::chrono::milliseconds timeout);

}  // namespace polyreme
