#include "engine/engine.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/hash.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

int64_t checked_lanes(EngineOptions& options, const Communicator& dp) {
  if (options.lanes_dp == 0) options.lanes_dp = dp.size();
  const int64_t ranks = dp.size();
  check_lanes("dp", options.lanes_dp, ranks);
  require<NotAvailable>(options.zero_stage == 0 || options.zero_stage == 1, "zero=", options.zero_stage,
                        ": this version has ZeRO stages 0 and 1; use zero=1 to shard the optimizer state");
  require(options.micro_batch >= 1, "micro_batch=", options.micro_batch, "; expected at least 1");
  require(options.clip_norm >= 0, "clip_norm=", options.clip_norm, "; expected 0 (no limit) or more");
  require(options.global_batch >= ranks, "global_batch=", options.global_batch, " is less than dp=", ranks,
          ": some ranks would have no sample; use at least one sample per rank");
  require(options.global_batch % options.lanes_dp == 0, "global_batch=", options.global_batch,
          " is not divisible by lanes.dp=", options.lanes_dp,
          "; every lane needs the same number of samples");
  return options.lanes_dp / ranks;
}

// Units of 25 MB of gradients, the bucket size of DDP (Li et al. 2020).
ShardMap make_map(const ParamRegistry& registry, int64_t num_shards) {
  std::vector<int> blocks;
  for (int param = 0; param < static_cast<int>(registry.specs().size()); ++param)
    blocks.push_back(registry.layers_of(param).front());
  const UnitOptions options{.bucket_bytes = int64_t{25} << 20};
  return {registry.specs(), make_units(registry.specs(), blocks, options), num_shards};
}

// What tells data sets apart, whatever their files are called on each rank.
std::string samples_of(const TokenDataset& data) {
  return concat(data.num_tokens(), " tokens of vocabulary ", data.vocab_size());
}

// Host memory that operations read or write must outlive them, also where an error ends the call.
class WaitAtExit {
 public:
  explicit WaitAtExit(Stream& stream) : stream_(stream) {}
  ~WaitAtExit() {
    try {
      stream_.synchronize();
    } catch (...) {  // the error that ends the call is the one to report
    }
  }
  WaitAtExit(const WaitAtExit&) = delete;
  WaitAtExit& operator=(const WaitAtExit&) = delete;

 private:
  Stream& stream_;
};

int64_t count_valid(const HostBatch& batch) {
  return std::count_if(batch.targets.begin(), batch.targets.end(),
                       [](int32_t t) { return t != kIgnoreIndex; });
}

}  // namespace

Engine::Engine(Device& device, Mesh& mesh, Model model, const EngineOptions& options)
    : device_(device),
      dp_(mesh.group({"dp"})),
      dp_rank_(mesh.coordinate("dp")),
      model_(std::move(model)),
      options_(options),
      stream_(device.create_stream("compute")),
      local_lanes_(checked_lanes(options_, dp_)),
      params_(*stream_, model_.registry, make_map(model_.registry, options_.zero_stage == 0 ? 1 : dp_.size()),
              local_lanes_, dp_),
      optimizer_(make_optimizer(*stream_, params_.map(), params_.shard(), options_.optimizer)),
      loss_sum_(empty(device, DType::kI64, {ExactSum::kLimbs}, "loss sum")),
      square_sum_(empty(device, DType::kI64, {ExactSum::kLimbs}, "squared gradient sum")),
      clip_scale_(empty(device, DType::kF32, {1}, "clip scale")) {
  agree_on_settings();
  init_weights();
}

void Engine::init_weights() {
  const std::vector<ParamSpec>& specs = model_.registry.specs();
  for (size_t i = 0; i < specs.size(); ++i) {
    const Tensor weight = params_.weight({static_cast<int>(i), 0});
    if (specs[i].init.kind == ParamInit::Kind::kOnes) fill(*stream_, weight, 1.0f);
    if (specs[i].init.kind == ParamInit::Kind::kNormal) {
      const RandomKey key{options_.seed, RandomPurpose::kInit,
                          static_cast<uint32_t>(text_hash(specs[i].name)), 0};
      fill_normal(*stream_, weight, static_cast<float>(specs[i].init.std), key, 0);
    }
  }
  stream_->synchronize();
}

