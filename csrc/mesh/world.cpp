#include "mesh/world.h"

#include "comm/factory.h"

namespace polyreme {

std::vector<std::unique_ptr<World>> make_local_worlds(int size, const CpuDeviceOptions& device,
                                                      std::chrono::milliseconds timeout) {
  std::vector<std::unique_ptr<World>> worlds;
  for (std::unique_ptr<Communicator>& communicator : make_local_communicators(size, {.timeout = timeout}))
    worlds.push_back(std::make_unique<World>(nullptr, make_cpu_device(device), std::move(communicator)));
  return worlds;
}

std::unique_ptr<World> make_world(const WorldOptions& options) {
  return std::move(make_local_worlds(1, options.device, options.timeout).front());
}

}  // namespace polyreme
