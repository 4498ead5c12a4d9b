#include "nn/parallel_layers.h"

#include <algorithm>
#include <limits>

#include "base/math.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

int64_t bytes_of(DType dtype, int64_t elements) { return static_cast<int64_t>(dtype_size(dtype)) * elements; }

Tensor new_activation(const Context& context, DType dtype, const Shape& shape, const char* label) {
  return empty(context.stream.device(), dtype, shape, label);
}

Tensor narrowed(const Context& context, const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  const Tensor out = new_activation(context, dtype, x.shape(), "sum of lanes");
  cast(context.stream, x, out);
  return out;
}

// Sent by a rank that gathers [rows, features] of which it has its tokens, or scatters sums of them.
int64_t exchange_bytes(const TensorLanes& lanes, DType dtype, int64_t rows, int64_t features) {
  return bytes_of(dtype, rows * features) / lanes.size * (lanes.size - 1);
}

// Of what every rank has of all tokens.
Tensor own_tokens_of(const Context& context, const Tensor& all) {
  const TensorParallel& tp = *context.tp;
  if (tp.size() == 1 || all.numel() == 0) return all;
  const int64_t samples = context.batch.num_samples(), rows = all.size(0) / samples, own = rows / tp.size();
  const Tensor result = new_activation(context, all.dtype(), {samples * own, all.size(1)}, "own tokens");
  for (int64_t sample = 0; sample < samples; ++sample) {
    const int64_t first = sample * rows + tp.rank() * own;
    copy(context.stream, all.slice(0, first, first + own), result.slice(0, sample * own, (sample + 1) * own));
  }
  return result;
}

ParamSpec vocabulary(const std::string& name, int64_t vocab, int64_t features, DType dtype, double init_std,
                     int64_t lanes) {
  ParamSpec spec;
  spec.name = name;
  spec.shape = {vocab, features};
  spec.padded_shape = {round_up(vocab, lanes), features};
  spec.dtype = dtype;
  spec.init = {ParamInit::Kind::kNormal, init_std};
  spec.cuts = {{.dim = 0, .axis = "tp"}};
  return spec;
}

}  // namespace

void for_token_lanes(const Context& context,
                     const std::function<void(const Context& lane, int64_t begin, int64_t end)>& body) {
  const int64_t samples = context.batch.num_samples(), own = context.own_tokens();
  const int64_t lanes = context.tp ? context.tp->lanes().count : 1, block = own / lanes;
  if (lanes == 1) return body(context, 0, samples * own);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const Context here = context.of_lane(lane);
    for (int64_t sample = 0; sample < samples; ++sample) {
      const int64_t begin = sample * own + lane * block;
      body(here, begin, begin + block);
    }
  }
}

// ---- LaneBranch ----

Tensor LaneBranch::forward(const Context& context, const Tensor& x, Saved* saved) const {
  const TensorParallel& tp = *context.tp;
  const int64_t samples = context.batch.num_samples();
  const Tensor all = tp.gather_tokens(context.stream, x, samples);
  LaneSum sum = tp.new_sum(context.stream.device(), all.shape());
  const auto lanes = static_cast<size_t>(tp.lanes().count);
  if (saved) saved->children.resize(lanes);
  for (size_t lane = 0; lane < lanes; ++lane)
    sum.add_lane(context.stream, inner_->forward(context.of_lane(static_cast<int64_t>(lane)), all,
                                                 saved ? &saved->children[lane] : nullptr));
  const Tensor own = tp.finish_own_tokens(context.stream, sum, samples);
  if (!options_.bias) return narrowed(context, own, options_.dtype);
  const Tensor y = new_activation(context, options_.dtype, own.shape(), "sum of lanes");
  add_rows(context.stream, own, context.weight(*options_.bias).view({1, options_.features}), y);
  return y;
}

Tensor LaneBranch::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  const TensorParallel& tp = *context.tp;
  const int64_t samples = context.batch.num_samples();
  saved.tensors = {dy};
  const Tensor all = tp.gather_tokens(context.stream, dy, samples);
  LaneSum sum = tp.new_sum(context.stream.device(), all.shape());
  for (size_t lane = 0; lane < saved.children.size(); ++lane)
    sum.add_lane(context.stream, inner_->backward_input(context.of_lane(static_cast<int64_t>(lane)), all,
                                                        saved.children[lane]));
  return narrowed(context, tp.finish_own_tokens(context.stream, sum, samples), options_.dtype);
}

void LaneBranch::backward_weight(const Context& context, Saved& saved) const {
  for (size_t lane = 0; lane < saved.children.size(); ++lane)
    inner_->backward_weight(context.of_lane(static_cast<int64_t>(lane)), saved.children[lane]);
  if (!options_.bias || !context.params.is_trainable(*options_.bias)) return;
  for_token_lanes(context, [&](const Context& lane, int64_t begin, int64_t end) {
    accumulate_rows(lane.stream, saved.tensors[0].slice(0, begin, end), lane.grad(*options_.bias));
  });
}