void Engine::check_batch(const HostBatch& batch, int64_t num_samples, bool needs_targets) const {
  require(batch.num_samples == num_samples, "the batch has ", batch.num_samples,
          " samples; this rank expects ", num_samples, " (global_batch=", options_.global_batch,
          " over dp=", dp_.size(), ")");
  require(batch.seq_len >= 1 && batch.seq_len <= model_.max_seq_len, "the batch has seq_len=", batch.seq_len,
          "; the model takes 1 to ", model_.max_seq_len);
  const auto size = static_cast<size_t>(batch.num_samples * batch.seq_len);
  const bool targets_fit = batch.targets.size() == size || (!needs_targets && batch.targets.empty());
  require(batch.tokens.size() == size && targets_fit, "the batch is said to be [", batch.num_samples, ", ",
          batch.seq_len, "], but has ", batch.tokens.size(), " tokens and ", batch.targets.size(),
          " targets");
  const auto vocab = static_cast<int32_t>(model_.vocab);
  for (size_t i = 0; i < batch.tokens.size(); ++i)
    require(batch.tokens[i] >= 0 && batch.tokens[i] < vocab, "token ", batch.tokens[i], " at sample ",
            i / static_cast<size_t>(batch.seq_len), ", position ", i % static_cast<size_t>(batch.seq_len),
            " is outside the model's vocabulary of ", vocab);
  for (size_t i = 0; i < batch.targets.size(); ++i)
    require((batch.targets[i] >= 0 && batch.targets[i] < vocab) || batch.targets[i] == kIgnoreIndex,
            "target ", batch.targets[i], " at sample ", i / static_cast<size_t>(batch.seq_len), ", position ",
            i % static_cast<size_t>(batch.seq_len), " is neither in the model's vocabulary of ", vocab,
            " nor ", kIgnoreIndex, " (ignored)");
}

HostBatch Engine::read_samples(const TokenDataset& data, int64_t count,
                               const std::function<int64_t(int64_t)>& sample) const {
  const int64_t seq_len = model_.max_seq_len;
  HostBatch batch{.num_samples = count, .seq_len = seq_len};
  try {
    batch.tokens.resize(static_cast<size_t>(count * seq_len));
    batch.targets.resize(static_cast<size_t>(count * seq_len));
  } catch (const std::exception&) {
    throw OutOfMemory(concat("out of host memory for ", count, " samples of ", seq_len,
                             " tokens; use a smaller global_batch or more ranks"));
  }
  for (int64_t i = 0; i < count; ++i)
    data.read_sample(sample(i), seq_len, model_.vocab, &batch.tokens[static_cast<size_t>(i * seq_len)],
                     &batch.targets[static_cast<size_t>(i * seq_len)]);
  return batch;
}

Engine::Fact Engine::fact(const char* name, const std::string& text) {
  return {name, static_cast<int64_t>(text_hash(text)), text};
}

int64_t Engine::agree(const std::vector<Fact>& facts, const std::exception_ptr& refusal, int64_t addend) {
  std::vector<int64_t> mine = {addend, refusal ? 1 : 0};
  for (const Fact& each : facts) mine.push_back(each.value);
  const auto width = static_cast<int64_t>(mine.size());
  std::vector<int64_t> all(mine.size() * static_cast<size_t>(dp_.size()));
  {
    const WaitAtExit wait(*stream_);
    const Tensor gathered = empty(device_, DType::kI64, {dp_.size() * width}, "facts");
    const Tensor own = gathered.slice(0, dp_rank_ * width, (dp_rank_ + 1) * width);
    copy_from_host(*stream_, mine.data(), own);
    dp_.all_gather(own, gathered, *stream_)->wait_on(*stream_);
    copy_to_host(*stream_, gathered, all.data());
    stream_->synchronize();
  }
  if (refusal) std::rethrow_exception(refusal);
  int64_t sum = 0;
  std::string different;
  for (int r = 0; r < dp_.size(); ++r) {
    const int64_t* theirs = &all[static_cast<size_t>(r * width)];
    sum += theirs[0];
    require(theirs[1] == 0, "dp rank ", r, " refused its batch; its own error says why. Nothing was done");
    for (size_t i = 0; i < facts.size(); ++i)
      if (theirs[i + 2] != facts[i].value)
        different += concat(different.empty() ? "" : "; ", "dp rank ", r, " has another ", facts[i].name,
                            " (here: ", facts[i].text, ")");
  }
  require(different.empty(), "the ranks disagree: ", different, ". Give every rank the same");
  return sum;
}

