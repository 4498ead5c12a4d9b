#include "tensor/param_spec.h"

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

}  // namespace polyreme
