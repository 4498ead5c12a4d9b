#include "engine/model_stage.h"

#include "ops/ops.h"

namespace polyreme {

LayerRange ModelStage::layers_of(int chunk) const {
  LayerRange layers = part_.chunks[static_cast<size_t>(chunk)];
  if (is_last(chunk) && !run_.with_loss) --layers.end;
  return layers;
}

void ModelStage::begin(StageRun run, const std::vector<pipeline::Action>& list) {
  run_ = std::move(run);
  saved_.clear();
  output_ = {};
  std::vector<size_t> visits;  // weights are read forwards, and backwards for the gradients of inputs
  for (const pipeline::Action& action : list) {
    if (!pipeline::is_compute(action.kind) || action.kind == pipeline::ActionKind::kBackwardWeight) continue;
    const LayerRange layers = layers_of(action.chunk);
    if (action.kind == pipeline::ActionKind::kForward)
      for (size_t layer = layers.begin; layer < layers.end; ++layer) visits.push_back(layer);
    else
      for (size_t layer = layers.end; layer-- > layers.begin;) visits.push_back(layer);
  }
  params_.weights.plan_visits(std::move(visits));
}

Tensor ModelStage::make_boundary(int, int micro_batch, bool) {
  const Context context = run_.context(range(micro_batch));
  return empty(stream_.device(), model_.boundary_dtype,
               {context.batch.num_samples() * context.own_tokens(), model_.boundary_features},
               "pipeline boundary");
}

Tensor ModelStage::forward(int chunk, int micro_batch, Tensor input) {
  std::vector<Saved>* saved = nullptr;
  if (run_.with_backward) {
    saved = &saved_[{chunk, micro_batch}];
    saved->resize(model_.layers.size());
  }
  Tensor out = run_forward(model_, layers_of(chunk), run_.context(range(micro_batch)), params_.weights,
                           std::move(input), saved);
  if (!is_last(chunk)) return out;
  if (run_.with_loss) {
    exact_sum(stream_, out, loss_sum_);
  } else {
    output_ = out;
  }
  return {};
}

Tensor ModelStage::backward(int chunk, int micro_batch, Tensor output_grad) {
  const MicroRange& samples = range(micro_batch);
  auto node = saved_.extract({chunk, micro_batch});
  Tensor input_grad = run_backward(model_, layers_of(chunk), run_.context(samples), params_,
                                   std::move(output_grad), node.mapped(), samples.completes_lane);
  complete(chunk, samples);
  return input_grad;
}

Tensor ModelStage::backward_input(int chunk, int micro_batch, Tensor output_grad) {
  return run_backward_input(model_, layers_of(chunk), run_.context(range(micro_batch)), params_.weights,
                            std::move(output_grad), saved_.at({chunk, micro_batch}));
}

void ModelStage::backward_weight(int chunk, int micro_batch) {
  const MicroRange& samples = range(micro_batch);
  auto node = saved_.extract({chunk, micro_batch});
  run_backward_weight(model_, layers_of(chunk), run_.context(samples), params_.grads, node.mapped(),
                      samples.completes_lane);
  complete(chunk, samples);
}

}  // namespace polyreme
