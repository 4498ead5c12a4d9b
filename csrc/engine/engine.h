#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "engine/memory_terms.h"
#include "engine/param_store.h"
#include "engine/pipeline_run.h"
#include "mesh/agreement.h"
#include "mesh/mesh.h"
#include "optim/loss_scaler.h"
#include "optim/optimizer.h"

namespace polyreme {

struct PipelineOptions {
  // What every stage runs in a training step; its micro-batches are those of a rank's batch. None: one stage.
  std::optional<pipeline::Schedule> schedule;
  std::vector<int> split;  // blocks of each chunk; empty: by cost
};

struct EngineOptions {
  int64_t global_batch = 1;  // samples of a step, over all ranks
  int64_t micro_batch = 1;   // samples of one forward; does not change the bits, unless zero.round_first
  int64_t lanes_dp = 0;      // 0: the size of the dp axis; those of tp are the model's
  uint64_t seed = 0;         // initial weights, dropout
  float clip_norm = 0;       // limit of the global gradient norm; 0: none
  ZeroOptions zero;
  LossScalerOptions loss_scale = {.dynamic = false, .initial = 1};
  // Steps in a row that are skipped because the gradient or the loss is not finite, before it is an error;
  // -1: any number. One that a dynamic loss scale answers by backing off is always skipped and does not
  // count.
  int64_t max_skipped = 0;
  OptimizerOptions optimizer;
  PipelineOptions pipeline;
};

// Elements [begin, begin + size) of a parameter's weight, or of one kind of its optimizer state, that this
// rank's shard has: of the whole parameter, or of the part that a lane of tp has, which is a tensor of its
// own. Padding is in neither.
struct StatePart {
  std::string kind;  // "weight", or a name of Optimizer::state
  int param = 0;
  int64_t begin = 0;
  int64_t size = 0;
  Tensor tensor;  // [size]
  PartRanges part;
};

struct StepStats {
  double loss = 0;       // mean over the valid tokens of the global batch; 0 if there are none
  double grad_norm = 0;  // of the whole gradient, before clipping
  int64_t tokens = 0;    // of the global batch, ignored ones included
  int64_t valid_tokens = 0;
  double loss_scale = 1;   // the factor of this step's loss; loss and grad_norm are without it
  bool skipped = false;    // not finite, or no valid token: weights, optimizer and counters are as before
  std::string not_finite;  // which parameter and rank it was, if skipped for that
};

// Trains a model on one rank of a mesh: forward, backward, sum over lanes, clip, update. Calls are
// collective over the mesh and come from one thread. Loss, norm and weights depend on the lanes, not
// on the number of ranks or the micro-batch size.
class Engine {
 public:
  // Draws the initial weights. `model` was built for the mesh's tp axis. `device` and `mesh` must outlive the
  // engine. Collective. Throws InvalidArgument naming the sizes that do not fit together, or the settings
  // that differ between ranks.
  Engine(Device& device, Mesh& mesh, Model model, const EngineOptions& options);

  // One optimizer step. `batch` has this rank's samples: the global batch cut evenly over dp, in
  // order. Throws on every rank alike: InvalidArgument before anything runs, if one rank's batch is bad;
  // NumericError, naming the first bad parameter, with weights and optimizer as before, if the gradient or
  // the loss is not finite and the step may not be skipped.
  StepStats train_step(const HostBatch& batch, double lr);
  // The same with samples [step * global_batch, (step + 1) * global_batch) of the order.
  StepStats train_step(const TokenDataset& data, const SampleOrder& order, int64_t step, double lr);
  // Mean loss over the samples [first, first + num_samples) of `data` in file order, spread over dp.
  StepStats evaluate(const TokenDataset& data, int64_t first, int64_t num_samples);
  // logits [num_samples, seq_len, vocab] of this rank's own samples, which may be none; targets are not
  // needed. Local up to stage 2, collective in stage 3, and along pp.
  std::vector<float> logits(const HostBatch& batch);

  const Model& model() const { return model_; }
  const EngineOptions& options() const { return options_; }
  Communicator& world() const { return world_; }
  // Of this rank's stage.
  const ShardMap& map() const { return plan_.map; }
  // Elements of all parameters of the model.
  int64_t num_parameters() const;
  // Compares what several ranks hold alike, weights and optimizer state, by fingerprints. Collective. Throws
  // NumericError on every rank, naming a tensor and the ranks that have it otherwise than most.
  void check_replicas();
  // What this rank's memory goes to; see memory_terms.
  std::vector<MemoryTerm> memory() const;
  int64_t applied_steps() const { return applied_steps_; }
  int64_t skipped_steps() const { return skipped_steps_; }
  int64_t skipped_in_a_row() const { return skipped_in_a_row_; }  // as max_skipped counts
  LossScaler& loss_scaler() { return scaler_; }
  int64_t local_batch() const { return options_.global_batch / dp_.size(); }
  // Copies to and from the host; reading is collective along pp and for what ZeRO has sharded, writing is
  // not: every rank writes the same values. `kind` is "weight" (as layers read it), "master" (as the
  // optimizer updates it, fp32), "grad" (of the last step, before clipping) or a state name of the optimizer.
  // Throws InvalidArgument for unknown names and wrong sizes.
  std::vector<float> read_param(const std::string& name, const std::string& kind);
  void write_param(const std::string& name, const std::vector<float>& values);

