#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/token_dataset.h"
#include "engine/param_store.h"
#include "mesh/mesh.h"
#include "nn/gpt.h"
#include "optim/optimizer.h"

namespace polyreme {

struct EngineOptions {
  int64_t global_batch = 1;  // samples of a step, over all ranks
  int64_t micro_batch = 1;   // samples of one forward; does not change the bits
  int64_t lanes_dp = 0;      // 0: the size of the dp axis
  uint64_t seed = 0;         // initial weights, dropout
  float clip_norm = 0;       // limit of the global gradient norm; 0: none
  int zero_stage = 0;        // 1: every rank of dp keeps and updates a shard of the optimizer state
  OptimizerOptions optimizer;
};

// Samples in host memory: tokens and targets are [num_samples, seq_len], row after row. A target of
// kIgnoreIndex does not count.
struct HostBatch {
  std::vector<int32_t> tokens;
  std::vector<int32_t> targets;
  int64_t num_samples = 0;
  int64_t seq_len = 0;
};

struct StepStats {
  double loss = 0;       // mean over the valid tokens of the global batch; 0 if there are none
  double grad_norm = 0;  // of the whole gradient, before clipping
  int64_t tokens = 0;    // of the global batch, ignored ones included
  int64_t valid_tokens = 0;
};

// Trains a model on one rank of a mesh: forward, backward, sum over lanes, clip, update. Calls are
// collective over the mesh and come from one thread. Loss, norm and weights depend on the lanes, not
// on the number of ranks or the micro-batch size.
class Engine {
 public:
  // Draws the initial weights. `device` and `mesh` must outlive the engine. Collective. Throws
  // InvalidArgument naming the sizes that do not fit together, or the settings that differ between ranks.
  Engine(Device& device, Mesh& mesh, Model model, const EngineOptions& options);

  // One optimizer step. `batch` has this rank's samples: the global batch cut evenly over dp, in
  // order. Throws on every rank alike: InvalidArgument before anything runs, if one rank's batch is bad;
  // NumericError, naming the first bad parameter, with weights and optimizer as before, if the gradient or
  // the loss is not finite.
  StepStats train_step(const HostBatch& batch, double lr);
  // The same with samples [step * global_batch, (step + 1) * global_batch) of the order.
  StepStats train_step(const TokenDataset& data, const SampleOrder& order, int64_t step, double lr);
  // Mean loss over the samples [first, first + num_samples) of `data` in file order, spread over dp.
  StepStats evaluate(const TokenDataset& data, int64_t first, int64_t num_samples);
  // logits [num_samples, seq_len, vocab] of this rank's own samples; targets are not needed. Local.
  std::vector<float> logits(const HostBatch& batch);

  const Model& model() const { return model_; }
  const EngineOptions& options() const { return options_; }
  const ShardMap& map() const { return params_.map(); }
  int64_t applied_steps() const { return applied_steps_; }
  int64_t local_batch() const { return options_.global_batch / dp_.size(); }
  // Copies to and from the host; reading what ZeRO has sharded is collective. `kind` is "weight", "grad" (of
  // the last step, before clipping) or a state name of the optimizer. Throws InvalidArgument for unknown
  // names and wrong sizes.
  std::vector<float> read_param(const std::string& name, const std::string& kind);
  void write_param(const std::string& name, const std::vector<float>& values);

 private:
  struct DeviceBatch {
    Tensor tokens, targets;
  };

  void init_weights();
  void check_batch(const HostBatch& batch, int64_t num_samples, bool needs_targets) const;
  HostBatch read_samples(const TokenDataset& data, int64_t count,
                         const std::function<int64_t(int64_t)>& sample) const;
  // `source`: where the samples come from, equal on all ranks; `refusal`: why this rank has none, or null.
  StepStats train_step(const HostBatch& batch, double lr, const std::string& source,
                       std::exception_ptr refusal);
  // Something that must be equal on all ranks. `value` is compared; `text` is for people.
  struct Fact {
    const char* name;
    int64_t value;
    std::string text;
  };
  static Fact fact(const char* name, const std::string& text);
  // All ranks throw, or none: `refusal` if this rank has one, otherwise InvalidArgument naming the ranks with
  // a refusal or with other facts. Returns the sum of `addend` over the ranks. Waits for them.
  int64_t agree(const std::vector<Fact>& facts, const std::exception_ptr& refusal, int64_t addend = 0);
  void agree_on_settings();
  DeviceBatch upload(const HostBatch& batch);
  Context make_context(const DeviceBatch& batch, int64_t begin, int64_t end, int64_t first_sample,
                       bool training) const;
  Tensor run_forward(const Context& context, size_t num_layers, std::vector<Saved>* saved) const;
  void run_backward(const Context& context, std::vector<Saved>& saved) const;
  void run_lanes(const DeviceBatch& batch, float loss_scale);
  void measure_gradient();
  double read_sum(const Tensor& limbs);
  // The name of the first parameter that is not finite in this kind of buffer; empty if there is none.
  std::string first_not_finite(const std::string& kind);
  std::string what_is_not_finite();
  Tensor unit_buffer(const std::string& kind, int unit);

  Device& device_;
  Communicator& dp_;
  int dp_rank_;
  Model model_;
  EngineOptions options_;
  std::unique_ptr<Stream> stream_;
  int64_t local_lanes_;
  ParamStore params_;
  std::unique_ptr<Optimizer> optimizer_;
  Tensor loss_sum_, square_sum_;  // exact accumulators
  Tensor clip_scale_;             // fp32 [1]
  int64_t applied_steps_ = 0;
};

}  // namespace polyreme
