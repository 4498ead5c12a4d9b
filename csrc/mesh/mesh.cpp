#include "mesh/mesh.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "comm/dry_communicator.h"
#include "comm/factory.h"
#include "comm/split.h"

namespace polyreme {
namespace {

std::string joined(const std::vector<std::string>& words, const std::string& separator) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : separator) + word;
  return text;
}

}  // namespace

Mesh::Mesh(Communicator& world, MeshLayout layout, const std::vector<std::vector<std::string>>& groups)
    : world_(world), layout_(std::move(layout)) {
  require(layout_.world_size() == world.size(), "the layout is of ", layout_.world_size(),
          " ranks, but the world has ", world.size());
  std::set<Key> flattened;  // in this order on every rank
  for (const std::vector<std::string>& axes : groups)
    if (Key key = layout_.wide_axes(axes); key.size() > 1) flattened.insert(std::move(key));

  // First the group of all ranks: split compares the name, so ranks that ask for different meshes
  // find out here, before their groups could mix.
  Key all;
  for (const Axis& axis : layout_.axes()) all.push_back(axis.name);
  all = layout_.wide_axes(all);
  std::string text = layout_.description();
  for (const Key& key : flattened) text += ", " + joined(key, "+");
  if (!all.empty()) make(all, text.substr(0, SplitWish::kMaxNameBytes));

  for (const Axis& axis : layout_.axes()) {
    if (axis.size > 1)
      make({axis.name}, axis.name);
    else if (const auto* dry = dynamic_cast<const DryCommunicator*>(&world_))
      groups_[{axis.name}] = dry->subgroup(0, 1, axis.name);
    else
      groups_[{axis.name}] = std::move(make_local_communicators(1, {.name = axis.name}).front());
  }
  for (const Key& key : flattened) make(key, joined(key, "+"));
}

void Mesh::make(const Key& key, const std::string& name) {
  if (groups_.contains(key)) return;
  const std::vector<int> members = layout_.group(world_.rank(), key);
  const auto self = std::find(members.begin(), members.end(), world_.rank());
  const auto place = static_cast<int>(self - members.begin());
  if (const auto* dry = dynamic_cast<const DryCommunicator*>(&world_)) {
    groups_[key] = dry->subgroup(place, static_cast<int>(members.size()), joined(key, "+"));
  } else {
    groups_[key] = world_.split(members.front(), place, name);
  }
}

Communicator& Mesh::group(const std::vector<std::string>& axes) const {
  require(!axes.empty(), "a group is along at least one axis of the mesh");
  Key key = layout_.wide_axes(axes);
  if (key.empty()) key = {axes.front()};
  const auto found = groups_.find(key);
  require(found != groups_.end(), "the mesh ", layout_.description(), " has no group along ",
          joined(key, " and "), ": making one is collective; declare it with the mesh, groups=[(\"",
          joined(key, "\", \""), "\")]");
  return *found->second;
}

}  // namespace polyreme
