#pragma once

#include <vector>

#include "nn/gpt.h"
#include "optim/optimizer.h"
#include "pipeline/schedule/schedule.h"

namespace polyreme {

// Layers [begin, end) of a model.
struct LayerRange {
  size_t begin = 0;
  size_t end = 0;
};

// A parameter that two chunks use, once each: that of its first use owns it.
struct SharedParam {
  int param = -1;  // of the model
  int owner = 0;   // the stage of the owning chunk
  int user = 0;    // that of the other one, maybe the same
  int lane = 0;    // of this rank's along tp, whose part it is
};

// The part of a model that a rank of the pipeline holds: the layers of its chunks and their parameters.
struct StagePart {
  std::vector<LayerRange> chunks;  // of the whole pipeline, by chunk
  std::vector<int> stage_of;       // the stage that holds each parameter of the model
  ParamRegistry registry;  // this rank's parameters, in the model's order; shared ones at the owner alone
  std::vector<SharedParam> shared;
  // The index in `registry` of (the first lane's part of) each parameter of the model; -1: on another stage.
  std::vector<int> local;
  std::vector<int> whole;        // the index in the model of each parameter of `registry`
  LaneRange lanes;               // this rank's along tp
  std::vector<int> num_parts;    // by parameter of the model: a part for each of these lanes, or 1
  std::vector<int64_t> lane_of;  // by parameter of `registry`: the lane of the axis whose part it is

  int local_of(const ParamUse& use) const {
    const auto param = static_cast<size_t>(use.param);
    return local[param] + (num_parts[param] > 1 ? use.lane : 0);
  }
};

// All of it.
StagePart whole_model(const Model& model, const LaneRange& lanes = {});
// `split`: blocks of the model for each chunk; empty: by cost. Throws InvalidArgument, with the numbers that
// work, for a model of fewer parts than chunks and a split that does not fit it; NotAvailable for a parameter
// that two chunks use three times or more.
StagePart make_stage_part(const Model& model, const pipeline::Schedule& schedule, int stage,
                          const std::vector<int>& split, const LaneRange& lanes = {});

// The options for the part's parameters out of those for the model's.
OptimizerOptions options_of(const StagePart& part, const OptimizerOptions& options);

}  // namespace polyreme
