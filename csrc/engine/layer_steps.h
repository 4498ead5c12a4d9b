#pragma once

#include <vector>

#include "engine/param_store.h"
#include "nn/gpt.h"

namespace polyreme {

// The steps of which a pass over a model is made, for neighbouring layers: each is one visit of the plan that
// WeightStore was given.

// The forward of a micro-batch from the range's input `x`. saved[i] belongs to layer i of the model; null if
// no backward follows.
Tensor run_forward(const Model& model, const LayerRange& layers, const Context& context, WeightStore& weights,
                   Tensor x, std::vector<Saved>* saved);
// The backward of a micro-batch from the gradient of the range's output; lets go of what was saved.
// `completes_lane`: it is the last one of its lane.
Tensor run_backward(const Model& model, const LayerRange& layers, const Context& context, ParamStore& params,
                    Tensor grad, std::vector<Saved>& saved, bool completes_lane);
// The same in two halves, for a pipeline that runs them apart: `saved` is kept for the second.
Tensor run_backward_input(const Model& model, const LayerRange& layers, const Context& context,
                          WeightStore& weights, Tensor grad, std::vector<Saved>& saved);
void run_backward_weight(const Model& model, const LayerRange& layers, const Context& context,
                         GradStore& grads, std::vector<Saved>& saved, bool completes_lane);
// A rank without samples takes part in the gathers of a forward.
void skip_forward(const LayerRange& layers, WeightStore& weights);

// `x` in fp32: itself, or a widened copy.
Tensor wide(Stream& stream, const Tensor& x);

}  // namespace polyreme
