#pragma once

#include <memory>
#include <string>

#include "nn/layer.h"

namespace polyreme {

// Which features of a place the lanes of tensor parallelism cut. kWhole: the place is not inside of a branch,
// but between regions where activations are cut along the sequence.
enum class PlaceCut : uint8_t { kWhole, kIn, kOut, kBoth };

// Where a model has a layer: [rows, in] to [rows, out], both stored as `dtype`.
struct Place {
  std::string name;  // "h.3" for a block, "h.3.mlp.gelu" for a part of it, "ln_f"
  int64_t in = 0;    // of all lanes
  int64_t out = 0;
  DType dtype = DType::kF32;
  TensorLanes lanes = {};
  PlaceCut cut = PlaceCut::kWhole;

  // Inside of a branch the layer computes one lane. What is then a sum over lanes is fp32, as in
  // LinearOptions.
  bool is_in_branch() const { return lanes.lanes > 1 && cut != PlaceCut::kWhole; }
};

// Layers of somebody else that take the place of native ones.
class LayerReplacer {
 public:
  virtual ~LayerReplacer() = default;
  // The layer for this place, with its parameters declared; null: the native one stays. A block is asked for
  // before its parts.
  virtual LayerPtr make(ParamRegistry& registry, const Place& place) const = 0;
  // Equal texts, equal layers.
  virtual std::string description() const = 0;
};

// Of a config; null: nothing is replaced.
using Replacer = std::shared_ptr<const LayerReplacer>;

inline LayerPtr replaced(const Replacer& replacer, ParamRegistry& registry, const Place& place) {
  return replacer ? replacer->make(registry, place) : nullptr;
}

}  // namespace polyreme
