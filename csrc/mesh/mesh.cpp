#include "mesh/mesh.h"

#include "base/error.h"

namespace polyreme {

Mesh::Mesh(Communicator& world, std::vector<Axis> axes)
    : world_(world), layout_(std::move(axes), world.size()) {
  for (const Axis& axis : layout_.axes()) {
    const int leader = layout_.group(world.rank(), axis.name).front();
    groups_[axis.name] = world.split(leader, layout_.coordinate(world.rank(), axis.name), axis.name);
  }
}

Communicator& Mesh::group(const std::string& axis) const {
  layout_.size(axis);  // throws for an unknown axis
  return *groups_.at(axis);
}

}  // namespace polyreme
