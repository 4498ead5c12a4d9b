#include "engine/pipeline_run.h"

#include "pipeline/schedule/generators.h"

namespace polyreme {

PipelineRun::PipelineRun(pipeline::Schedule schedule, Communicator& group, const Model& model,
                         const StagePart& part, Stream& compute, ParamStore& params, const Tensor& loss_sum,
                         const std::vector<uint8_t>& trainable, const pipeline::ExecutorOptions& options)
    : group_(group),
      compute_(compute),
      options_(options),
      shared_(model, part, group, compute, params, trainable),
      stage_(model, part, compute, params, shared_, loss_sum),
      training_(std::move(schedule), group, compute, options) {}

int PipelineRun::last_stage() const { return pipeline::rank_of_chunk(schedule()).back(); }

void PipelineRun::train(StageRun run) {
  shared_.begin_step();
  this->run(training_, std::move(run));
  shared_.add_gradients();
}

void PipelineRun::forward(StageRun run) {
  std::unique_ptr<pipeline::Executor>& executor = forward_only_[run.micro_batches.size()];
  if (!executor)
    executor = std::make_unique<pipeline::Executor>(
        pipeline::generate_forward_only(schedule().chunks, static_cast<int>(run.micro_batches.size())),
        group_, compute_, options_);
  this->run(*executor, std::move(run));
}

void PipelineRun::run(pipeline::Executor& executor, StageRun run) {
  stage_.begin(std::move(run), executor.schedule().actions[static_cast<size_t>(group_.rank())]);
  executor.run(stage_);
}

void PipelineRun::wait() {
  training_.wait();
  for (auto& [count, executor] : forward_only_) executor->wait();
}

}  // namespace polyreme