  // All that this rank must save, and all that it needs back to go on: by kind, then in order of the shard.
  // The same list at every call, for the shards cover every parameter.
  std::vector<StatePart> state_parts() const;
  // Elements [begin, end) of a parameter, inside of state_parts()[part].
  struct StateRange {
    int64_t part, begin, end;
  };
  // Copies ranges to host memory, one after the other, and waits. Throws InvalidArgument for ranges outside
  // their part, or another size of memory.
  void read_state(std::span<const StateRange> ranges, std::span<std::byte> to);
  // The inverse; weights reach the ranks that hold them whole. Collective.
  void write_state(std::span<const StateRange> ranges, std::span<const std::byte> from);
  // The counts behind the state. Throws InvalidArgument for negative ones, or not one for each parameter.
  const std::vector<int64_t>& updates() const { return updates_; }
  void set_progress(int64_t applied_steps, int64_t skipped_steps, int64_t skipped_in_a_row,
                    std::vector<int64_t> updates);

 private:
  void agree_on_settings();
  void init_weights();
  // Along dp, tp and pp: `facts` are the same on all ranks, and no rank has a refusal; `of_replica` along tp
  // and pp. Returns the sum of `addend` along dp.
  int64_t agree_everywhere(const std::vector<Fact>& facts, std::exception_ptr refusal, int64_t addend = 0,
                           const std::vector<Fact>& of_replica = {});
  // `source`: where the samples come from, equal on all ranks; `refusal`: why this rank has none, or null.
  StepStats train_step(const HostBatch& batch, double lr, const std::string& source,
                       std::exception_ptr refusal);
  Context make_context(const DeviceBatch& batch, int64_t begin, int64_t end, int64_t first_sample,
                       bool training) const;
  void run_lanes(const std::vector<MicroRange>& ranges, const std::vector<DeviceBatch>& batches,
                 float loss_scale);
  // `batch` in device memory: whole, or micro-batch by micro-batch where their lengths differ. `kept`: the
  // host memory that must live until it is there.
  std::vector<DeviceBatch> upload_parts(const HostBatch& batch, const std::vector<MicroRange>& ranges,
                                        std::vector<HostBatch>* kept);
  // Throws InvalidArgument unless there is a length for each of them.
  void check_lengths(const HostBatch& batch, const std::vector<MicroRange>& ranges) const;
  // This rank's batch, lane by lane or round by round.
  std::vector<MicroRange> micro_ranges() const;
  // Their losses are added to loss_sum_.
  void run_micro_batch(const Context& context, bool completes_lane);
  // Forwards without backwards; the first sample has the number first_sample. `most`: samples of a rank, at
  // most.
  void forward_alone(const HostBatch& batch, int64_t first_sample, int64_t most);
  void forward_pipeline(const HostBatch& batch, int64_t first_sample, int64_t most);
  std::vector<float> pipeline_logits(const HostBatch& batch, const std::exception_ptr& refusal);
  void sum_along_pp(const Tensor& limbs);
  // The lanes' parts of one kind of a parameter, by lane; undefined if it is on another stage. Collective as
  // read_param.
  Tensor parts_of(size_t param, const std::string& kind);
  // All lanes' logits [lanes, rows, part of the vocabulary] of a batch, in the order of `logits`.
  std::vector<float> joined_logits(const Tensor& parts, const HostBatch& batch, const HostBatch& stretched);
  // Announces `count` micro-batches, forward and, if there is one, backward.
  void plan_visits(int64_t count, size_t num_layers, bool with_backward);
  void measure_gradient();
  void count_update();
  void set_updates(std::vector<int64_t> updates);
  // Skips the step, or throws NumericError.
  StepStats skip_step(StepStats stats);
  double read_sum(const Tensor& limbs);
  // The first parameter of the model that is not finite in this kind of buffer; their number if there is
  // none.
  size_t first_not_finite(const std::string& kind);
  // Throws InvalidArgument for an unknown kind, for gradients before the first step, and for what a frozen
  // parameter lacks: on all stages alike.
  void check_kind(const std::string& kind, size_t param) const;
  std::string what_is_not_finite();
  Tensor unit_buffer(const std::string& kind, int unit);
  Stream& background() const { return background_ ? *background_ : *stream_; }

  Device& device_;
  Communicator& world_;
  Communicator& dp_;
  int dp_rank_;
  Model model_;
  EngineOptions options_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<TensorParallel> tp_;  // null: the model has one lane
  StagePart part_;
  std::unique_ptr<Stream> background_;  // of collectives that overlap computation; null: they do not
  DpGroups groups_;
  UnitPlan plan_;
  ParamStore params_;
  std::unique_ptr<Optimizer> optimizer_;
  Tensor loss_sum_, square_sum_;           // exact accumulators
  Tensor clip_scale_;                      // fp32 [1]
  std::unique_ptr<PipelineRun> pipeline_;  // null: one stage without a schedule
  LossScaler scaler_;
  std::optional<double> grad_scale_;  // of the gradient that the last step has left
  int64_t applied_steps_ = 0, skipped_steps_ = 0, skipped_in_a_row_ = 0;
  std::vector<int64_t> updates_;  // of every parameter of the model, those of other stages too
};

}  // namespace polyreme
