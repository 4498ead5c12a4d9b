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
};

// The parameters of a model in order of declaration. Layers declare theirs while they are built.
class ParamRegistry {
 public:
  // Throws InvalidArgument for a name that exists.
  ParamUse declare(ParamSpec spec);
  // Another use of an existing parameter. Throws InvalidArgument if it is unknown.
  ParamUse declare_use(const std::string& name);

  const std::vector<ParamSpec>& specs() const { return specs_; }
  int num_uses(int param) const { return num_uses_[static_cast<size_t>(param)]; }
  // Throws InvalidArgument for an unknown name.
  int index(const std::string& name) const;

 private:
  int find(const std::string& name) const;  // -1 if unknown

  std::vector<ParamSpec> specs_;
  std::vector<int> num_uses_;
};

}  // namespace polyreme
