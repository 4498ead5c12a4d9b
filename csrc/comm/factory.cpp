#include "comm/factory.h"

#include "comm/cpu_communicator.h"
#include "comm/hierarchical/hierarchical_transport.h"
#include "comm/mpi/mpi_endpoint.h"
#include "comm/shared_memory/shared_transport.h"

namespace polyreme {
namespace {

void check_options(int size, const CommOptions& options) {
  require(size >= 1, "group '", options.name, "': size is ", size, "; expected at least 1");
  require(options.chunk_bytes >= 1, "group '", options.name, "': chunk_bytes is ", options.chunk_bytes,
          "; expected at least 1");
  require(options.timeout.count() > 0, "group '", options.name, "': timeout is ", options.timeout.count(),
          " ms; expected a positive one");
}

std::shared_ptr<SharedGroup> make_group(std::shared_ptr<SharedMemory> memory, int rank, int size,
                                        const CommOptions& options, int job_rank,
                                        std::shared_ptr<const PeerMemory> peers = nullptr) {
  return std::make_shared<SharedGroup>(
      std::move(memory), rank, size, options.chunk_bytes,
      SharedGroup::Options{options.name, options.timeout, false, std::move(peers), job_rank});
}

std::shared_ptr<SharedMemory> create_segment(SharedMemorySource& source, int size, const CommOptions& options,
                                             std::string* name) {
  auto memory =
      source.create(static_cast<size_t>(SharedGroup::segment_bytes(size, options.chunk_bytes)), name);
  SharedGroup::format(*memory, size, options.chunk_bytes);
  return memory;
}

// What rank 0 tells the others: "ok <boot id> <host> <segment>", or "error <text>".
std::string invitation(const std::string& segment_name) {
  return concat("ok ", boot_id(), " ", host_name(), " ", segment_name);
}

// The name of the segment. Throws CommError if the invitation is an error or from another host.
std::string accept_invitation(const std::string& text, int rank, const CommOptions& options) {
  const std::string where = concat("group '", options.name, "', rank ", rank, ": ");
  require<CommError>(text.starts_with("ok "), where,
                     "rank 0 could not open the group: ", text.starts_with("error ") ? text.substr(6) : text);
  std::istringstream words(text.substr(3));
  std::string boot, host, name;
  words >> boot >> host >> name;
  require<CommError>(boot == boot_id(), where, "rank 0 is on host ", host, ", this rank on host ",
                     host_name(), "; shared memory joins processes of one host only");
  return name;
}

// A rank's side of a group over POSIX shared memory whose ranks have yet to attach. Rank 0 takes the name of
// the memory away when this ends, and tells those that have not attached by then what went wrong, if
// anything.
class SharedOpening {
 public:
  SharedOpening(Store& store, int rank, int size, const std::string& job_id, const CommOptions& options,
                int job_rank)
      : store_(store), source_(make_posix_source(job_id)), segment_{source_, {}} {
    // The n-th group of this name; each rank counts for itself, so a key is never used twice.
    const std::string base = concat("shm/", options.name, "/");
    key_ = concat(base, store.add(concat(base, "rank", rank), 1));
    const std::shared_ptr<SharedMemory> memory =
        rank == 0 ? create(size, options) : attach_memory(rank, options);
    transport_ = std::make_unique<SharedTransport>(make_group(memory, rank, size, options, job_rank), source_,
                                                   options.chunk_bytes);
    if (rank == 0) store_.set(key_, invitation(segment_.name));
  }
  SharedOpening(const SharedOpening&) = delete;
  SharedOpening& operator=(const SharedOpening&) = delete;

  std::unique_ptr<Transport> take_transport() { return std::move(transport_); }
  // Rank 0, after a failure.
  void tell(const std::string& text) noexcept {
    if (segment_.name.empty()) return;
    try {
      store_.set(key_, "error " + text);
    } catch (const std::exception&) {  // they will miss the store itself
    }
  }

 private:
  std::shared_ptr<SharedMemory> create(int size, const CommOptions& options) {
    try {
      return create_segment(*source_, size, options, &segment_.name);
    } catch (const std::exception& failure) {
      store_.set(key_, std::string("error ") + failure.what());
      throw;
    }
  }
  std::shared_ptr<SharedMemory> attach_memory(int rank, const CommOptions& options) {
    const std::string segment = accept_invitation(store_.get(key_, options.timeout), rank, options);
    try {
      return source_->attach(segment);
    } catch (const CommError&) {
      accept_invitation(store_.get(key_, options.timeout), rank,
                        options);  // rank 0 may have failed meanwhile
      throw;
    }
  }

