#pragma once

#include <memory>
#include <string>

#include "comm/messages/endpoint.h"

namespace polyreme {

// Links over MPI, to all ranks of its world. Collective over that; started on demand (see mpi_table.h).
// When the endpoint is destroyed the others learn that it has left. Groups and their subgroups are told apart
// by tags, so MPI_Comm_split is never called, and nothing waits inside MPI.
//
// When a process of an MPI job dies, its launcher (mpirun) ends all others, so nobody is left to be told; and
// what MPI has begun to receive cannot be called back: after a failure, end the process.
//
// Throws NotAvailable with the remedy; PeerLost; Timeout after `limit`.
std::unique_ptr<Endpoint> make_mpi_endpoint(const std::string& name, std::chrono::milliseconds limit);

}  // namespace polyreme
