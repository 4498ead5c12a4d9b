#include "engine/layer_steps.h"

namespace polyreme {

Tensor run_forward(const Model& model, const LayerRange& layers, const Context& context, WeightStore& weights,
                   Tensor x, std::vector<Saved>* saved) {
  for (size_t i = layers.begin; i < layers.end; ++i) {
    weights.arrive();
    x = model.layers[i]->forward(context, x, saved ? &(*saved)[i] : nullptr);
    weights.leave();
  }
  return x;
}

Tensor run_backward(const Model& model, const LayerRange& layers, const Context& context, ParamStore& params,
                    Tensor grad, std::vector<Saved>& saved, bool completes_lane) {
  for (size_t i = layers.end; i-- > layers.begin;) {
    params.weights.arrive();
    params.grads.begin_layer(i);
    grad = model.layers[i]->backward_input(context, grad, saved[i]);
    model.layers[i]->backward_weight(context, saved[i]);
    saved[i] = {};  // its activations are free for the layers below
    params.weights.leave();
    if (completes_lane) params.grads.complete_layer(i);
  }
  return grad;
}

Tensor run_backward_input(const Model& model, const LayerRange& layers, const Context& context,
                          WeightStore& weights, Tensor grad, std::vector<Saved>& saved) {
  for (size_t i = layers.end; i-- > layers.begin;) {
    weights.arrive();
    grad = model.layers[i]->backward_input(context, grad, saved[i]);
    weights.leave();
  }
  return grad;
}

void run_backward_weight(const Model& model, const LayerRange& layers, const Context& context,
                         GradStore& grads, std::vector<Saved>& saved, bool completes_lane) {
  for (size_t i = layers.end; i-- > layers.begin;) {
    grads.begin_layer(i);
    model.layers[i]->backward_weight(context, saved[i]);
    saved[i] = {};
    if (completes_lane) grads.complete_layer(i);
  }
}

void skip_forward(const LayerRange& layers, WeightStore& weights) {
  for (size_t i = layers.begin; i < layers.end; ++i) {
    weights.arrive();
    weights.leave();
  }
}

}  // namespace polyreme
