#pragma once

#include <memory>

#include "comm/dry_communicator.h"
#include "mesh/world.h"

namespace polyreme {

// Rank `rank` of `size` ranks that do not exist: whatever is made over it allocates, computes and
// communicates nothing, and counts its memory (Device::memory) and its `traffic`. Every rank is taken to have
// the same facts. Throws InvalidArgument for a rank that there is not.
std::unique_ptr<World> make_dry_world(int rank, int size, std::shared_ptr<Traffic> traffic);

}  // namespace polyreme
