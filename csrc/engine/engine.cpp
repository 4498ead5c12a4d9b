#include "engine/engine.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/hash.h"
#include "base/math.h"
#include "engine/layer_steps.h"
#include "mesh/agreement.h"
#include "ops/ops.h"
#include "ops/update.h"
#include "pipeline/schedule/text.h"

namespace polyreme {
namespace {

void check_zero(ZeroOptions& zero, int64_t dp) {
  require(zero.stage >= 0 && zero.stage <= 3, "zero=", zero.stage,
          "; expected 0 (nothing is divided), 1 (optimizer state), 2 (gradients too) or 3 (weights too)");
  if (zero.shard_size == 0) zero.shard_size = dp;
  const bool is_power = std::has_single_bit(static_cast<uint64_t>(std::max<int64_t>(zero.shard_size, 1)));
  require(
      zero.shard_size >= 1 && zero.shard_size <= dp && dp % zero.shard_size == 0 &&
          (is_power || zero.shard_size == dp),
      "shard_size=", zero.shard_size, " with dp=", dp,
      "; expected dp, or a power of two that divides it (a group of another size is no subtree of the sum)");
  require(zero.bucket_bytes >= 1, "bucket_bytes=", zero.bucket_bytes, "; expected at least 1");
  check_wire(zero.wire);
  require(zero.prefetch >= 0, "prefetch=", zero.prefetch, "; expected 0 or more layers");
  require(zero.persist_below >= 0, "persist_below=", zero.persist_below, "; expected 0 or more elements");
}

EngineOptions checked(EngineOptions options, const Communicator& dp) {
  if (options.lanes_dp == 0) options.lanes_dp = dp.size();
  const int64_t ranks = dp.size();
  check_lanes("dp", options.lanes_dp, ranks);
  check_zero(options.zero, ranks);
  require(options.micro_batch >= 1, "micro_batch=", options.micro_batch, "; expected at least 1");
  require(options.max_skipped >= -1, "max_skipped=", options.max_skipped,
          "; expected -1 (any number) or more");
  require(options.clip_norm >= 0, "clip_norm=", options.clip_norm, "; expected 0 (no limit) or more");
  require(options.global_batch >= ranks, "global_batch=", options.global_batch, " is less than dp=", ranks,
          ": some ranks would have no sample; use at least one sample per rank");
  require(options.global_batch % options.lanes_dp == 0, "global_batch=", options.global_batch,
          " is not divisible by lanes.dp=", options.lanes_dp,
          "; every lane needs the same number of samples");
  const std::vector<uint8_t>& trainable = options.optimizer.trainable;
  require(
      trainable.empty() || std::any_of(trainable.begin(), trainable.end(), [](uint8_t t) { return t != 0; }),
      "every parameter is frozen: there is nothing to train");
  return options;
}

// Tells batches apart.
std::string content_of(const HostBatch& batch) {
  const auto hash = [](const std::vector<int32_t>& values) {
    return text_hash({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int32_t)});
  };
  return concat("tokens of hash ", hash(batch.tokens), ", targets of hash ", hash(batch.targets));
}

bool has_axis(const Mesh& mesh, const std::string& name) {
  for (const Axis& axis : mesh.layout().axes())
    if (axis.name == name) return true;
  return false;
}

int size_of(const Mesh& mesh, const std::string& name) {
  return has_axis(mesh, name) ? mesh.layout().size(name) : 1;
}

std::unique_ptr<TensorParallel> tensor_parallel(const Device& device, const Model& model, const Mesh& mesh,
                                                const EngineOptions& options) {
  const int64_t size = size_of(mesh, "tp"), lanes = model.lanes.lanes;
  require(model.lanes.size == size, "the model was built for tp=", model.lanes.size,
          ", the mesh has tp=", size, "; build it for the mesh");
  if (lanes == 1) return nullptr;
  require<NotAvailable>(
      device.kind() == DeviceKind::kCpu || options.optimizer.rule != "muon",
      "optimizer 'muon' with lanes.tp=", lanes, " on ", device.description(),
      ": it puts together matrices of which tp has parts, which has no",
      " kernel there; use adamw, sgd, lion or lamb, tp=1 and lanes.tp=1, or train with device='cpu'");
  return std::make_unique<TensorParallel>(mesh.group({"tp"}), lanes);
}

StagePart part_of(const Model& model, const Mesh& mesh, const EngineOptions& options,
                  const TensorParallel* tp) {
  const LaneRange lanes = tp ? tp->lanes() : LaneRange{};
  const int stages = size_of(mesh, "pp");
  if (!options.pipeline.schedule) {
    require(stages == 1, "the mesh has pp=", stages, ", but there is no schedule for its stages; give one");
    return whole_model(model, lanes);
  }
  require(has_axis(mesh, "pp"), "a schedule needs a mesh with the axis pp, of any size");
  const pipeline::Schedule& schedule = *options.pipeline.schedule;
  require(schedule.num_ranks() == stages, "the schedule is for ", schedule.num_ranks(),
          " stages, the mesh has pp=", stages, "; make it for stages=", stages);
  return make_stage_part(model, schedule, mesh.coordinate("pp"), options.pipeline.split, lanes);
}

// By parameter of the part: what may share a unit. Chunks are at different lanes at a time, shared parameters
// are complete later, and what tp does not cut is summed over it.
std::vector<int> chunk_of_params(const StagePart& part) {
  std::vector<int> chunks;
  for (size_t param = 0; param < part.registry.specs().size(); ++param) {
    const auto layer = static_cast<size_t>(part.registry.layers_of(static_cast<int>(param)).front());
    int chunk = 0;
    while (part.chunks[static_cast<size_t>(chunk)].end <= layer) ++chunk;
    const bool is_whole = part.lanes.lanes > 1 && !is_cut(part.registry.specs()[param], "tp");
    chunks.push_back(chunk + (is_whole ? static_cast<int>(part.chunks.size()) : 0));
  }
  int alone = 2 * static_cast<int>(part.chunks.size());
  for (const SharedParam& shared : part.shared)
    if (part.local[static_cast<size_t>(shared.param)] >= 0)
      chunks[static_cast<size_t>(part.local_of({shared.param, 0, shared.lane}))] = alone++;
  return chunks;
}

ParamParts parts_of_params(const StagePart& part, const Model& model, const TensorParallel* tp) {
  if (!tp) return {};
  ParamParts parts{
      .whole = part.whole, .group = &tp->group(), .lanes = tp->lanes(), .specs = model.registry.specs()};
  for (const ParamSpec& spec : part.registry.specs()) parts.is_part.push_back(is_cut(spec, "tp"));
  return parts;
}

// Chunks that use a shared parameter do not visit its unit.
UnitPlan shared_kept_whole(UnitPlan plan, const StagePart& part) {
  for (const SharedParam& shared : part.shared)
    if (part.local[static_cast<size_t>(shared.param)] >= 0)
      plan.stays_whole[static_cast<size_t>(plan.map.unit_of(part.local_of({shared.param, 0, shared.lane})))] =
          true;
  return plan;
}

}  // namespace

