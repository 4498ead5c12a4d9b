#include "engine/memory_terms.h"

#include <algorithm>
#include <bit>
#include <deque>

#include "engine/grad_store.h"

namespace polyreme {
namespace {

constexpr int64_t kElementBytes = 4;  // of gradients, masters and moments

size_t at(int i) { return static_cast<size_t>(i); }

int64_t gradient_bytes(const UnitPlan& plan, int unit) {
  return kElementBytes * plan.map.unit_elements(unit);
}

int64_t weight_bytes(const UnitPlan& plan, int unit) {
  return static_cast<int64_t>(dtype_size(plan.map.dtype_of(unit))) * plan.map.unit_elements(unit);
}

// The most that is gathered at once: layers and those ahead of them, as WeightStore walks over a micro-batch;
// or all of them.
int64_t gather_window(const UnitPlan& plan, const ZeroOptions& options) {
  int64_t all = 0;
  for (int unit = 0; unit < plan.map.num_units(); ++unit)
    if (!plan.stays_whole[at(unit)]) all += weight_bytes(plan, unit);
  if (options.gather_for_step) return all;
  std::vector<size_t> visits;
  for (size_t layer = 0; layer < plan.used_by.size(); ++layer) visits.push_back(layer);
  visits.insert(visits.end(), visits.rbegin(), visits.rend());
  int64_t most = 0;
  for (size_t first = 0; first < visits.size(); ++first) {
    std::vector<bool> is_gathered(plan.stays_whole.size());
    int64_t ahead = 0, bytes = 0;
    for (size_t visit = first; visit < visits.size() && ahead <= options.prefetch; ++visit) {
      bool needs_any = false;
      for (const int unit : plan.used_by[visits[visit]]) {
        if (plan.stays_whole[at(unit)]) continue;
        needs_any = true;
        if (!is_gathered[at(unit)]) bytes += weight_bytes(plan, unit);
        is_gathered[at(unit)] = true;
      }
      if (needs_any && visit > first) ++ahead;
    }
    most = std::max(most, bytes);
  }
  return most;
}

// The most that gradients take until they are reduced, if every unit goes as soon as it is complete.
int64_t bucket_window(const UnitPlan& plan) {
  std::vector<bool> is_begun(plan.stays_whole.size());
  std::deque<int> in_flight;
  int64_t begun = 0, flying = 0, most = 0;
  for (size_t layer = plan.used_by.size(); layer-- > 0;) {
    for (const int unit : plan.accumulated_by[layer]) {
      if (is_begun[at(unit)]) continue;
      for (; in_flight.size() > GradStore::kMaxInFlight; in_flight.pop_front())
        flying -= gradient_bytes(plan, in_flight.front());
      is_begun[at(unit)] = true;
      begun += gradient_bytes(plan, unit);
      most = std::max(most, begun + flying);
    }
    for (const int unit : plan.completed_by[layer]) {
      begun -= gradient_bytes(plan, unit);
      flying += gradient_bytes(plan, unit);
      in_flight.push_back(unit);
    }
  }
  return most;
}

}  // namespace

std::vector<MemoryTerm> memory_terms(const UnitPlan& plan, const ParamRegistry& registry,
                                     std::span<const OptimizerState> state, const MemoryQuestion& question) {
  const ShardMap& map = plan.map;
  const bool divides_gradients = question.zero.stage >= 2 && map.num_shards() > 1;
  int64_t weights = 0, masters = 0, whole = 0, uncut = 0, tied = 0, moments = 0;
  for (int unit = 0; unit < map.num_units(); ++unit) {
    weights += weight_bytes(plan, unit) / (plan.stays_whole[at(unit)] ? 1 : map.num_shards());
    if (map.dtype_of(unit) != DType::kF32)
      masters += kElementBytes * map.unit_elements(unit) / map.num_shards();
    if (plan.is_frozen[at(unit)]) continue;
    whole += gradient_bytes(plan, unit);
    if (!plan.is_cut[at(unit)]) uncut += gradient_bytes(plan, unit);
  }
  for (int param = 0; param < map.num_params(); ++param) {
    if (plan.is_frozen[at(map.unit_of(param))]) continue;
    tied += kElementBytes * map.shape_of(param).numel() * (registry.num_uses(param) - 1);
  }
  int64_t host_moments = 0;
  std::vector<int64_t> visiting(at(map.num_units()));
  for (const OptimizerState& kind : state)
    for (size_t unit = 0; unit < kind.slices.size(); ++unit) {
      if (!kind.slices[unit].defined()) continue;
      const int64_t bytes = kind.slices[unit].size_bytes();
      (kind.on_host ? host_moments : moments) += bytes;
      if (kind.on_host) visiting[unit] += bytes;
    }
  // Rounds are added up in a slice of their own.
  const int64_t slices = divides_gradients || question.zero.round_first ? whole / map.num_shards() : 0;
  const int64_t partial_sums = std::bit_width(static_cast<uint64_t>(question.local_lanes)) - 1;
  int64_t rounded = 0, largest = 0;
  for (int unit = 0; unit < map.num_units(); ++unit) {
    if (plan.is_frozen[at(unit)]) continue;
    const int64_t bytes = map.unit_elements(unit) * static_cast<int64_t>(dtype_size(question.zero.wire));
    rounded += bytes;
    largest = std::max(largest, bytes);
  }
  const bool rounds = question.zero.wire != DType::kF32;
  const bool sends_rounded = rounds && question.local_lanes == 1 && question.ranks > 1;
  const bool streams = question.local_lanes == 1 && question.micro_batches == 1;
  return {{"weights", weights, true},
          {"masters", masters, true},
          {"gradients", slices + (divides_gradients ? 0 : whole), true},
          {"tied gradients", tied, !divides_gradients},
          {"lane buffers", partial_sums * whole + (question.tp_lanes - 1) * uncut, !divides_gradients},
          {"moments", moments, true},
          {"moments", host_moments, true, /*on_host=*/true},
          {"visiting moments", visiting.empty() ? 0 : std::ranges::max(visiting), false},
          {"gather window", gather_window(plan, question.zero), false},
          {"buckets", divides_gradients ? (streams ? bucket_window(plan) : whole) : 0, false},
          {"rounded gradients", sends_rounded ? rounded + largest : (rounds ? largest : 0), false}};
}

}  // namespace polyreme
