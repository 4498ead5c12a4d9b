#pragma once

#include <vector>

#include "nn/param_registry.h"
#include "optim/optimizer.h"

namespace polyreme {

struct ZeroOptions {
  // ZeRO (Rajbhandari et al. 2020): what is divided over the ranks of dp. 1: optimizer state; 2: gradients
  // too; 3: weights too.
  int stage = 0;
  // Ranks that divide it among them, a power of two that divides dp, or dp; 0: all of dp. Below dp each such
  // group of neighbouring ranks holds everything once.
  int64_t shard_size = 0;
  // A gradient bucket is reduced once it has this many bytes. Changes no bit, nor do the options below.
  int64_t bucket_bytes = int64_t{25} << 20;
  bool overlap = true;  // buckets are reduced while the backward pass goes on
  // Every micro-batch of all lanes is reduced at once and the results are added in order, instead of a lane's
  // micro-batches first. Other bits, and the micro-batch size changes them; least memory in stages 2 and 3.
  bool round_first = false;
  // What the gradient of a lane is rounded to and, where a rank has one lane, travels in (see LaneSum): other
  // bits, equal on every layout.
  DType wire = DType::kF32;
  int64_t prefetch = 1;       // stage 3: layers whose weights are gathered ahead of use
  int64_t persist_below = 0;  // stage 3: parameters of fewer elements stay whole on every rank
  // Stage 3: what was gathered stays until the step's last use of any weight. A pipeline would otherwise
  // gather its weights anew for every micro-batch, forwards and backwards.
  bool gather_for_step = false;
};

// The units of a model and when each is needed, which follows from the layers that use its parameters.
struct UnitPlan {
  ShardMap map;
  std::vector<std::vector<int>> used_by;         // by layer: the units whose weights it reads, ascending
  std::vector<std::vector<int>> accumulated_by;  // by layer: the units that its first uses add gradients to
  // By layer: the units whose gradients are complete when its backward has run, in order of reduction.
  std::vector<std::vector<int>> completed_by;
  std::vector<bool> stays_whole;     // by unit: every rank holds its weights between uses
  std::vector<bool> is_cut;          // by unit: its parameters are parts of what tp cuts
  std::vector<bool> is_frozen;       // by unit: its parameters do not learn, and have no gradient
  size_t first_trainable_layer = 0;  // backward ends with it
};

// Parameters of different `parts` do not share a unit (what tp cuts and what it does not, among them, where
// it has several lanes); empty: one part.
UnitPlan make_unit_plan(const ParamRegistry& registry, size_t num_layers, const ZeroOptions& options,
                        int64_t num_shards, const OptimizerOptions& optimizer,
                        std::span<const int> parts = {});

}  // namespace polyreme