Engine::Engine(Device& device, Mesh& mesh, Model model, const EngineOptions& options)
    : device_(device),
      world_(mesh.world()),
      dp_(mesh.group({"dp"})),
      dp_rank_(mesh.coordinate("dp")),
      model_(std::move(model)),
      options_(checked(options, dp_)),
      stream_(device.create_stream("compute")),
      tp_(tensor_parallel(device, model_, mesh, options_)),
      part_(part_of(model_, mesh, options_, tp_.get())),
      background_(options_.zero.overlap && dp_.size() > 1
                      ? device.create_stream("background", StreamKind::kBackground)
                      : nullptr),
      groups_(dp_, options_.zero.stage == 0 ? 1 : options_.zero.shard_size),
      plan_(shared_kept_whole(
          make_unit_plan(part_.registry, model_.layers.size(), options_.zero, groups_.num_shards(),
                         options_of(part_, options_.optimizer), chunk_of_params(part_)),
          part_)),
      params_(*stream_, background(), part_.registry, plan_, groups_, tp_.get(),
              options_.lanes_dp / dp_.size(), options_.zero,
              options_.loss_scale.dynamic || options_.max_skipped != 0, part_),
      optimizer_(make_optimizer(
          *stream_, plan_.map, groups_.shard_rank(), groups_.num_shards() > 1 ? &groups_.shard() : nullptr,
          options_of(part_, options_.optimizer), parts_of_params(part_, model_, tp_.get()))),
      loss_sum_(empty(device, DType::kI64, {ExactSum::kLimbs}, "loss sum")),
      square_sum_(empty(device, DType::kI64, {ExactSum::kLimbs}, "squared gradient sum")),
      clip_scale_(empty(device, DType::kF32, {1}, "clip scale")),
      scaler_(options_.loss_scale) {
  if (options_.pipeline.schedule) {
    const auto expected = static_cast<int64_t>(micro_ranges().size());
    require(options_.pipeline.schedule->micro_batches == expected, "the schedule is for ",
            options_.pipeline.schedule->micro_batches, " micro-batches; a rank's batch of ", local_batch(),
            " samples in lanes has ", expected, " of up to ", options_.micro_batch,
            ": make it for micro_batches=", expected);
    pipeline_ = std::make_unique<PipelineRun>(
        *options_.pipeline.schedule, mesh.group({"pp"}), model_, part_, *stream_, params_, loss_sum_,
        options_.optimizer.trainable, pipeline::ExecutorOptions{.issue_ahead = model_.lanes.size == 1});
  }
  updates_.resize(part_.local.size());
  agree_on_settings();
  init_weights();
}