void Engine::agree_on_settings() {
  const OptimizerOptions& rule = options_.optimizer;
  std::string optimizer = concat(rule.rule, " betas=", rule.beta1, ",", rule.beta2, " eps=", rule.eps,
                                 " momentum=", rule.momentum, " weight_decay=");
  for (const double decay : rule.weight_decay) optimizer += concat(decay, " ");
  agree({fact("model", model_.description), fact("global_batch", concat(options_.global_batch)),
         fact("lanes.dp", concat(options_.lanes_dp)), fact("seed", concat(options_.seed)),
         fact("clip_norm", concat(options_.clip_norm)), fact("zero", concat(options_.zero_stage)),
         fact("optimizer", optimizer)},
        nullptr);
}

Engine::DeviceBatch Engine::upload(const HostBatch& batch) {
  const Shape shape{batch.num_samples, batch.seq_len};
  DeviceBatch result{empty(device_, DType::kI32, shape, "tokens"), {}};
  copy_from_host(*stream_, batch.tokens.data(), result.tokens);
  if (!batch.targets.empty()) {
    result.targets = empty(device_, DType::kI32, shape, "targets");
    copy_from_host(*stream_, batch.targets.data(), result.targets);
  }
  return result;
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
          .step = static_cast<uint32_t>(applied_steps_)};
}

Tensor Engine::run_forward(const Context& context, size_t num_layers, std::vector<Saved>* saved) const {
  if (saved) saved->resize(num_layers);
  Tensor x;
  for (size_t i = 0; i < num_layers; ++i)
    x = model_.layers[i]->forward(context, x, saved ? &(*saved)[i] : nullptr);
  return x;
}

void Engine::run_backward(const Context& context, std::vector<Saved>& saved) const {
  Tensor grad;
  for (size_t i = model_.layers.size(); i-- > 0;) {
    grad = model_.layers[i]->backward_input(context, grad, saved[i]);
    model_.layers[i]->backward_weight(context, saved[i]);
    saved[i] = {};  // its activations are free for the layers below
  }
}

void Engine::run_lanes(const DeviceBatch& batch, float loss_scale) {
  const int64_t lane_samples = options_.global_batch / options_.lanes_dp;
  const int64_t first_of_rank = dp_rank_ * local_batch();
  params_.begin_step();
  for (int64_t lane_begin = 0; lane_begin < local_batch(); lane_begin += lane_samples) {
    params_.begin_lane(*stream_);
    for (int64_t begin = lane_begin; begin < lane_begin + lane_samples; begin += options_.micro_batch) {
      const int64_t end = std::min(begin + options_.micro_batch, lane_begin + lane_samples);
      Context context = make_context(batch, begin, end, first_of_rank + begin, /*training=*/true);
      context.loss_scale = loss_scale;
      std::vector<Saved> saved;
      const Tensor loss = run_forward(context, model_.layers.size(), &saved);
      exact_sum(*stream_, loss, loss_sum_);
      run_backward(context, saved);
    }
    params_.end_lane(*stream_);
  }
}

