#pragma once

#include <map>
#include <memory>

#include "comm/communicator.h"
#include "mesh/mesh_layout.h"

namespace polyreme {

// Named axes over the ranks of a world, with one group per axis that this rank belongs to.
class Mesh {
 public:
  // Collective over `world`, which must outlive the mesh. Groups of every axis are made here, in the
  // order of the axes, so the order of first use cannot deadlock. Throws InvalidArgument (see
  // MeshLayout) before anything is communicated.
  Mesh(Communicator& world, std::vector<Axis> axes);

  const MeshLayout& layout() const { return layout_; }
  int coordinate(const std::string& axis) const { return layout_.coordinate(world_.rank(), axis); }
  Communicator& world() const { return world_; }
  // The ranks that differ from this one in `axis` alone.
  Communicator& group(const std::string& axis) const;

 private:
  Communicator& world_;
  MeshLayout layout_;
  std::map<std::string, std::unique_ptr<Communicator>> groups_;
};

}  // namespace polyreme