Cost LaneBranch::cost(int64_t num_samples, int64_t own_tokens) const {
  const TensorLanes& lanes = options_.lanes;
  const int64_t seq_len = own_tokens * lanes.size, rows = num_samples * seq_len;
  Cost cost;
  for (int64_t lane = 0; lane < lanes.local(); ++lane) cost += inner_->cost(num_samples, seq_len);
  // All lanes read the same gathered input.
  cost.saved_bytes -= (lanes.local() - 1) * bytes_of(options_.dtype, rows * options_.features);
  cost.bytes_moved += 4 * bytes_of(options_.dtype, rows * options_.features);
  if (options_.bias) cost.parameter_bytes += bytes_of(options_.dtype, options_.features);
  cost.comm_bytes += exchange_bytes(lanes, options_.dtype, rows, options_.features) +
                     exchange_bytes(lanes, DType::kF32, rows, options_.features);
  return cost;
}

// ---- LaneReplica ----

Tensor LaneReplica::forward(const Context& context, const Tensor& x, Saved* saved) const {
  const Tensor all = context.tp->gather_tokens(context.stream, x, context.batch.num_samples());
  if (saved) saved->children.resize(1);
  return own_tokens_of(context, inner_->forward(context, all, saved ? &saved->children[0] : nullptr));
}

Tensor LaneReplica::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  const Tensor all = context.tp->gather_tokens(context.stream, dy, context.batch.num_samples());
  return own_tokens_of(context, inner_->backward_input(context, all, saved.children[0]));
}

void LaneReplica::backward_weight(const Context& context, Saved& saved) const {
  if (context.tp->rank() == 0) inner_->backward_weight(context, saved.children[0]);
}

Cost LaneReplica::cost(int64_t num_samples, int64_t own_tokens) const {
  const int64_t rows = num_samples * own_tokens * lanes_.size;
  Cost cost = inner_->cost(num_samples, own_tokens * lanes_.size);
  cost.comm_bytes += exchange_bytes(lanes_, dtype_, rows, features_);
  return cost;
}

// ---- LaneEmbedding ----

LaneEmbedding::LaneEmbedding(ParamRegistry& registry, int64_t vocab, int64_t max_seq_len, int64_t features,
                             double init_std, DType dtype, const TensorLanes& lanes)
    : part_(ceil_div(vocab, lanes.lanes)),
      features_(features),
      max_seq_len_(max_seq_len),
      dtype_(dtype),
      lanes_(lanes) {
  tokens_ = registry.declare(vocabulary("wte.weight", vocab, features, dtype, init_std, lanes.lanes));
  if (max_seq_len == 0) return;
  ParamSpec positions;
  positions.name = "wpe.weight";
  positions.shape = {max_seq_len, features};
  positions.dtype = dtype;
  positions.init = {ParamInit::Kind::kNormal, init_std};
  positions.grad_reductions.push_back({"tp", GradReduction::kLaneSum});
  positions_ = registry.declare(std::move(positions));
}

Tensor LaneEmbedding::forward(const Context& context, const Tensor&, Saved*) const {
  const TensorParallel& tp = *context.tp;
  const int64_t samples = context.batch.num_samples(), seq = context.batch.seq_len();
  LaneSum sum = tp.new_sum(context.stream.device(), {samples * seq, features_});
  for (int64_t lane = 0; lane < tp.lanes().count; ++lane) {
    const Tensor rows = new_activation(context, DType::kF32, {samples, seq, features_}, "embedding");
    embedding_part_forward(context.stream, context.batch.tokens, context.of_lane(lane).weight(tokens_),
                           (tp.lanes().first + lane) * part_, rows);
    sum.add_lane(context.stream, rows.view({samples * seq, features_}));
  }
  const Tensor own = tp.finish_own_tokens(context.stream, sum, samples);
  if (max_seq_len_ == 0) return narrowed(context, own, dtype_);
  const Tensor out = new_activation(context, dtype_, own.shape(), "embedding");
  const int64_t first = tp.first_token(seq);
  add_rows(context.stream, own, context.weight(positions_).slice(0, first, first + tp.own_tokens(seq)), out);
  return out;
}

Tensor LaneEmbedding::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  // The tokens' gradient needs all of them. Gathered here rather than in backward_weight, in which no rank
  // may wait for another: a pipeline puts it anywhere.
  saved.tensors = {dy, context.tp->gather_tokens(context.stream, dy, context.batch.num_samples())};
  return {};
}

