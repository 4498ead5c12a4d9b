#pragma once

#include <string>
#include <vector>

#include "tensor/param_spec.h"

namespace polyreme {

// One place where a layer uses a parameter. A tied parameter has several uses, each with a
// gradient accumulator of its own on every layout; they are added in ascending order of `use`.
struct ParamUse {
  int param = -1;
  int use = 0;
  // Of this rank's lanes of tensor parallelism: whose part of a parameter that is cut, whose tokens' gradient
  // of one that is not.
  int lane = 0;
};

// The parameters of a model in order of declaration. Layers declare theirs while they are built.
class ParamRegistry {
 public:
  // What is declared from now on belongs to the layer at `index` of the model; 0 before the first call.
  void begin_layer(size_t index) { layer_ = static_cast<int>(index); }
  // Throws InvalidArgument for a name that exists.
  ParamUse declare(ParamSpec spec);
  // Another use of an existing parameter. Throws InvalidArgument if it is unknown.
  ParamUse declare_use(const std::string& name);

  const std::vector<ParamSpec>& specs() const { return specs_; }
  int num_uses(int param) const { return static_cast<int>(layers_of(param).size()); }
  // The layer of each use: of the model, not the parts of which it is made. The first one declares it.
  const std::vector<int>& layers_of(int param) const { return use_layers_[static_cast<size_t>(param)]; }
  // Throws InvalidArgument for an unknown name.
  int index(const std::string& name) const;
  // The parameters whose first use is in a layer with held[layer], in order, with their uses in layers of the
  // same chunk_of[layer]. Of one that tp cuts there are `lanes.count` parts, each of the shape of its part.
  // local[i] is set to the index there of (the first part of) parameter i, or -1.
  ParamRegistry part(const std::vector<bool>& held, const std::vector<size_t>& chunk_of,
                     const LaneRange& lanes, std::vector<int>* local) const;

 private:
  int find(const std::string& name) const;  // -1 if unknown

  std::vector<ParamSpec> specs_;
  std::vector<std::vector<int>> use_layers_;
  int layer_ = 0;
};

}  // namespace polyreme