void Engine::measure_gradient() {
  zero_limbs(*stream_, square_sum_);
  // A loss that is not finite must stop the update as a gradient does (a target's logit of -inf gives
  // such a loss with finite gradients): its counts of NaN and inf go into the norm.
  const auto counts = [](const Tensor& limbs) { return limbs.slice(0, ExactSum::kDigits, ExactSum::kLimbs); };
  copy(*stream_, counts(loss_sum_), counts(square_sum_));
  for (const Tensor& grads : params_.own_grads()) exact_sum_squares(*stream_, grads, square_sum_);
  if (params_.is_sharded()) dp_.all_reduce(square_sum_, ReduceOp::kSum, *stream_)->wait_on(*stream_);
  clip_scale(*stream_, square_sum_, options_.clip_norm, clip_scale_);
}

double Engine::read_sum(const Tensor& limbs) {
  ExactSum::Limbs values;
  copy_to_host(*stream_, limbs, values.data());
  stream_->synchronize();
  return ExactSum(values).value();
}

StepStats Engine::train_step(const HostBatch& batch, double lr) {
  return train_step(batch, lr, "the caller's batch", nullptr);
}

StepStats Engine::train_step(const HostBatch& batch, double lr, const std::string& source,
                             std::exception_ptr refusal) {
  try {
    if (!refusal) {
      check_batch(batch, local_batch(), /*needs_targets=*/true);
      require(std::isfinite(static_cast<float>(lr)) && lr >= 0, "learning rate ", lr,
              "; expected a finite number (in fp32), 0 or more");
    }
  } catch (const InvalidArgument&) {
    refusal = std::current_exception();
  }
  const int64_t valid = agree({{"learning rate", std::bit_cast<int64_t>(lr), concat(lr)},
                               {"seq_len", batch.seq_len, concat(batch.seq_len)},
                               fact("source of samples", source)},
                              refusal, count_valid(batch));
  const WaitAtExit wait(*stream_);
  const DeviceBatch on_device = upload(batch);
  zero_limbs(*stream_, loss_sum_);
  run_lanes(on_device, valid == 0 ? 0.0f : static_cast<float>(1.0 / static_cast<double>(valid)));
  params_.finish(*stream_);
  dp_.all_reduce(loss_sum_, ReduceOp::kSum, *stream_)->wait_on(*stream_);
  measure_gradient();
  // Without a valid token there is nothing to learn from, and not even weight decay is applied.
  if (valid > 0) {
    optimizer_->step(*stream_, params_.own_weights(), params_.own_grads(), clip_scale_, lr,
                     applied_steps_ + 1);
    params_.gather_weights(*stream_);
  }
  const double loss = valid == 0 ? 0.0 : read_sum(loss_sum_) / static_cast<double>(valid);
  const double norm = std::sqrt(read_sum(square_sum_));
  if (!std::isfinite(norm) || !std::isfinite(loss))
    throw NumericError(
        concat("step ", applied_steps_ + 1, ": loss ", loss, "; ", what_is_not_finite(),
               ". Nothing was updated. Lower the learning rate or set clip_norm, and check the data"));
  if (valid > 0) ++applied_steps_;
  return {loss, norm, options_.global_batch * batch.seq_len, valid};
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
    batch = read_samples(data, local_batch(), [&](int64_t i) { return order(first + i); });
  } catch (const InvalidArgument&) {  // a token outside the vocabulary
    refusal = std::current_exception();
  }
  const std::string source = concat(samples_of(data), ", ", order.num_samples(), " samples in order of seed ",
                                    order.seed(), ", step ", step);
  return train_step(batch, lr, source, std::move(refusal));
}

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
    batch = read_samples(data, count, [&](int64_t i) { return first + begin + i; });
  } catch (const InvalidArgument&) {  // a token outside the vocabulary
    refusal = std::current_exception();
  }
  agree({fact("source of samples", concat(samples_of(data), ", from ", first, " on ", num_samples))},
        refusal);
  const WaitAtExit wait(*stream_);
  zero_limbs(*stream_, loss_sum_);
  if (count > 0) {
    const DeviceBatch on_device = upload(batch);
    for (int64_t i = 0; i < count; i += options_.micro_batch) {
      const int64_t end = std::min(i + options_.micro_batch, count);
      const Context context = make_context(on_device, i, end, begin + i, /*training=*/false);
      exact_sum(*stream_, run_forward(context, model_.layers.size(), nullptr), loss_sum_);
    }
  }
  dp_.all_reduce(loss_sum_, ReduceOp::kSum, *stream_)->wait_on(*stream_);
  const int64_t tokens = num_samples * batch.seq_len;
  return {read_sum(loss_sum_) / static_cast<double>(tokens), 0.0, tokens, tokens};
}

