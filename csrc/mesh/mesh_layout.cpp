#include "mesh/mesh_layout.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "base/error.h"

namespace polyreme {
namespace {

void check_axes(const std::vector<Axis>& axes, int world_size) {
  int64_t product = 1;
  std::string text;
  for (size_t i = 0; i < axes.size(); ++i) {
    const Axis& axis = axes[i];
    require(axis.size >= 1, "mesh axis ", axis.name, "=", axis.size, "; expected at least 1");
    for (size_t j = 0; j < i; ++j)
      require(axes[j].name != axis.name, "mesh axis ", axis.name, " is given twice");
    if (__builtin_mul_overflow(product, axis.size, &product)) product = std::numeric_limits<int64_t>::max();
    text += concat(i == 0 ? "" : " x ", axis.name, "=", axis.size);
  }
  require(product == world_size, "the mesh has ", text, " = ", product, " ranks, but the world has ",
          world_size, "; start ", product, " ranks or change an axis");
}

// Ranks in order of (first appearance of their host, rank).
std::vector<int> ranks_by_host(const std::vector<std::string>& hosts) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (size_t r = 0; r < hosts.size(); ++r) ranks_of[hosts[r]].push_back(static_cast<int>(r));
  std::vector<int> ranks;
  for (size_t r = 0; r < hosts.size(); ++r)
    if (const std::vector<int>& own = ranks_of[hosts[r]]; own.front() == static_cast<int>(r))
      ranks.insert(ranks.end(), own.begin(), own.end());
  return ranks;
}

}  // namespace

MeshLayout::MeshLayout(std::vector<Axis> axes, std::vector<std::string> hosts, Topology topology)
    : axes_(std::move(axes)), hosts_(std::move(hosts)), topology_(topology), positions_(hosts_.size()) {
  check_axes(axes_, world_size());
  ranks_.resize(hosts_.size());
  std::iota(ranks_.begin(), ranks_.end(), 0);
  if (topology_ == Topology::kHost) ranks_ = ranks_by_host(hosts_);
  for (int p = 0; p < world_size(); ++p) positions_[static_cast<size_t>(rank_at(p))] = p;
}

MeshLayout::MeshLayout(std::vector<Axis> axes, int world_size)
    : MeshLayout(std::move(axes), std::vector<std::string>(static_cast<size_t>(std::max(world_size, 0))),
                 Topology::kLaunch) {}

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

int MeshLayout::position(int rank) const {
  require(rank >= 0 && rank < world_size(), "rank ", rank, " is not in a world of ", world_size());
  return positions_[static_cast<size_t>(rank)];
}

int MeshLayout::rank_at(int position) const {
  require(position >= 0 && position < world_size(), "position ", position, " is not in a mesh of ",
          world_size());
  return ranks_[static_cast<size_t>(position)];
}

int MeshLayout::coordinate(int rank, const std::string& axis) const {
  return position(rank) / stride(index(axis)) % size(axis);
}

std::vector<std::string> MeshLayout::wide_axes(const std::vector<std::string>& names) const {
  for (size_t i = 0; i < names.size(); ++i) {
    index(names[i]);  // throws for an unknown axis
    for (size_t j = 0; j < i; ++j) require(names[j] != names[i], "mesh axis ", names[i], " is named twice");
  }
  std::vector<std::string> wide;
  for (const Axis& axis : axes_)
    if (axis.size > 1 && std::find(names.begin(), names.end(), axis.name) != names.end())
      wide.push_back(axis.name);
  return wide;
}

std::vector<int> MeshLayout::line(int position, int axis_index) const {
  std::vector<int> positions;
  for (int c = 0; c < axes_[static_cast<size_t>(axis_index)].size; ++c)
    positions.push_back(position + c * stride(axis_index));
  return positions;
}

std::vector<int> MeshLayout::group(int rank, const std::vector<std::string>& names) const {
  std::vector<int> members{position(rank)};
  const std::vector<std::string> wide = wide_axes(names);
  for (const std::string& name : wide) members[0] -= coordinate(rank, name) * stride(index(name));
  for (const std::string& name : wide) {
    std::vector<int> wider;
    for (const int member : members) {
      const std::vector<int> along = line(member, index(name));
      wider.insert(wider.end(), along.begin(), along.end());
    }
    members = std::move(wider);
  }
  for (int& member : members) member = rank_at(member);
  return members;
}

std::string MeshLayout::host_span(const std::string& axis) const {
  const int i = index(axis);
  for (int position = 0; position < world_size(); ++position) {
    if (position / stride(i) % size(axis) != 0) continue;
    std::string text;
    bool spans = false;
    for (const int member : line(position, i)) {
      const int rank = rank_at(member);
      const std::string& host = hosts_[static_cast<size_t>(rank)];
      spans = spans || host != hosts_[static_cast<size_t>(rank_at(position))];
      text += concat(text.empty() ? "ranks " : ", ", rank, " (host ", host, ")");
    }
    if (spans) return text;
  }
  return {};
}

std::string MeshLayout::description() const {
  std::string text;
  for (const Axis& axis : axes_)
    if (axis.size > 1) text += concat(text.empty() ? "" : " x ", axis.name, "=", axis.size);
  if (text.empty()) return "one rank";
  return text + (topology_ == Topology::kHost ? " by host" : "");
}

}  // namespace polyreme