void Engine::agree_on_settings() {
  const ZeroOptions& zero = options_.zero;
  const LossScalerOptions& scale = options_.loss_scale;
  std::string split;
  for (const int blocks : options_.pipeline.split) split += concat(blocks, " ");
  agree_everywhere(
      {fact("model", model_.description), fact("global_batch", options_.global_batch),
       fact("lanes.dp", options_.lanes_dp), fact("lanes.tp", model_.lanes.lanes),
       fact("seed", concat(options_.seed)), fact("clip_norm", concat(options_.clip_norm)),
       fact("zero", zero.stage), fact("shard_size", zero.shard_size), fact("bucket_bytes", zero.bucket_bytes),
       fact("overlap", zero.overlap), fact("order of sums", zero.round_first ? "round_first" : "lane_first"),
       // These change the collectives of a step only where rounds or gathers depend on them.
       fact("micro_batch", zero.round_first || zero.stage == 3 ? options_.micro_batch : 0),
       fact("dtype of communicated gradients", std::string(dtype_name(zero.wire))),
       fact("prefetch", zero.prefetch), fact("persist_below", zero.persist_below),
       fact("gather", zero.gather_for_step ? "step" : "use"),
       fact("loss_scale",
            concat(scale.dynamic, " ", scale.initial, " ", scale.growth, " ", scale.backoff, " ",
                   scale.interval, " ", scale.minimum, " ", scale.maximum, " ", scale.hysteresis)),
       fact("max_skipped", options_.max_skipped), fact("optimizer", describe(options_.optimizer)),
       fact("schedule", options_.pipeline.schedule ? pipeline::to_text(*options_.pipeline.schedule) : "none"),
       fact("split of layers", split)},
      nullptr);
}

int64_t Engine::agree_everywhere(const std::vector<Fact>& facts, std::exception_ptr refusal, int64_t addend,
                                 const std::vector<Fact>& of_replica) {
  // Along pp and tp first: what one of their ranks refuses all ranks of its dp group refuse with it.
  std::vector<Fact> all = facts;
  all.insert(all.end(), of_replica.begin(), of_replica.end());
  const auto agree_along = [&](Communicator& group, const char* axis) {
    try {
      agree(group, *stream_, all, refusal, 0, axis);
    } catch (const InvalidArgument&) {
      refusal = std::current_exception();
    }
  };
  if (pipeline_) agree_along(pipeline_->group(), "pp");
  if (tp_) agree_along(tp_->group(), "tp");
  return agree(dp_, *stream_, facts, refusal, addend);
}

Context Engine::make_context(const DeviceBatch& batch, int64_t begin, int64_t end, int64_t first_sample,
                             bool training) const {
  MicroBatch micro_batch{batch.tokens.slice(0, begin, end), {}, first_sample};
  if (batch.targets.defined()) micro_batch.targets = batch.targets.slice(0, begin, end);
  return {.stream = *stream_,
          .params = params_,
          .batch = micro_batch,
          .training = training,
          .seed = options_.seed,
          .step = static_cast<uint32_t>(applied_steps_),
          .tp = tp_.get()};
}