std::vector<float> Engine::logits(const HostBatch& batch) {
  check_batch(batch, batch.num_samples, /*needs_targets=*/false);
  std::vector<float> result(static_cast<size_t>(batch.num_samples * batch.seq_len * model_.vocab));
  if (batch.num_samples == 0) return result;
  const WaitAtExit wait(*stream_);
  const Context context = make_context(upload(batch), 0, batch.num_samples, 0, /*training=*/false);
  copy_to_host(*stream_, run_forward(context, model_.layers.size() - 1, nullptr), result.data());
  stream_->synchronize();
  return result;
}

std::string Engine::first_not_finite(const std::string& kind) {
  std::vector<bool> is_finite(static_cast<size_t>(map().num_params()));
  for (int unit = 0; unit < map().num_units(); ++unit) {
    const Tensor buffer = unit_buffer(kind, unit);
    for (const int param : map().params_of(unit)) {
      zero_limbs(*stream_, square_sum_);
      exact_sum_squares(*stream_, map().view(buffer, param), square_sum_);
      is_finite[static_cast<size_t>(param)] = std::isfinite(read_sum(square_sum_));
    }
  }
  const auto bad =
      static_cast<size_t>(std::find(is_finite.begin(), is_finite.end(), false) - is_finite.begin());
  return bad < is_finite.size() ? model_.registry.specs()[bad].name : std::string();
}

std::string Engine::what_is_not_finite() {
  // A bad weight spoils every gradient, so it is the better name.
  const std::string weight = first_not_finite("weight");
  if (!weight.empty()) return concat("the weight '", weight, "' was not finite before the step");
  const std::string grad = first_not_finite("grad");
  if (!grad.empty()) return concat("the gradient of '", grad, "' is not finite (the first such parameter)");
  return "every gradient is finite, but the loss of a token is not";
}

Tensor Engine::unit_buffer(const std::string& kind, int unit) {
  if (kind == "weight") return params_.weights(unit);
  std::string known = "weight, grad";
  if (kind == "grad") {
    require(params_.has_grads(), "there is no gradient before the first step");
    return params_.gathered(*stream_, params_.own_grads()[static_cast<size_t>(unit)], unit);
  }
  for (const auto& [name, tensor] : optimizer_->state()) {
    const int64_t begin = map().shard_offset(unit);
    const int64_t size = map().unit_elements(unit) / map().num_shards();
    if (name == kind) return params_.gathered(*stream_, tensor.slice(0, begin, begin + size), unit);
    known += ", " + name;
  }
  throw InvalidArgument(concat("unknown kind '", kind, "'; expected one of ", known));
}

std::vector<float> Engine::read_param(const std::string& name, const std::string& kind) {
  const int param = model_.registry.index(name);
  const Tensor part = map().view(unit_buffer(kind, map().unit_of(param)), param);
  std::vector<float> values(static_cast<size_t>(part.numel()));
  copy_to_host(*stream_, part, values.data());
  stream_->synchronize();
  return values;
}

void Engine::write_param(const std::string& name, const std::vector<float>& values) {
  const Tensor part = params_.weight({model_.registry.index(name), 0});
  require(static_cast<int64_t>(values.size()) == part.numel(), "parameter '", name, "' has ",
          part.shape().to_string(), " = ", part.numel(), " elements, got ", values.size());
  copy_from_host(*stream_, values.data(), part);
  stream_->synchronize();
}

}  // namespace polyreme
