#include "optim/flat_layout.h"

#include "base/math.h"

namespace polyreme {

FlatLayout::FlatLayout(std::span<const ParamSpec> specs) {
  for (const ParamSpec& spec : specs) {
    slots_.push_back({num_elements_, spec.padded_shape});
    num_parameters_ += spec.padded_shape.numel();
    num_elements_ = round_up(num_elements_ + spec.padded_shape.numel(), kAlignment);
  }
}

Tensor FlatLayout::view(const Tensor& flat, size_t param) const {
  const Slot& slot = slots_[param];
  return flat.slice(0, slot.offset, slot.offset + slot.shape.numel()).view(slot.shape);
}

}  // namespace polyreme