  Store& store_;
  std::shared_ptr<SharedMemorySource> source_;
  std::string key_;
  SharedName segment_;  // on rank 0
  std::unique_ptr<Transport> transport_;
};

void check_rank(int rank, int size, const CommOptions& options) {
  check_options(size, options);
  require(rank >= 0 && rank < size, "group '", options.name, "': rank is ", rank, "; expected 0 to ",
          size - 1);
}

// All ranks of `transport` call it.
std::unique_ptr<Communicator> join(std::unique_ptr<Transport> transport, const CommOptions& options) {
  const GroupJournal journal(options.journal, options.name, transport->rank(), transport->size());
  auto communicator = std::make_unique<CpuCommunicator>(std::move(transport), journal);
  communicator->attach();
  return communicator;
}

std::unique_ptr<MessageTransport> open_messages(std::unique_ptr<Endpoint> endpoint,
                                                const CommOptions& options) {
  return std::make_unique<MessageTransport>(
      std::move(endpoint),
      MessageOptions{.name = options.name, .timeout = options.timeout, .chunk_bytes = options.chunk_bytes});
}

std::unique_ptr<MessageTransport> open_tcp(Store& store, int rank, int size, TcpEndpointOptions tcp,
                                           const CommOptions& options) {
  tcp.name = options.name;
  return open_messages(make_tcp_endpoint(store, rank, size, tcp), options);
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_local_communicators(int size, const CommOptions& options) {
  check_options(size, options);
  const std::shared_ptr<SharedMemorySource> source = make_heap_source();
  std::string name;
  const auto memory = create_segment(*source, size, options, &name);
  source->forget(name);
  for (int r = 0; r < size; ++r) SharedGroup::introduce(*memory, r, this_rank(r));
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int r = 0; r < size; ++r) {
    std::shared_ptr<SharedGroup> group = make_group(memory, r, size, options, r, make_thread_memory());
    group->choose_waiting();
    communicators.push_back(std::make_unique<CpuCommunicator>(
        std::make_unique<SharedTransport>(std::move(group), source, options.chunk_bytes),
        GroupJournal(size == 1 ? options.journal : nullptr, options.name, r, size)));
  }
  return communicators;
}

std::unique_ptr<Communicator> make_shm_communicator(Store& store, int rank, int size,
                                                    const std::string& job_id, const CommOptions& options) {
  check_rank(rank, size, options);
  make_posix_source(job_id);  // checks it, also for one rank
  if (size == 1) return std::move(make_local_communicators(1, options).front());
  SharedOpening opening(store, rank, size, job_id, options, rank);
  try {
    return join(opening.take_transport(), options);
  } catch (const std::exception& failure) {
    opening.tell(failure.what());
    throw;
  }
}

std::unique_ptr<Communicator> make_tcp_communicator(Store& store, int rank, int size,
                                                    const TcpEndpointOptions& tcp,
                                                    const CommOptions& options) {
  check_rank(rank, size, options);
  if (size == 1) return std::move(make_local_communicators(1, options).front());
  return join(open_tcp(store, rank, size, tcp, options), options);
}

std::unique_ptr<Communicator> make_hierarchical_communicator(Store& store, int rank,
                                                             const std::vector<int>& hosts,
                                                             const std::string& job_id,
                                                             const TcpEndpointOptions& tcp,
                                                             const CommOptions& options) {
  const int size = static_cast<int>(hosts.size());
  check_rank(rank, size, options);
  std::unique_ptr<MessageTransport> flat = open_tcp(store, rank, size, tcp, options);
  const std::optional<HostGrid> grid = host_grid(hosts);
  if (!grid) return join(HierarchicalTransport::make(std::move(flat), nullptr, hosts), options);
  CommOptions host_options = options;
  host_options.name = concat(options.name, " (host ", grid->host(rank), ")");
  SharedOpening opening(store, grid->local(rank), grid->ranks_per_host, job_id, host_options, rank);
  try {
    return join(HierarchicalTransport::make(std::move(flat), opening.take_transport(), hosts), options);
  } catch (const std::exception& failure) {
    opening.tell(failure.what());
    throw;
  }
}

std::unique_ptr<Communicator> make_mpi_communicator(int rank, int size, const CommOptions& options) {
  check_rank(rank, size, options);
  std::unique_ptr<Endpoint> endpoint = make_mpi_endpoint(options.name, options.timeout);
  require(endpoint->rank() == rank && endpoint->size() == size, "group '", options.name, "': rank ", rank,
          " of ", size, " is rank ", endpoint->rank(), " of ", endpoint->size(),
          " to MPI; start all ranks with one mpirun");
  return join(open_messages(std::move(endpoint), options), options);
}

}  // namespace polyreme
