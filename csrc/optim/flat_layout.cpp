#include "optim/flat_layout.h"

#include "base/math.h"

namespace polyreme {

FlatLayout::FlatLayout(std::span<const ParamSpec> specs, int64_t num_shards) : num_shards_(num_shards) {
  require(num_shards >= 1, "a flat buffer cannot be cut into ", num_shards, " shards");
  for (const ParamSpec& spec : specs) {
    slots_.push_back({num_elements_, spec.padded_shape});
    num_parameters_ += spec.padded_shape.numel();
    num_elements_ = round_up(num_elements_ + spec.padded_shape.numel(), kAlignment);
  }
  num_elements_ = round_up(num_elements_, num_shards * kAlignment);
}

FlatRange FlatLayout::shard(int64_t index) const {
  const int64_t size = num_elements_ / num_shards_;
  return {index * size, (index + 1) * size};
}

Tensor FlatLayout::view(const Tensor& flat, size_t param) const {
  const Slot& slot = slots_[param];
  return flat.slice(0, slot.offset, slot.offset + slot.shape.numel()).view(slot.shape);
}

}  // namespace polyreme