// ---- a step ----

void Engine::plan_visits(int64_t count, size_t num_layers, bool with_backward) {
  std::vector<size_t> visits;
  for (int64_t i = 0; i < count; ++i) {
    for (size_t layer = 0; layer < num_layers; ++layer) visits.push_back(layer);
    for (size_t layer = num_layers; with_backward && layer-- > plan_.first_trainable_layer;)
      visits.push_back(layer);
  }
  params_.weights.plan_visits(std::move(visits));
}

void Engine::run_micro_batch(const Context& context, bool completes_lane) {
  const LayerRange layers{0, model_.layers.size()};
  std::vector<Saved> saved(layers.end);
  const Tensor loss = run_forward(model_, layers, context, params_.weights, {}, &saved);
  exact_sum(*stream_, loss, loss_sum_);
  run_backward(model_, {plan_.first_trainable_layer, layers.end}, context, params_, {}, saved,
               completes_lane);
}

std::vector<MicroRange> Engine::micro_ranges() const {
  const int64_t lane_samples = options_.global_batch / options_.lanes_dp;
  const int64_t local_lanes = options_.lanes_dp / dp_.size();
  const int64_t micro_batch = options_.micro_batch;
  // Samples of every lane between two reductions.
  const int64_t window = options_.zero.round_first ? micro_batch : lane_samples;
  const int64_t per_lane = ceil_div(lane_samples, micro_batch);
  std::vector<MicroRange> ranges;
  for (int64_t first = 0; first < lane_samples; first += window) {
    for (int64_t lane = 0; lane < local_lanes; ++lane) {
      const int64_t lane_begin = lane * lane_samples;
      const int64_t end = lane_begin + std::min(first + window, lane_samples);
      for (int64_t begin = lane_begin + first; begin < end; begin += micro_batch)
        ranges.push_back({.begin = begin,
                          .end = std::min(begin + micro_batch, end),
                          .number = lane * per_lane + (begin - lane_begin) / micro_batch,
                          .completes_lane = begin + micro_batch >= end});
    }
  }
  return ranges;
}

void Engine::check_lengths(const HostBatch& batch, const std::vector<MicroRange>& ranges) const {
  if (batch.lengths.empty()) return;
  require(batch.lengths.size() == ranges.size(), "the batch has ", batch.lengths.size(),
          " micro-batches; this rank expects ", ranges.size(), ": ", local_batch(), " samples, up to ",
          options_.micro_batch, " each, by lanes");
  for (const int64_t length : batch.lengths)
    require(length >= 1 && length <= batch.seq_len, "a micro-batch of ", length,
            " tokens a sample; expected 1 to ", batch.seq_len);
}

std::vector<DeviceBatch> Engine::upload_parts(const HostBatch& batch, const std::vector<MicroRange>& ranges,
                                              std::vector<HostBatch>* kept) {
  if (batch.lengths.empty()) {
    kept->push_back(tp_ ? padded(batch, model_.lanes.lanes) : batch);
  } else {
    kept->resize(ranges.size());
    for (const MicroRange& range : ranges) {
      const auto number = static_cast<size_t>(range.number);
      HostBatch part = part_of(batch, range.begin, range.end, batch.lengths[number]);
      (*kept)[number] = tp_ ? padded(part, model_.lanes.lanes) : std::move(part);
    }
  }
  std::vector<DeviceBatch> uploaded;
  for (const HostBatch& part : *kept) uploaded.push_back(upload(*stream_, part));
  return uploaded;
}

void Engine::run_lanes(const std::vector<MicroRange>& ranges, const std::vector<DeviceBatch>& batches,
                       float loss_scale) {
  const auto context_of = [&](const MicroRange& range) {
    const int64_t first_sample = dp_rank_ * local_batch() + range.begin;
    const bool is_whole = batches.size() == 1;
    Context context = is_whole
                          ? make_context(batches[0], range.begin, range.end, first_sample, /*training=*/true)
                          : make_context(batches[static_cast<size_t>(range.number)], 0,
                                         range.end - range.begin, first_sample, /*training=*/true);
    context.loss_scale = loss_scale;
    return context;
  };
  params_.grads.begin_step();
  if (pipeline_) {
    pipeline_->train({.micro_batches = ranges, .context = context_of});
  } else {
    plan_visits(static_cast<int64_t>(ranges.size()), model_.layers.size(), /*with_backward=*/true);
    for (const MicroRange& range : ranges) run_micro_batch(context_of(range), range.completes_lane);
  }
  params_.grads.finish();
}

