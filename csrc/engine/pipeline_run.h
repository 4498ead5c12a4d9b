#pragma once

#include <map>
#include <memory>

#include "engine/model_stage.h"
#include "pipeline/executor.h"

namespace polyreme {

// A rank's side of a pipeline: its stage, and the executor of every schedule that it has run.
class PipelineRun {
 public:
  // All arguments but `schedule` must outlive this object; `group` is the pp axis, `trainable` of the model's
  // parameters. Throws InvalidArgument for a schedule that is not valid or not for this group.
  PipelineRun(pipeline::Schedule schedule, Communicator& group, const Model& model, const StagePart& part,
              Stream& compute, ParamStore& params, const Tensor& loss_sum,
              const std::vector<uint8_t>& trainable, const pipeline::ExecutorOptions& options);

  Communicator& group() const { return group_; }
  const pipeline::Schedule& schedule() const { return training_.schedule(); }
  // Micro-batches of a training step.
  int64_t num_micro_batches() const { return schedule().micro_batches; }

  // Enqueues forward and backward of the schedule's micro-batches. Gradients of shared parameters are
  // complete after it. Throws as Executor::run.
  void train(StageRun run);
  // Enqueues the forward of any number of micro-batches.
  void forward(StageRun run);
  // The last chunk's output, see StageRun; defined on its stage alone.
  const Tensor& output() const { return stage_.output(); }
  int last_stage() const;
  // The copy of (a lane's part of) a shared weight, if this rank has one; waits.
  void write_shared(int param, int lane, const std::vector<float>& values) {
    shared_.write(param, lane, values);
  }
  std::vector<MemoryTerm> memory(int64_t lanes) const { return shared_.memory(lanes); }
  // Collective, after weights were changed.
  void share_weights() { shared_.share_weights(); }
  // Throws what went wrong between the stages. Blocks until all transfers are through.
  void wait();

 private:
  void run(pipeline::Executor& executor, StageRun run);

  Communicator& group_;
  Stream& compute_;
  pipeline::ExecutorOptions options_;
  SharedParams shared_;
  ModelStage stage_;
  pipeline::Executor training_;
  std::map<size_t, std::unique_ptr<pipeline::Executor>> forward_only_;  // by number of micro-batches
};

}  // namespace polyreme
