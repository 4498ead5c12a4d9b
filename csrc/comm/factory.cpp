#include "comm/factory.h"

#include "comm/cpu_communicator.h"
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
                                        const CommOptions& options,
                                        std::shared_ptr<const PeerMemory> peers = nullptr) {
  return std::make_shared<SharedGroup>(
      std::move(memory), rank, size, options.chunk_bytes,
      SharedGroup::Options{options.name, options.timeout, false, std::move(peers)});
}

std::unique_ptr<CpuCommunicator> join(std::shared_ptr<SharedMemory> memory,
                                      std::shared_ptr<SharedMemorySource> source, int rank, int size,
                                      const CommOptions& options) {
  return std::make_unique<CpuCommunicator>(
      std::make_unique<SharedTransport>(make_group(std::move(memory), rank, size, options), std::move(source),
                                        options.chunk_bytes),
      GroupJournal(options.journal, options.name, rank, size));
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

// Rank 0. Whatever goes wrong is told to those who have not attached yet.
std::unique_ptr<Communicator> host_segment(Store& store, const std::string& key,
                                           const std::shared_ptr<SharedMemorySource>& source, int size,
                                           const CommOptions& options) {
  std::string segment;
  try {
    auto memory = create_segment(*source, size, options, &segment);
    auto communicator = join(std::move(memory), source, 0, size, options);
    store.set(key, invitation(segment));
    communicator->attach();
    source->forget(segment);
    return communicator;
  } catch (const std::exception& failure) {
    const std::string text = failure.what();
    try {
      store.set(key, "error " + text);
    } catch (const CommError&) {  // they will miss the store itself
    }
    if (!segment.empty()) source->forget(segment);
    throw;
  }
}

std::unique_ptr<Communicator> join_segment(Store& store, const std::string& key,
                                           const std::shared_ptr<SharedMemorySource>& source, int rank,
                                           int size, const CommOptions& options) {
  const std::string segment = accept_invitation(store.get(key, options.timeout), rank, options);
  std::shared_ptr<SharedMemory> memory;
  try {
    memory = source->attach(segment);
  } catch (const CommError&) {
    accept_invitation(store.get(key, options.timeout), rank, options);  // rank 0 may have failed meanwhile
    throw;
  }
  auto communicator = join(std::move(memory), source, rank, size, options);
  communicator->attach();
  return communicator;
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_local_communicators(int size, const CommOptions& options) {
  check_options(size, options);
  const std::shared_ptr<SharedMemorySource> source = make_heap_source();
  std::string name;
  const auto memory = create_segment(*source, size, options, &name);
  source->forget(name);
  for (int r = 0; r < size; ++r) SharedGroup::introduce(*memory, r, this_rank());
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int r = 0; r < size; ++r) {
    std::shared_ptr<SharedGroup> group = make_group(memory, r, size, options, make_thread_memory());
    group->choose_waiting();
    communicators.push_back(std::make_unique<CpuCommunicator>(
        std::make_unique<SharedTransport>(std::move(group), source, options.chunk_bytes),
        GroupJournal(size == 1 ? options.journal : nullptr, options.name, r, size)));
  }
  return communicators;
}

std::unique_ptr<Communicator> make_shm_communicator(Store& store, int rank, int size,
                                                    const std::string& job_id, const CommOptions& options) {
  check_options(size, options);
  require(rank >= 0 && rank < size, "group '", options.name, "': rank is ", rank, "; expected 0 to ",
          size - 1);
  const std::shared_ptr<SharedMemorySource> source = make_posix_source(job_id);
  if (size == 1) return std::move(make_local_communicators(1, options).front());

  // The n-th group of this name; each rank counts for itself, so a key is never used twice.
  const std::string base = concat("shm/", options.name, "/");
  const std::string key = concat(base, store.add(concat(base, "rank", rank), 1));
  return rank == 0 ? host_segment(store, key, source, size, options)
                   : join_segment(store, key, source, rank, size, options);
}

}  // namespace polyreme
