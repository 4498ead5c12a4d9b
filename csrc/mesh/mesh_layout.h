#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace polyreme {

// One named axis of a mesh.
struct Axis {
  std::string name;
  int size = 1;
};

// The index maths of a mesh, pure: ranks are numbered with the last axis innermost, so with axes
// {pp, dp, tp} neighbouring ranks differ in tp.
class MeshLayout {
 public:
  // Throws InvalidArgument, showing the product, unless the sizes multiply to world_size.
  MeshLayout(std::vector<Axis> axes, int world_size);

  const std::vector<Axis>& axes() const { return axes_; }
  int world_size() const { return world_size_; }
  // Throws InvalidArgument for an unknown axis, listing those there are.
  int size(const std::string& axis) const;
  // The position of `rank` on `axis`.
  int coordinate(int rank, const std::string& axis) const;
  // The ranks that differ from `rank` in `axis` alone, `rank` included, in order of the axis.
  std::vector<int> group(int rank, const std::string& axis) const;

 private:
  int index(const std::string& axis) const;
  int stride(int axis_index) const;

  std::vector<Axis> axes_;
  int world_size_;
};

}  // namespace polyreme
