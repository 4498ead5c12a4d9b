#pragma once

#include <map>
#include <memory>

#include "comm/communicator.h"
#include "mesh/mesh_layout.h"

namespace polyreme {

// Named axes over the ranks of a world, and the groups along them that this rank belongs to.
class Mesh {
 public:
  // Collective over `world`, which must outlive the mesh. Every group is made here and in one order,
  // so the order of first use cannot deadlock: the group of all ranks, one for each axis, and one for
  // each set of axes in `groups`. Axes of size 1 cost no communication. Throws InvalidArgument before
  // anything is communicated; CollectiveMismatch if ranks ask for different meshes.
  Mesh(Communicator& world, MeshLayout layout, const std::vector<std::vector<std::string>>& groups = {});

  const MeshLayout& layout() const { return layout_; }
  int coordinate(const std::string& axis) const { return layout_.coordinate(world_.rank(), axis); }
  Communicator& world() const { return world_; }
  // The ranks that differ from this one in the named axes alone, in the order of MeshLayout::group.
  // Axes of size 1 make no difference. Throws InvalidArgument for a set that was not asked for.
  Communicator& group(const std::vector<std::string>& axes) const;

 private:
  // Keys are the axes in order of the mesh: those above 1, or one axis of size 1.
  using Key = std::vector<std::string>;
  // Collective, unless the group is there.
  void make(const Key& key, const std::string& name);

  Communicator& world_;
  MeshLayout layout_;
  std::map<Key, std::unique_ptr<Communicator>> groups_;
};

}  // namespace polyreme
