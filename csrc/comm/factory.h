#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/store.h"
#include "comm/tcp/endpoint.h"

// Where groups come from; their subgroups come from Communicator::split. One function per transport.

namespace polyreme {

// `size` ranks that are threads of this process, for tests and for one rank alone; element r is
// rank r's. A rank's communicator may be moved to its thread before the first call. Without a journal, which
// is of one rank, for more than one.
// Throws InvalidArgument for size < 1 or chunk_bytes < 1, OutOfMemory.
std::vector<std::unique_ptr<Communicator>> make_local_communicators(int size, const CommOptions& options);

// This process as rank `rank` of `size` processes of one host, over POSIX shared memory. Collective:
// the ranks find each other through `store`, and the memory has no name any more when the call
// returns. If a rank is killed before, /dev/shm/polyreme-<job_id>-* is left for the launcher to
// remove. A group of one takes no shared memory and does not use the store.
// Throws InvalidArgument for a bad argument (see make_posix_source), OutOfMemory if /dev/shm is too
// small, CommError if a rank is on another host, PeerLost, Timeout.
std::unique_ptr<Communicator> make_shm_communicator(Store& store, int rank, int size,
                                                    const std::string& job_id, const CommOptions& options);

// This process as rank `rank` of `size` processes on any hosts, over TCP. Collective. Throws as
// make_tcp_endpoint does; the name is that of `options`.
std::unique_ptr<Communicator> make_tcp_communicator(Store& store, int rank, int size,
                                                    const TcpEndpointOptions& tcp,
                                                    const CommOptions& options);

// The same over shared memory between ranks of one host and over TCP between hosts; hosts[r] is a number of
// the host of rank r, the same list on all ranks. Throws as the two above do.
std::unique_ptr<Communicator> make_hierarchical_communicator(Store& store, int rank,
                                                             const std::vector<int>& hosts,
                                                             const std::string& job_id,
                                                             const TcpEndpointOptions& tcp,
                                                             const CommOptions& options);

// This process as a rank of its MPI job, which it joins on demand; see make_mpi_endpoint. Collective over the
// job. Throws InvalidArgument if MPI numbers the ranks otherwise, NotAvailable with the remedy, PeerLost,
// Timeout.
std::unique_ptr<Communicator> make_mpi_communicator(int rank, int size, const CommOptions& options);

// This rank with its GPU as rank `rank` of `size`, over NCCL; `device` is of make_cuda_device. Collective:
// the ranks meet in the store, which must outlive the communicator as the device must. See NcclCommunicator.
// Throws InvalidArgument if two ranks use one GPU or their versions differ, NotAvailable, PeerLost, Timeout.
std::unique_ptr<Communicator> make_nccl_communicator(Store& store, int rank, int size, Device& device,
                                                     const CommOptions& options);

}  // namespace polyreme
