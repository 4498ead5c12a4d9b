#include "mesh/mesh_layout.h"

#include <limits>

#include "base/error.h"

namespace polyreme {

MeshLayout::MeshLayout(std::vector<Axis> axes, int world_size)
    : axes_(std::move(axes)), world_size_(world_size) {
  int64_t product = 1;
  std::string text;
  for (size_t i = 0; i < axes_.size(); ++i) {
    const Axis& axis = axes_[i];
    require(axis.size >= 1, "mesh axis ", axis.name, "=", axis.size, "; expected at least 1");
    for (size_t j = 0; j < i; ++j)
      require(axes_[j].name != axis.name, "mesh axis ", axis.name, " is given twice");
    if (__builtin_mul_overflow(product, axis.size, &product)) product = std::numeric_limits<int64_t>::max();
    text += concat(i == 0 ? "" : " * ", axis.name, "=", axis.size);
  }
  require(product == world_size, "the mesh has ", text, " = ", product, " ranks, but the world has ",
          world_size, "; start ", product, " ranks or change an axis");
}

int MeshLayout::index(const std::string& axis) const {
  std::string known;
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == axis) return static_cast<int>(i);
    known += concat(i == 0 ? "" : ", ", axes_[i].name);
  }
  throw InvalidArgument(concat("the mesh has no axis '", axis, "'; it has ", known));
}

int MeshLayout::stride(int axis_index) const {
  int stride = 1;
  for (size_t i = static_cast<size_t>(axis_index) + 1; i < axes_.size(); ++i) stride *= axes_[i].size;
  return stride;
}

int MeshLayout::size(const std::string& axis) const { return axes_[static_cast<size_t>(index(axis))].size; }

int MeshLayout::coordinate(int rank, const std::string& axis) const {
  require(rank >= 0 && rank < world_size_, "rank ", rank, " is not in a world of ", world_size_);
  const int i = index(axis);
  return rank / stride(i) % axes_[static_cast<size_t>(i)].size;
}

std::vector<int> MeshLayout::group(int rank, const std::string& axis) const {
  const int own = coordinate(rank, axis);
  const int i = index(axis);
  std::vector<int> ranks;
  for (int c = 0; c < axes_[static_cast<size_t>(i)].size; ++c) ranks.push_back(rank + (c - own) * stride(i));
  return ranks;
}

}  // namespace polyreme
