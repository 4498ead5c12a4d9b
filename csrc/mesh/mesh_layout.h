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

// Which rank takes which position of a mesh.
enum class Topology : uint8_t {
  kLaunch,  // position = rank, as the launcher numbered them
  kHost     // by (host in order of first appearance, rank): a host's ranks have neighbouring positions
};

// The index maths of a mesh, pure. Axes are given outermost first. A rank with coordinates c_0 ... c_n
// on axes of sizes s_0 ... s_n has the position
//
//   (... (c_0 * s_1 + c_1) * s_2 + ...) * s_n + c_n
//
// so that neighbouring positions differ in the last axis; the topology tells ranks and positions apart.
// The members of a group are in order of position, in whatever order its axes are named: of a group
// along a and b, a further out, the member at (c_a, c_b) is number c_a * s_b + c_b.
class MeshLayout {
 public:
  // hosts[r] is where rank r runs. Throws InvalidArgument, showing the product, unless the sizes
  // multiply to the number of ranks.
  MeshLayout(std::vector<Axis> axes, std::vector<std::string> hosts, Topology topology);
  // All ranks on one host.
  MeshLayout(std::vector<Axis> axes, int world_size);

  const std::vector<Axis>& axes() const { return axes_; }
  int world_size() const { return static_cast<int>(hosts_.size()); }
  // Throws InvalidArgument for an unknown axis, listing those there are.
  int size(const std::string& axis) const;
  int position(int rank) const;
  int rank_at(int position) const;
  // The place of `rank` on `axis`.
  int coordinate(int rank, const std::string& axis) const;
  // The named axes in order of the mesh, without those of size 1. Throws InvalidArgument for an
  // unknown axis and for one that is named twice.
  std::vector<std::string> wide_axes(const std::vector<std::string>& names) const;
  // The ranks that differ from `rank` in no other than the named axes, `rank` included.
  std::vector<int> group(int rank, const std::vector<std::string>& names) const;
  // The first group of `axis` that is not on one host, as "ranks 0 (host a), 1 (host b)"; else empty.
  std::string host_span(const std::string& axis) const;
  // "pp=2 x tp=4", without the axes of size 1; "one rank". Equal for equal layouts of one world.
  std::string description() const;

 private:
  int index(const std::string& axis) const;
  int stride(int axis_index) const;
  // The positions along `axis` through `position`, which is 0 on it.
  std::vector<int> line(int position, int axis_index) const;

  std::vector<Axis> axes_;
  std::vector<std::string> hosts_;  // by rank
  Topology topology_;
  std::vector<int> ranks_;      // by position
  std::vector<int> positions_;  // by rank
};

}  // namespace polyreme
