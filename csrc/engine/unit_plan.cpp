#include "engine/unit_plan.h"

#include <algorithm>

namespace polyreme {
namespace {

void add_once(std::vector<int>& units, int unit) {
  if (std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
}

ShardMap make_map(const ParamRegistry& registry, const ZeroOptions& options, int64_t num_shards,
                  std::span<const int> group_of_param) {
  std::vector<int> blocks, groups;
  for (int param = 0; param < static_cast<int>(registry.specs().size()); ++param) {
    const ParamSpec& spec = registry.specs()[static_cast<size_t>(param)];
    const bool persists = options.stage == 3 && spec.padded_shape.numel() < options.persist_below;
    const int group = group_of_param.empty() ? 0 : group_of_param[static_cast<size_t>(param)];
    groups.push_back(2 * group + (persists ? 1 : 0));
    // What is gathered for a layer should not bring the weights of another.
    blocks.push_back(options.stage == 3 && !persists ? registry.layers_of(param).front() : 0);
  }
  const UnitOptions units{
      .bucket_bytes = options.bucket_bytes, .end_with_block = true, .group_of_param = groups};
  return {registry.specs(), make_units(registry.specs(), blocks, units), num_shards};
}

}  // namespace

UnitPlan make_unit_plan(const ParamRegistry& registry, size_t num_layers, const ZeroOptions& options,
                        int64_t num_shards, const OptimizerOptions& optimizer, std::span<const int> parts) {
  std::vector<int> group_of_param = state_groups(registry.specs(), optimizer);
  group_of_param.resize(registry.specs().size(), 0);
  const int num_parts = parts.empty() ? 1 : 1 + *std::max_element(parts.begin(), parts.end());
  for (size_t param = 0; param < parts.size(); ++param)
    group_of_param[param] = group_of_param[param] * num_parts + parts[param];
  UnitPlan plan{.map = make_map(registry, options, num_shards, group_of_param)};
  const ShardMap& map = plan.map;
  plan.used_by.resize(num_layers);
  plan.accumulated_by.resize(num_layers);
  plan.completed_by.resize(num_layers);
  // Units are reduced in the order in which backward completes them: the later ones of a layer first.
  plan.is_frozen.resize(static_cast<size_t>(map.num_units()));
  plan.first_trainable_layer = num_layers;
  for (int unit = map.num_units() - 1; unit >= 0; --unit) {
    const auto first = static_cast<size_t>(map.params_of(unit).front());
    const bool is_frozen = !optimizer.trainable.empty() && optimizer.trainable[first] == 0;
    plan.is_frozen[static_cast<size_t>(unit)] = is_frozen;
    int lowest = static_cast<int>(num_layers) - 1;
    for (const int param : map.params_of(unit)) {
      const std::vector<int>& layers = registry.layers_of(param);
      for (const int layer : layers) {
        add_once(plan.used_by[static_cast<size_t>(layer)], unit);
        lowest = std::min(lowest, layer);
      }
      if (!is_frozen) add_once(plan.accumulated_by[static_cast<size_t>(layers.front())], unit);
    }
    if (is_frozen) continue;
    plan.completed_by[static_cast<size_t>(lowest)].push_back(unit);
    plan.first_trainable_layer = std::min(plan.first_trainable_layer, static_cast<size_t>(lowest));
  }
  for (int unit = 0; unit < map.num_units(); ++unit)
    plan.is_cut.push_back(is_cut(registry.specs()[static_cast<size_t>(map.params_of(unit).front())], "tp"));
  for (std::vector<int>& units : plan.used_by) std::sort(units.begin(), units.end());
  for (int unit = 0; unit < map.num_units(); ++unit) {
    const int param = map.params_of(unit).front();
    const bool is_small = map.shape_of(param).numel() < options.persist_below;
    plan.stays_whole.push_back(options.stage < 3 || num_shards == 1 || is_small);
  }
  return plan;
}

}  // namespace polyreme
