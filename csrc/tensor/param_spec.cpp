#include "tensor/param_spec.h"

#include <algorithm>

#include "base/error.h"

namespace polyreme {

Shape local_shape(const ParamSpec& spec, const std::string& axis, int64_t axis_size) {
  Shape shape = spec.padded_shape;
  for (const Cut& cut : spec.cuts) {
    if (cut.axis != axis) continue;
    const int64_t parts = axis_size / cut.replication;
    require(cut.replication * parts == axis_size && shape[cut.dim] % (cut.blocks * parts) == 0, "parameter '",
            spec.name, "': dim ", cut.dim, " of ", spec.padded_shape.to_string(), " has ", cut.blocks,
            " block(s), which do not divide over ", axis, "=", axis_size, " with replication ",
            cut.replication, "; choose a size of ", axis, " that divides ", shape[cut.dim] / cut.blocks);
    shape[cut.dim] /= parts;
  }
  return shape;
}

bool is_cut(const ParamSpec& spec, const std::string& axis) {
  return std::any_of(spec.cuts.begin(), spec.cuts.end(), [&](const Cut& cut) { return cut.axis == axis; });
}

PartRanges part_ranges(const ParamSpec& spec, const std::string& axis, int64_t lanes, int64_t lane) {
  const auto cut =
      std::find_if(spec.cuts.begin(), spec.cuts.end(), [&](const Cut& c) { return c.axis == axis; });
  if (cut == spec.cuts.end() || lanes == 1) return {};
  require(cut->replication == 1, "parameter '", spec.name, "': a replicated cut has no ranges of its own");
  const int64_t block = spec.padded_shape[cut->dim] / cut->blocks, part = block / lanes;
  PartRanges result{cut->dim, {}};
  for (int64_t b = 0; b < cut->blocks; ++b) {
    const int64_t begin = b * block + lane * part, extent = spec.shape[cut->dim];
    result.ranges.emplace_back(std::min(begin, extent), std::min(begin + part, extent));
  }
  return result;
}

int64_t part_elements(const ParamSpec& spec, const PartRanges& part) {
  if (part.ranges.empty()) return spec.shape.numel();
  int64_t extent = 0;
  for (const auto& [begin, end] : part.ranges) extent += end - begin;
  return spec.shape.numel() / spec.shape[part.dim] * extent;
}

std::vector<PartRun> part_runs(const ParamSpec& spec, const std::string& axis, int64_t lanes, int64_t lane) {
  const PartRanges part = part_ranges(spec, axis, lanes, lane);
  if (part.ranges.empty()) return {{0, 0, spec.shape.numel()}};
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < part.dim; ++i) outer *= spec.shape[i];
  for (int i = part.dim + 1; i < spec.shape.size(); ++i) inner *= spec.shape[i];
  // A part with padding has it at the end of its last range, and of one outermost dim.
  const int64_t stride = spec.padded_shape[part.dim] / lanes * inner;
  std::vector<PartRun> runs;
  for (int64_t o = 0; o < outer; ++o) {
    int64_t at = o * stride;
    for (const auto& [begin, end] : part.ranges) {
      const int64_t size = (end - begin) * inner;
      if (size > 0) runs.push_back({at, (o * spec.shape[part.dim] + begin) * inner, size});
      at += size;
    }
  }
  return runs;
}

}  // namespace polyreme