void Engine::measure_gradient() {
  zero_limbs(*stream_, square_sum_);
  // A loss that is not finite must stop the update as a gradient does (a target's logit of -inf gives
  // such a loss with finite gradients): its counts of NaN and inf go into the norm.
  const auto counts = [](const Tensor& limbs) { return limbs.slice(0, ExactSum::kDigits, ExactSum::kLimbs); };
  copy(*stream_, counts(loss_sum_), counts(square_sum_));
  // A slice that several replicas hold is cut once more: each adds the squares of its share.
  const int64_t replicas = dp_.size() / groups_.num_shards(), replica = dp_rank_ / groups_.num_shards();
  for (size_t unit = 0; unit < params_.grads.own().size(); ++unit) {
    // What all ranks of tp have alike counts once.
    const Tensor& grads = params_.grads.own()[unit];
    const bool counts_here = !tp_ || plan_.is_cut[unit] || tp_->rank() == 0;
    if (!grads.defined() || !counts_here) continue;
    const int64_t blocks = grads.numel() / ShardMap::kAlignment;
    const auto border = [&](int64_t i) { return blocks * i / replicas * ShardMap::kAlignment; };
    const Tensor share = grads.slice(0, border(replica), border(replica + 1));
    if (share.numel() > 0) exact_sum_squares(*stream_, share, square_sum_);
  }
  if (dp_.size() > 1) dp_.all_reduce(square_sum_, ReduceOp::kSum, *stream_)->wait_on(*stream_);
  if (tp_) tp_->group().all_reduce(square_sum_, ReduceOp::kSum, *stream_)->wait_on(*stream_);
  sum_along_pp(square_sum_);
  clip_scale(*stream_, square_sum_, options_.clip_norm, clip_scale_, 1.0 / scaler_.scale());
}

StepStats Engine::skip_step(StepStats stats) {
  stats.skipped = true;
  stats.not_finite = what_is_not_finite();
  const LossScalerOptions& scale = scaler_.options();
  const bool can_back_off = scale.dynamic && scaler_.scale() > scale.minimum;
  scaler_.update(/*overflowed=*/true);
  if (can_back_off || options_.max_skipped < 0 || ++skipped_in_a_row_ <= options_.max_skipped) {
    ++skipped_steps_;
    return stats;
  }
  const std::string before =
      options_.max_skipped == 0 ? "" : concat(" after ", options_.max_skipped, " skipped steps in a row");
  throw NumericError(
      concat("step ", applied_steps_ + 1, before, ": loss ", stats.loss, "; ", stats.not_finite,
             scale.dynamic ? ", and the loss scale is at its minimum" : "",
             ". Nothing was updated. Lower the learning rate or set clip_norm, and check the data"));
}

double Engine::read_sum(const Tensor& limbs) {
  ExactSum::Limbs values{};
  copy_to_host(*stream_, limbs, values.data());
  stream_->synchronize();
  return ExactSum(values).value();
}

StepStats Engine::train_step(const HostBatch& batch, double lr) {
  return train_step(batch, lr, "the caller's batch", nullptr);
}