void LaneEmbedding::backward_weight(const Context& context, Saved& saved) const {
  const TensorParallel& tp = *context.tp;
  const int64_t samples = context.batch.num_samples(), seq = context.batch.seq_len();
  if (context.params.is_trainable(tokens_))
    for (int64_t lane = 0; lane < tp.lanes().count; ++lane)
      embedding_part_backward(context.stream, context.batch.tokens,
                              saved.tensors[1].view({samples, seq, features_}),
                              (tp.lanes().first + lane) * part_, context.of_lane(lane).grad(tokens_));
  if (max_seq_len_ == 0 || !context.params.is_trainable(positions_)) return;
  // Each lane its own, though in a micro-batch a position belongs to one alone: where lengths differ, it is
  // another one in the next.
  const int64_t own = tp.own_tokens(seq), block = own / tp.lanes().count;
  for (int64_t lane = 0; lane < tp.lanes().count; ++lane) {
    const int64_t first = tp.first_token(seq) + lane * block;
    const Tensor grad = context.of_lane(lane).grad(positions_).slice(0, first, first + block);
    for (int64_t sample = 0; sample < samples; ++sample) {
      const int64_t begin = sample * own + lane * block;
      add_to(context.stream, saved.tensors[0].slice(0, begin, begin + block), grad);
    }
  }
}

Cost LaneEmbedding::cost(int64_t num_samples, int64_t own_tokens) const {
  const int64_t rows = num_samples * own_tokens * lanes_.size;
  return {.bytes_moved = lanes_.local() * 2 * bytes_of(DType::kF32, rows * features_),
          .parameter_bytes = bytes_of(dtype_, (part_ * lanes_.local() + max_seq_len_) * features_),
          .comm_bytes = exchange_bytes(lanes_, DType::kF32, rows, features_)};
}

// ---- LaneHead ----

LaneHead::LaneHead(ParamRegistry& registry, const std::string& name, int64_t features, int64_t vocab,
                   const LaneHeadOptions& options)
    : features_(features),
      part_(ceil_div(vocab, options.lanes.lanes)),
      options_(options),
      owns_weight_(options.tied_to.empty()) {
  weight_ = owns_weight_ ? registry.declare(vocabulary(name + ".weight", vocab, features, options.dtype,
                                                       options.init_std, options.lanes.lanes))
                         : registry.declare_use(options.tied_to);
}

Tensor LaneHead::forward(const Context& context, const Tensor& x, Saved* saved) const {
  const TensorParallel& tp = *context.tp;
  const Tensor all = tp.gather_tokens(context.stream, x, context.batch.num_samples());
  if (saved) saved->tensors = {all};
  const int64_t lanes = tp.lanes().count, rows = all.size(0);
  const Tensor logits = new_activation(context, options_.out_dtype, {lanes, rows, part_}, "logits");
  for (int64_t lane = 0; lane < lanes; ++lane)
    gemm(context.stream, all, context.of_lane(lane).weight(weight_).transpose(0, 1),
         logits.slice(0, lane, lane + 1).view({rows, part_}), /*accumulate=*/false);
  return logits;
}

Tensor LaneHead::backward_input(const Context& context, const Tensor& dy, Saved& saved) const {
  const TensorParallel& tp = *context.tp;
  saved.tensors.push_back(dy);
  const int64_t rows = dy.size(1);
  LaneSum sum = tp.new_sum(context.stream.device(), {rows, features_});
  for (int64_t lane = 0; lane < tp.lanes().count; ++lane) {
    const Tensor dx = new_activation(context, DType::kF32, {rows, features_}, "head grad");
    gemm(context.stream, dy.slice(0, lane, lane + 1).view({rows, part_}),
         context.of_lane(lane).weight(weight_), dx, /*accumulate=*/false);
    sum.add_lane(context.stream, dx);
  }
  return narrowed(context, tp.finish_own_tokens(context.stream, sum, context.batch.num_samples()),
                  options_.dtype);
}

void LaneHead::backward_weight(const Context& context, Saved& saved) const {
  if (!context.params.is_trainable(weight_)) return;
  const Tensor& all = saved.tensors[0];
  const Tensor& dy = saved.tensors[1];
  for (int64_t lane = 0; lane < context.tp->lanes().count; ++lane) {
    bool adds = true;
    const Tensor grad = context.of_lane(lane).grad_to_write(weight_, &adds);
    gemm(context.stream, dy.slice(0, lane, lane + 1).view({all.size(0), part_}).transpose(0, 1), all, grad,
         /*accumulate=*/adds, {}, /*k_unit=*/context.batch.seq_len());
  }
}

