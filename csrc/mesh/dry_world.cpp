#include "mesh/dry_world.h"

#include "comm/memory_store.h"
#include "device/cpu/dry_device.h"

namespace polyreme {

std::unique_ptr<World> make_dry_world(int rank, int size, std::shared_ptr<Traffic> traffic) {
  require(size >= 1 && rank >= 0 && rank < size, "dry run: rank ", rank, " of ", size,
          "; expected a rank from 0 to one less than their number");
  return std::make_unique<World>(std::make_shared<MemoryStore>(), make_dry_device(),
                                 std::make_unique<DryCommunicator>(rank, size, "world", std::move(traffic)),
                                 std::vector<std::string>(static_cast<size_t>(size), "dry run"));
}

}  // namespace polyreme
