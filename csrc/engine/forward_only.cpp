// Engine: forwards without an update, for evaluation and logits.
#include <algorithm>

#include "base/math.h"
#include "engine/engine.h"
#include "engine/layer_steps.h"
#include "mesh/agreement.h"
#include "ops/ops.h"

namespace polyreme {

StepStats Engine::evaluate(const TokenDataset& data, int64_t first, int64_t num_samples) {
  require(num_samples >= 1, "evaluate: num_samples=", num_samples, "; expected at least 1");
  const int64_t available = data.num_samples(model_.max_seq_len);
  const bool in_range = first >= 0 && first <= available && num_samples <= available - first;
  require(in_range, "evaluate: samples [", first, ", ", first, " + ", num_samples, ") of '", data.path(),
          "', which has ", available, " samples of ", model_.max_seq_len, " tokens");
  const int64_t begin = num_samples * dp_rank_ / dp_.size();
  const int64_t count = num_samples * (dp_rank_ + 1) / dp_.size() - begin;
  HostBatch batch;
  std::exception_ptr refusal;
  try {
    batch = read_samples(model_, data, count, [&](int64_t i) { return first + begin + i; });
  } catch (const InvalidArgument&) {  // a token outside the vocabulary
    refusal = std::current_exception();
  }
  agree_everywhere(
      {fact("source of samples", concat(samples_of(data), ", from ", first, " on ", num_samples))}, refusal);
  const WaitAtExit wait(*stream_), wait_background(background());
  zero_limbs(*stream_, loss_sum_);
  if (pipeline_) {
    forward_pipeline(batch, begin, ceil_div(num_samples, dp_.size()));
  } else {
    forward_alone(batch, begin, ceil_div(num_samples, dp_.size()));
  }
  dp_.all_reduce(loss_sum_, ReduceOp::kSum, *stream_)->wait_on(*stream_);
  sum_along_pp(loss_sum_);
  if (pipeline_) pipeline_->wait();
  const int64_t tokens = num_samples * batch.seq_len;
  return {read_sum(loss_sum_) / static_cast<double>(tokens), 0.0, tokens, tokens};
}

void Engine::forward_pipeline(const HostBatch& batch, int64_t first_sample, int64_t most) {
  StageRun run{.with_backward = false};
  // As many forwards on every rank, maybe of no samples: in stage 3 they gather together.
  const int64_t count = batch.num_samples, step = options_.micro_batch;
  for (int64_t begin = 0; begin < round_up(most, step); begin += step)
    run.micro_batches.push_back({std::min(begin, count), std::min(begin + step, count)});
  DeviceBatch uploaded = upload(*stream_, batch);
  if (count == 0) uploaded.targets = uploaded.tokens;  // an empty batch has targets, too
  run.context = [this, first_sample, on_device = uploaded](const MicroRange& range) {
    return make_context(on_device, range.begin, range.end, first_sample + range.begin, /*training=*/false);
  };
  pipeline_->forward(std::move(run));
}

void Engine::forward_alone(const HostBatch& batch, int64_t first_sample, int64_t most) {
  // As many forwards on every rank: in stage 3 they gather together.
  const LayerRange layers{0, model_.layers.size()};
  const int64_t count = batch.num_samples, forwards = ceil_div(most, options_.micro_batch);
  plan_visits(forwards, layers.end, /*with_backward=*/false);
  const DeviceBatch on_device = count > 0 ? upload(*stream_, batch) : DeviceBatch{};
  for (int64_t i = 0; i < forwards * options_.micro_batch; i += options_.micro_batch) {
    if (i >= count) {
      skip_forward(layers, params_.weights);
      continue;
    }
    const int64_t end = std::min(i + options_.micro_batch, count);
    const Context context = make_context(on_device, i, end, first_sample + i, /*training=*/false);
    exact_sum(*stream_, run_forward(model_, layers, context, params_.weights, {}, nullptr), loss_sum_);
  }
}

std::vector<float> Engine::logits(const HostBatch& batch) {
  std::exception_ptr refusal;
  try {
    check_batch(model_, batch, /*needs_targets=*/false);
  } catch (const InvalidArgument&) {
    refusal = std::current_exception();
  }
  if (pipeline_) return pipeline_logits(batch, refusal);
  const bool is_local = options_.zero.stage < 3 || groups_.num_shards() == 1;
  const std::vector<Fact> shape = {fact("num_samples", batch.num_samples), fact("seq_len", batch.seq_len)};
  if (tp_) agree(tp_->group(), *stream_, shape, refusal, 0, "tp");
  if (!is_local) agree(dp_, *stream_, {}, refusal);
  if (refusal) std::rethrow_exception(refusal);
  std::vector<float> result(static_cast<size_t>(batch.num_samples * batch.seq_len * model_.vocab));
  if (batch.num_samples == 0 && is_local) return result;
  const HostBatch stretched = tp_ ? padded(batch, model_.lanes.lanes) : HostBatch();
  const WaitAtExit wait(*stream_), wait_background(background());
  const LayerRange layers{0, model_.layers.size() - 1};
  plan_visits(1, layers.end, /*with_backward=*/false);
  if (batch.num_samples == 0) {
    skip_forward(layers, params_.weights);
    return result;
  }
  const Context context = make_context(upload(*stream_, tp_ ? stretched : batch), 0, batch.num_samples, 0,
                                       /*training=*/false);
  const Tensor scores = run_forward(model_, layers, context, params_.weights, {}, nullptr);
  if (tp_) return joined_logits(scores, batch, stretched);
  copy_to_host(*stream_, wide(*stream_, scores), result.data());
  stream_->synchronize();
  return result;
}

std::vector<float> Engine::pipeline_logits(const HostBatch& batch, const std::exception_ptr& refusal) {
  Communicator& stages = pipeline_->group();
  agree(stages, *stream_, {fact("num_samples", batch.num_samples), fact("seq_len", batch.seq_len)}, refusal,
        0, "pp");
  const HostBatch stretched = tp_ ? padded(batch, model_.lanes.lanes) : HostBatch();
  if (tp_)
    agree(tp_->group(), *stream_, {fact("num_samples", batch.num_samples), fact("seq_len", batch.seq_len)},
          nullptr, 0, "tp");
  const Shape shape = tp_ ? Shape{tp_->lanes().count, batch.num_samples * stretched.seq_len,
                                  ceil_div(model_.vocab, model_.lanes.lanes)}
                          : Shape{batch.num_samples * batch.seq_len, model_.vocab};
  std::vector<float> result(static_cast<size_t>(batch.num_samples * batch.seq_len * model_.vocab));
  // In stage 3 the ranks of dp gather together.
  if (batch.num_samples == 0 && options_.zero.stage < 3) return result;
  const WaitAtExit wait(*stream_), wait_background(background());
  StageRun run{.micro_batches = {{0, batch.num_samples}}, .with_backward = false, .with_loss = false};
  run.context = [this, on_device = upload(*stream_, tp_ ? stretched : batch)](const MicroRange& range) {
    return make_context(on_device, range.begin, range.end, 0, /*training=*/false);
  };
  pipeline_->forward(std::move(run));
  const Tensor& output = pipeline_->output();
  const Tensor logits =
      output.defined() ? wide(*stream_, output) : empty(device_, DType::kF32, shape, "logits");
  stages.broadcast(logits, pipeline_->last_stage(), *stream_)->wait_on(*stream_);
  pipeline_->wait();
  if (tp_) return joined_logits(logits, batch, stretched);
  copy_to_host(*stream_, logits, result.data());
  stream_->synchronize();
  return result;
}

std::vector<float> Engine::joined_logits(const Tensor& parts, const HostBatch& batch,
                                         const HostBatch& stretched) {
  Tensor all = wide(*stream_, parts);
  const int64_t lanes = part_.lanes.lanes, rows = parts.size(1), part = parts.size(2);
  if (tp_->size() > 1) {
    const Tensor own = all;
    all = empty(device_, DType::kF32, {lanes, rows, part}, "logits of all lanes");
    tp_->group().all_gather(own, all, *stream_)->wait_on(*stream_);
  }
  std::vector<float> stored(static_cast<size_t>(all.numel()));
  copy_to_host(*stream_, all, stored.data());
  stream_->synchronize();
  const int64_t vocab = model_.vocab;
  std::vector<float> result(static_cast<size_t>(batch.num_samples * batch.seq_len * vocab));
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t count = std::clamp<int64_t>(vocab - lane * part, 0, part);
    for (int64_t row = 0; row < batch.num_samples * batch.seq_len; ++row) {
      const int64_t from = row / batch.seq_len * stretched.seq_len + row % batch.seq_len;
      std::copy_n(stored.begin() + (lane * rows + from) * part, count,
                  result.begin() + row * vocab + lane * part);
    }
  }
  return result;
}

}  // namespace polyreme