StepStats Engine::train_step(const HostBatch& batch, double lr, const std::string& source,
                             std::exception_ptr refusal) {
  const std::vector<MicroRange> ranges = micro_ranges();
  try {
    if (!refusal) {
      require(batch.num_samples == local_batch(), "the batch has ", batch.num_samples,
              " samples; this rank expects ", local_batch(), " (global_batch=", options_.global_batch,
              " over dp=", dp_.size(), ")");
      check_batch(model_, batch, /*needs_targets=*/true);
      check_lengths(batch, ranges);
      require(std::isfinite(static_cast<float>(lr)) && lr >= 0, "learning rate ", lr,
              "; expected a finite number (in fp32), 0 or more");
    }
  } catch (const InvalidArgument&) {
    refusal = std::current_exception();
  }
  const int64_t valid = agree_everywhere(
      {{"learning rate", std::bit_cast<int64_t>(lr), concat(lr)},
       fact("number of steps so far", applied_steps_),
       {"loss scale", std::bit_cast<int64_t>(scaler_.scale()), concat(scaler_.scale())},
       fact("seq_len", batch.seq_len),
       fact("whether micro-batches have lengths of their own", batch.lengths.empty() ? 0 : 1),
       fact("source of samples", source)},
      refusal, count_valid(batch), {fact("batch", content_of(batch))});
  std::vector<HostBatch> kept;  // before what waits for the copies that read it
  const WaitAtExit wait(*stream_), wait_background(background());
  int64_t tokens = options_.global_batch * batch.seq_len;
  if (!batch.lengths.empty()) {
    tokens = 0;
    for (const MicroRange& range : ranges)
      tokens += (range.end - range.begin) * batch.lengths[static_cast<size_t>(range.number)];
    const std::vector<int64_t> all = gather_values(dp_, *stream_, {tokens});
    tokens = std::accumulate(all.begin(), all.end(), int64_t{0});
  }
  const std::vector<DeviceBatch> on_device = upload_parts(batch, ranges, &kept);
  zero_limbs(*stream_, loss_sum_);
  const double loss_scale = scaler_.scale();
  grad_scale_ = loss_scale;
  run_lanes(ranges, on_device,
            valid == 0 ? 0.0f : static_cast<float>(loss_scale / static_cast<double>(valid)));
  const std::unique_ptr<Work> loss_work = dp_.all_reduce(loss_sum_, ReduceOp::kSum, *stream_);
  loss_work->wait_on(*stream_);
  sum_along_pp(loss_sum_);
  measure_gradient();
  // Without a valid token there is nothing to learn from, and not even weight decay is applied.
  if (valid > 0) {
    optimizer_->step(*stream_, params_.weights.own(), params_.grads.own(), {.lr = lr, .scale = clip_scale_});
    params_.weights.gather_updated();
    if (pipeline_) pipeline_->share_weights();
  }
  if (pipeline_) pipeline_->wait();
  const double loss = valid == 0 ? 0.0 : read_sum(loss_sum_) / static_cast<double>(valid);
  const double norm = std::sqrt(read_sum(square_sum_)) / loss_scale;
  background().synchronize();  // a gather that failed
  loss_work->wait();           // over NCCL this alone tells that the group broke
  StepStats stats{loss, norm, tokens, valid, loss_scale};
  if (!std::isfinite(norm) || !std::isfinite(loss)) return skip_step(stats);
  if (valid == 0) {
    stats.skipped = true;
    ++skipped_steps_;
    return stats;
  }
  ++applied_steps_;
  skipped_in_a_row_ = 0;
  count_update();
  scaler_.update(/*overflowed=*/false);
  return stats;
}

StepStats Engine::train_step(const TokenDataset& data, const SampleOrder& order, int64_t step, double lr) {
  // On every rank alike, so that no rank is left waiting for one that found its sample missing.
  require(order.num_samples() <= data.num_samples(model_.max_seq_len), "the order has ", order.num_samples(),
          " samples; '", data.path(), "' has ", data.num_samples(model_.max_seq_len), " of ",
          model_.max_seq_len, " tokens");
  const int64_t first = step * options_.global_batch + dp_rank_ * local_batch();
  HostBatch batch;
  std::exception_ptr refusal;
  try {
    batch = read_samples(model_, data, local_batch(), [&](int64_t i) { return order(first + i); });
  } catch (const InvalidArgument&) {  // a token outside the vocabulary
    refusal = std::current_exception();
  }
  const std::string source = concat(samples_of(data), ", ", order.num_samples(), " samples in order of seed ",
                                    order.seed(), ", step ", step);
  return train_step(batch, lr, source, std::move(refusal));
}

void Engine::sum_along_pp(const Tensor& limbs) {
  if (pipeline_) pipeline_->group().all_reduce(limbs, ReduceOp::kSum, *stream_)->wait_on(*stream_);
}

int64_t Engine::num_parameters() const {
  int64_t elements = 0;
  for (const ParamSpec& spec : model_.registry.specs()) elements += spec.shape.numel();
  return elements;
}

}  // namespace polyreme
