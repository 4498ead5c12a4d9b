#include "nn/param_registry.h"

#include "base/error.h"

namespace polyreme {

int ParamRegistry::find(const std::string& name) const {
  for (size_t i = 0; i < specs_.size(); ++i)
    if (specs_[i].name == name) return static_cast<int>(i);
  return -1;
}

int ParamRegistry::index(const std::string& name) const {
  const int i = find(name);
  require(i >= 0, "no parameter is named '", name, "'; the model has ", specs_.size(), ", from '",
          specs_.empty() ? "" : specs_.front().name, "' to '", specs_.empty() ? "" : specs_.back().name, "'");
  return i;
}

ParamUse ParamRegistry::declare(ParamSpec spec) {
  require(find(spec.name) < 0, "the parameter '", spec.name, "' is declared twice");
  if (spec.padded_shape.size() == 0) spec.padded_shape = spec.shape;
  specs_.push_back(std::move(spec));
  use_layers_.push_back({layer_});
  return {static_cast<int>(specs_.size()) - 1, 0};
}

ParamUse ParamRegistry::declare_use(const std::string& name) {
  const int param = index(name);
  if (specs_[static_cast<size_t>(param)].tie_group.empty())
    specs_[static_cast<size_t>(param)].tie_group = name;
  std::vector<int>& layers = use_layers_[static_cast<size_t>(param)];
  layers.push_back(layer_);
  return {param, static_cast<int>(layers.size()) - 1};
}

ParamRegistry ParamRegistry::part(const std::vector<bool>& held, const std::vector<size_t>& chunk_of,
                                  const LaneRange& lanes, std::vector<int>* local) const {
  ParamRegistry result;
  local->assign(specs_.size(), -1);
  for (size_t param = 0; param < specs_.size(); ++param) {
    const auto first = static_cast<size_t>(use_layers_[param].front());
    if (!held[first]) continue;
    std::vector<int> layers;
    for (const int layer : use_layers_[param])
      if (chunk_of[static_cast<size_t>(layer)] == chunk_of[first]) layers.push_back(layer);
    (*local)[param] = static_cast<int>(result.specs_.size());
    ParamSpec spec = specs_[param];
    const bool is_parted = lanes.lanes > 1 && is_cut(spec, "tp");
    if (is_parted) spec.shape = spec.padded_shape = local_shape(spec, "tp", lanes.lanes);
    for (int64_t lane = 0; lane < (is_parted ? lanes.count : 1); ++lane) {
      result.specs_.push_back(spec);
      result.use_layers_.push_back(layers);
    }
  }
  return result;
}

}  // namespace polyreme