Cost LaneHead::cost(int64_t num_samples, int64_t own_tokens) const {
  const int64_t rows = num_samples * own_tokens * options_.lanes.size,
                columns = part_ * options_.lanes.local();
  const double flops =
      2.0 * static_cast<double>(rows) * static_cast<double>(features_) * static_cast<double>(columns);
  return {.forward_flops = flops,
          .backward_input_flops = flops,
          .backward_weight_flops = flops,
          .bytes_moved = bytes_of(options_.dtype, rows * features_ + features_ * columns) +
                         bytes_of(options_.out_dtype, rows * columns),
          .parameter_bytes = owns_weight_ ? bytes_of(options_.dtype, features_ * columns) : 0,
          .saved_bytes = bytes_of(options_.dtype, rows * features_),
          .comm_bytes = exchange_bytes(options_.lanes, options_.dtype, rows, features_)};
}

// ---- LaneCrossEntropy ----

namespace {

LogitsPart part_of(const Context& context, const Tensor& logits, int64_t lane, int64_t vocab) {
  const int64_t rows = logits.size(1), part = logits.size(2);
  const int64_t first = (context.tp->lanes().first + lane) * part;
  return {logits.slice(0, lane, lane + 1).view({rows, part}), first,
          std::clamp<int64_t>(vocab - first, 0, part)};
}

}  // namespace

Tensor LaneCrossEntropy::forward(const Context& context, const Tensor& x, Saved* saved) const {
  const TensorParallel& tp = *context.tp;
  Stream& stream = context.stream;
  const int64_t rows = x.size(1), lanes = tp.lanes().count;
  const Tensor targets = context.batch.targets.view({rows});
  const Tensor top = new_activation(context, DType::kF32, {rows}, "largest logits");
  fill(stream, top, -std::numeric_limits<float>::infinity());
  for (int64_t lane = 0; lane < lanes; ++lane)
    cross_entropy_part_max(stream, part_of(context, x, lane, vocab_), top);
  tp.max_everywhere(stream, top);
  LaneSum sum = tp.new_sum(stream.device(), {2, rows});
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const Tensor sums = new_activation(context, DType::kF32, {2, rows}, "loss of a lane");
    cross_entropy_part_sums(stream, part_of(context, x, lane, vocab_), targets, top, sums);
    sum.add_lane(stream, sums);
  }
  const Tensor loss = new_activation(context, DType::kF32, {rows}, "loss");
  const Tensor log_sum_exp = new_activation(context, DType::kF32, {rows}, "loss log_sum_exp");
  cross_entropy_finish(stream, tp.finish_everywhere(stream, sum), targets, top, loss, log_sum_exp);
  if (saved) saved->tensors = {x, targets, log_sum_exp};
  return loss;
}

Tensor LaneCrossEntropy::backward_input(const Context& context, const Tensor&, Saved& saved) const {
  const Tensor& logits = saved.tensors[0];
  for (int64_t lane = 0; lane < context.tp->lanes().count; ++lane)
    cross_entropy_part_backward(context.stream, part_of(context, logits, lane, vocab_), saved.tensors[1],
                                saved.tensors[2], context.loss_scale);
  return logits;
}

Cost LaneCrossEntropy::cost(int64_t num_samples, int64_t own_tokens) const {
  const int64_t rows = num_samples * own_tokens * lanes_.size;
  const int64_t bytes = bytes_of(dtype_, rows * ceil_div(vocab_, lanes_.lanes) * lanes_.local());
  return {.bytes_moved = 2 * bytes,
          .saved_bytes = bytes + bytes_of(DType::kF32, rows),
          .comm_bytes = lanes_.size > 1 ? bytes_of(DType::kF32, 3 * rows) : 0};
}

// ---- ends of a model ----

LayerPtr build_embedding(ParamRegistry& registry, int64_t vocab, int64_t max_seq_len, int64_t features,
                         double init_std, DType dtype, const TensorLanes& lanes) {
  if (lanes.lanes == 1)
    return std::make_unique<Embedding>(registry, vocab, max_seq_len, features, init_std, dtype);
  return std::make_unique<LaneEmbedding>(registry, vocab, max_seq_len, features, init_std, dtype, lanes);
}

LayerPtr build_head(ParamRegistry& registry, const std::string& name, int64_t features, int64_t vocab,
                    const LaneHeadOptions& options) {
  if (options.lanes.lanes > 1) return std::make_unique<LaneHead>(registry, name, features, vocab, options);
  return std::make_unique<Linear>(registry, name, features, vocab,
                                  LinearOptions{.bias = false,
                                                .init_std = options.init_std,
                                                .cut = LinearCut::kColumn,
                                                .dtype = options.dtype,
                                                .out_dtype = options.out_dtype,
                                                .tied_to = options.tied_to});
}

LayerPtr build_loss(int64_t vocab, DType dtype, const TensorLanes& lanes) {
  if (lanes.lanes == 1) return std::make_unique<CrossEntropy>(vocab, dtype);
  return std::make_unique<LaneCrossEntropy>(vocab, dtype, lanes);
}

}  // namespace polyreme
