#pragma once

#include <vector>

#include "engine/layer_steps.h"
#include "nn/gpt.h"
#include "optim/optimizer.h"
#include "pipeline/schedule/schedule.h"

namespace polyreme {

// The part of a model that a rank of the pipeline holds: the layers of its chunks and their parameters.
struct StagePart {
  std::vector<LayerRange> chunks;  // of the whole pipeline, by chunk
  std::vector<int> stage_of;       // the stage that holds each parameter of the model
  ParamRegistry registry;          // this rank's parameters, in the model's order
  std::vector<int> local;  // the index in `registry` of each parameter of the model; -1: on another stage
  std::vector<int> whole;  // the index in the model of each parameter of `registry`
};

// All of it.
StagePart whole_model(const Model& model);
// `split`: blocks of the model for each chunk; empty: by cost. Throws InvalidArgument, with the numbers that
// work, for a model of fewer parts than chunks and a split that does not fit it; NotAvailable for a parameter
// that two chunks use.
StagePart make_stage_part(const Model& model, const pipeline::Schedule& schedule, int stage,
                          const std::vector<int>& split);

// The options for the part's parameters out of those for the model's.
OptimizerOptions options_of(const StagePart& part, const OptimizerOptions& options);

}  // namespace polyreme
