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

std::vector<PartRun> part_runs(const ParamSpec& spec, const std::string& axis, int64_t lanes, int64_t lane) {
  const auto found =
      std::find_if(spec.cuts.begin(), spec.cuts.end(), [&](const Cut& cut) { return cut.axis == axis; });
  if (found == spec.cuts.end() || lanes == 1) return {{0, 0, spec.shape.numel()}};
  require(found->replication == 1, "parameter '", spec.name, "': a replicated cut has no runs of its own");
  const int dim = found->dim;
  const int64_t block = spec.padded_shape[dim] / found->blocks, part = block / lanes, extent = spec.shape[dim];
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < dim; ++i) outer *= spec.shape[i];
  for (int i = dim + 1; i < spec.shape.size(); ++i) inner *= spec.shape[i];
  std::vector<PartRun> runs;
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t b = 0; b < found->blocks; ++b) {
      const int64_t begin = b * block + lane * part, end = std::min(begin + part, extent);
      if (begin < end)
        runs.push_back({(o * found->blocks + b) * part * inner, (o * extent + begin) * inner,
                        (end - begin) * inner});
    }
  }
  return runs;
}

}  // namespace polyreme
