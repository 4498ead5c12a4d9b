// A rank of a real MPI job, started by mpirun from the tests: "mpi_job conform" or "mpi_job faults". Rank 0
// says "all N ranks passed"; a rank that did not says why and the job fails.

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "comm/conformance.h"
#include "comm/factory.h"
#include "comm/rank_threads.h"

namespace polyreme {
namespace {

using conformance::expect;
using std::chrono::milliseconds;
using std::chrono::seconds;

// What Open MPI, or MPICH and its kin, tell a process of itself.
int from_launcher(const char* open_mpi, const char* pmi) {
  const char* value = std::getenv(open_mpi);
  if (value == nullptr) value = std::getenv(pmi);
  expect(value != nullptr, "neither ", open_mpi, " nor ", pmi, " is set; start this with mpirun");
  return std::stoi(value);
}

std::unique_ptr<Communicator> make_group(int64_t chunk_bytes) {
  CommOptions options;
  options.chunk_bytes = chunk_bytes;
  options.timeout = seconds(60);
  return make_mpi_communicator(from_launcher("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
                               from_launcher("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), options);
}

void conform(Device& device) {
  conformance::check_everything(*make_group(conformance::kSmallChunk), device);
  const auto comm = make_group(conformance::kLargeChunk);
  conformance::check_large(*comm, device);
  if (comm->size() % 2 == 0) conformance::check_streams_and_subgroups(*comm, device);
}

// `body` must fail with all of `parts`.
void expect_failure(const std::function<void()>& body, const std::vector<std::string>& parts) {
  std::exception_ptr error;
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  const std::string outcome = outcome_of(error);
  for (const std::string& part : parts)
    expect(outcome.find(part) != std::string::npos, "no '", part, "' in ", outcome);
}

// Each in a group of its own, which breaks.
void faults(Device& device) {
  const auto stream = device.create_stream("test");
  const Tensor data = conformance::to_device(device, std::vector<float>(5000, 1.0F));
  int rank = 0;
  {
    const auto comm = make_group(4096);
    rank = comm->rank();
    expect_failure(
        [&] {
          (comm->rank() == 1 ? comm->broadcast(data, 0, *stream)
                             : comm->all_reduce(data, ReduceOp::kSum, *stream))
              ->wait();
        },
        {"CollectiveMismatch", "rank 1: broadcast float32[5000] root 0", "all_reduce float32[5000] sum"});
  }
  // Rank 1 may have made its group, and be done with it, before the others have made theirs: it is then that
  // they fail.
  expect_failure(
      [&] {
        const auto comm = make_group(4096);
        if (comm->rank() == 1) comm->abort("bad file");
        comm->barrier(seconds(60));
      },
      {"PeerLost", "rank 1 (host ", "aborted the group: bad file"});
  {
    const auto comm = make_group(4096);
    if (comm->rank() == 1) {
      std::this_thread::sleep_for(milliseconds(1200));
    } else {
      expect_failure([&] { comm->barrier(milliseconds(300)); },
                     {"Timeout", "0.3 s", "rank 1 (host ", "rank 1 did not come to this call"});
    }
  }
  if (rank == 1) {
    make_group(4096);
  } else {
    expect_failure([&] { make_group(4096)->barrier(seconds(60)); },
                   {"PeerLost", "rank 1 (host ", "left the group"});
  }
  make_group(4096)->barrier(seconds(60));  // MPI itself is as before
}

int run(const std::string& what) {
  try {
    const auto device = make_cpu_device({});
    what == "faults" ? faults(*device) : conform(*device);
    const auto comm = make_group(4096);
    comm->barrier(seconds(60));
    if (comm->rank() == 0) {
      std::printf("all %d ranks passed\n", comm->size());
      std::fflush(stdout);
    }
    comm->barrier(seconds(60));  // said before mpirun may end what is left of the job
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace polyreme

int main(int argc, char** argv) { return polyreme::run(argc > 1 ? argv[1] : "conform"); }
