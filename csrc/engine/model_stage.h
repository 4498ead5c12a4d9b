#pragma once

#include <functional>
#include <map>
#include <vector>

#include "engine/layer_steps.h"
#include "engine/shared_params.h"
#include "engine/stage_part.h"
#include "pipeline/stage_runner.h"

namespace polyreme {

// Samples [begin, end) of a rank's batch.
struct MicroRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t number = 0;           // among a rank's micro-batches, in order of samples
  bool completes_lane = false;  // the last one of its lane, or of its round
};

// One pass of a schedule over a batch.
struct StageRun {
  std::vector<MicroRange> micro_batches;
  std::function<Context(const MicroRange&)> context;
  bool with_backward = true;
  bool with_loss = true;  // else the last chunk ends before the loss, and `output` is what it has then
};

// Native layers as a stage of the pipeline.
class ModelStage final : public pipeline::StageRunner {
 public:
  // All arguments must outlive this object. The losses of valid tokens are added to `loss_sum`.
  ModelStage(const Model& model, const StagePart& part, Stream& stream, ParamStore& params,
             SharedParams& shared, const Tensor& loss_sum)
      : model_(model), part_(part), stream_(stream), params_(params), shared_(shared), loss_sum_(loss_sum) {}

  // Before the executor runs `list`, this rank's; forgets what a run that failed has left.
  void begin(StageRun run, const std::vector<pipeline::Action>& list);
  // The last chunk's output of the last micro-batch, without a loss.
  const Tensor& output() const { return output_; }

  Tensor make_boundary(int chunk, int micro_batch, bool is_gradient) override;
  Tensor forward(int chunk, int micro_batch, Tensor input) override;
  Tensor backward_input(int chunk, int micro_batch, Tensor output_grad) override;
  void backward_weight(int chunk, int micro_batch) override;
  Tensor backward(int chunk, int micro_batch, Tensor output_grad) override;

 private:
  bool is_last(int chunk) const { return chunk + 1 == static_cast<int>(part_.chunks.size()); }
  LayerRange layers_of(int chunk) const;
  void complete(int chunk, const MicroRange& samples) {
    if (samples.completes_lane) shared_.complete_lane(layers_of(chunk));
  }
  const MicroRange& range(int micro_batch) const {
    return run_.micro_batches[static_cast<size_t>(micro_batch)];
  }

  const Model& model_;
  const StagePart& part_;
  Stream& stream_;
  ParamStore& params_;
  SharedParams& shared_;
  Tensor loss_sum_;
  StageRun run_;
  std::map<std::pair<int, int>, std::vector<Saved>> saved_;  // by chunk and micro-batch
  Tensor output_;
};

}  // namespace polyreme
