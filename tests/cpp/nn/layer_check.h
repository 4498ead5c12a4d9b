// Runs a layer forward and backward and compares it with a float64 reference, with itself under
// another cut into micro-batches, and with its own cost().
#pragma once

#include <map>
#include <set>
#include <utility>

#include "nn/compose.h"
#include "nn/layers.h"
#include "nn/reference.h"
#include "ops/op_test.h"

namespace polyreme::testing {

using reference::Values;

// Samples in host memory, as a layer sees them.
struct TestBatch {
  int64_t samples = 4, seq = 5;
  std::vector<int32_t> tokens, targets;
  int64_t first_sample = 0;

  int64_t rows() const { return samples * seq; }
};

// A layer, its inputs, and what it should compute.
struct LayerCase {
  ParamRegistry registry;
  LayerPtr layer;
  TestBatch batch;
  int64_t in_features = 0;                 // 0: no input but the tokens
  std::vector<float> x;                    // [rows, in_features]
  std::vector<float> dy;                   // [rows, ...]; empty: the layer is a loss, scaled by loss_scale
  std::vector<std::vector<float>> params;  // in order of the registry
  bool training = true;
  uint64_t seed = 1234;
  uint32_t step = 3;
  float loss_scale = 0.25f;
  std::function<Values(const LayerCase& c, const Values& x, const std::vector<Values>& params)> reference;
};

inline RandomKey dropout_key(const LayerCase& c, uint32_t stream) {
  return {c.seed, RandomPurpose::kDropout, stream, c.step};
}

// Weights, and one accumulator for every use of every parameter.
class TestParams final : public ParamStorage {
 public:
  // All accumulators start with numbers drawn from `grad_seed`; 0: with zeros.
  TestParams(Rig& rig, const LayerCase& c, uint32_t grad_seed) {
    for (size_t i = 0; i < c.params.size(); ++i) {
      const Shape& shape = c.registry.specs()[i].shape;
      weights_.push_back(rig.upload(c.registry.specs()[i].dtype, shape, c.params[i]));
      for (int use = 0; use < c.registry.num_uses(static_cast<int>(i)); ++use) {
        std::vector<float> start(c.params[i].size(), 0.0f);
        if (grad_seed != 0)
          start = random_floats(start.size(), grad_seed + static_cast<uint32_t>(grads_.size()));
        grads_[{static_cast<int>(i), use}] = rig.upload(shape, start);
      }
    }
  }
  Tensor weight(const ParamUse& use) const override { return weights_.at(static_cast<size_t>(use.param)); }
  Tensor grad(const ParamUse& use) const override { return grads_.at({use.param, use.use}); }
  const std::map<std::pair<int, int>, Tensor>& grads() const { return grads_; }

 private:
  std::vector<Tensor> weights_;
  std::map<std::pair<int, int>, Tensor> grads_;  // by parameter and use
};

struct Outcome {
  std::vector<float> y, dx;
  std::map<std::pair<int, int>, std::vector<float>> grads;

  std::vector<float> joined() const {
    std::vector<float> all = y;
    append(all, dx);
    for (const auto& [use, grad] : grads) append(all, grad);
    return all;
  }
};

// The tensors of a case on a device.
struct Uploaded {
  Tensor tokens, targets, x, dy;

  Uploaded(Rig& rig, const LayerCase& c) {
    const Shape shape{c.batch.samples, c.batch.seq};
    if (!c.batch.tokens.empty())
      tokens = rig.upload(shape, c.batch.tokens);
    else
      tokens = rig.upload(shape, std::vector<int32_t>(static_cast<size_t>(c.batch.rows()), 0));
    if (!c.batch.targets.empty()) targets = rig.upload(shape, c.batch.targets);
    if (!c.x.empty()) x = rig.upload({c.batch.rows(), c.in_features}, c.x);
    if (!c.dy.empty())
      dy = rig.upload({c.batch.rows(), static_cast<int64_t>(c.dy.size()) / c.batch.rows()}, c.dy);
  }
  // Samples [begin, end).
  MicroBatch micro_batch(const LayerCase& c, int64_t begin, int64_t end) const {
    return {tokens.slice(0, begin, end), targets.defined() ? targets.slice(0, begin, end) : Tensor(),
            c.batch.first_sample + begin};
  }
};

inline Context make_context(Rig& rig, const LayerCase& c, const TestParams& params, const MicroBatch& batch) {
  return {rig.stream(), params, batch, c.training, c.seed, c.step, c.loss_scale};
}

// Forward and backward over micro-batches that end at the samples `ends`.
inline Outcome run_layer(Rig& rig, const LayerCase& c, const std::vector<int64_t>& ends,
                         uint32_t grad_seed = 0) {
  const Uploaded on_device(rig, c);
  const TestParams params(rig, c, grad_seed);
  Outcome outcome;
  int64_t begin = 0;
  for (const int64_t end : ends) {
    const auto rows = [&](const Tensor& t) {
      return t.defined() ? t.slice(0, begin * c.batch.seq, end * c.batch.seq) : t;
    };
    const Context context = make_context(rig, c, params, on_device.micro_batch(c, begin, end));
    Saved saved;
    append(outcome.y, rig.download(c.layer->forward(context, rows(on_device.x), &saved)));
    const Tensor dx = c.layer->backward_input(context, rows(on_device.dy), saved);
    EXPECT_EQ(dx.defined(), c.in_features > 0);
    if (dx.defined()) append(outcome.dx, rig.download(dx));
    c.layer->backward_weight(context, saved);
    begin = end;
  }
  for (const auto& [use, grad] : params.grads()) outcome.grads[use] = rig.download(grad);
  return outcome;
}

inline Values as_double(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// |got - expected| / |expected|, in the Euclidean norm.
inline double relative_error(const Values& got, const Values& expected) {
  EXPECT_EQ(got.size(), expected.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference) / std::sqrt(norm);
}

// Output, input gradient and every parameter gradient against the reference, and equal bits on all
// devices. `bound` is relative, norm by norm.
inline void expect_matches_reference(const LayerCase& c, double bound) {
  Outcome got;
  same_bits_everywhere([&](Rig& rig) {
    got = run_layer(rig, c, {c.batch.samples});
    return got.joined();
  });
  const Values x = as_double(c.x);
  std::vector<Values> params;
  for (const auto& values : c.params) params.push_back(as_double(values));
  const auto objective = [&](const Values& at_x, const std::vector<Values>& at_params) {
    const Values y = c.reference(c, at_x, at_params);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i)
      sum += y[i] * static_cast<double>(c.dy.empty() ? c.loss_scale : c.dy[i]);
    return sum;
  };
  EXPECT_LT(relative_error(as_double(got.y), c.reference(c, x, params)), bound) << "output";
  if (!c.x.empty()) {
    const Values expected = reference::gradient([&](const Values& at) { return objective(at, params); }, x);
    EXPECT_LT(relative_error(as_double(got.dx), expected), bound) << "input gradient";
  }
  for (size_t i = 0; i < params.size(); ++i) {
    Values total(params[i].size(), 0.0);
    for (const auto& [use, grad] : got.grads)
      if (use.first == static_cast<int>(i)) total = reference::add(total, as_double(grad));
    std::vector<Values> moved = params;
    const Values expected = reference::gradient(
        [&](const Values& at) {
          moved[i] = at;
          return objective(x, moved);
        },
        params[i]);
    EXPECT_LT(relative_error(total, expected), bound) << "gradient of " << c.registry.specs()[i].name;
  }
}

// Gradients continue from what the accumulators hold, and no cut of the samples changes a bit.
inline void expect_no_cut_shows(const LayerCase& c) {
  Rig rig;
  const std::vector<float> whole = run_layer(rig, c, {c.batch.samples}, 77).joined();
  for (const auto& ends : std::vector<std::vector<int64_t>>{{2, 4}, {1, 4}, {1, 2, 3, 4}})
    expect_same_bits(run_layer(rig, c, ends, 77).joined(), whole, concat("first cut at ", ends[0]));
}

// Bytes of the distinct buffers under `saved` that are not in `excluded`.
inline int64_t saved_buffer_bytes(const Saved& saved, std::set<const Buffer*>& excluded) {
  int64_t bytes = 0;
  for (const Tensor& tensor : saved.tensors)
    if (tensor.defined() && excluded.insert(tensor.buffer().get()).second)
      bytes += static_cast<int64_t>(tensor.buffer()->size_bytes());
  for (const Saved& child : saved.children) bytes += saved_buffer_bytes(child, excluded);
  return bytes;
}

inline double recorded_flops(Rig& rig) {
  rig.synchronize();
  double flops = 0;
  for (const Span& span : rig.device().recorder().spans()) flops += span.flops;
  rig.device().recorder().clear();
  return flops;
}

// cost() tells what the operations report, what Saved keeps (neither the batch nor the layer's own
// output, which its reader counts), and what the parameters take.
inline void expect_cost_is_true(const LayerCase& c) {
  Rig rig;
  const Uploaded on_device(rig, c);
  const TestParams params(rig, c, 0);
  const Cost cost = c.layer->cost(c.batch.samples, c.batch.seq);
  const Context context = make_context(rig, c, params, on_device.micro_batch(c, 0, c.batch.samples));
  rig.device().recorder().enable(true);
  Saved saved;
  const Tensor y = c.layer->forward(context, on_device.x, &saved);
  EXPECT_EQ(cost.forward_flops, recorded_flops(rig));
  std::set<const Buffer*> excluded = {on_device.tokens.buffer().get(), on_device.targets.buffer().get(),
                                      y.buffer().get()};
  EXPECT_EQ(cost.saved_bytes, saved_buffer_bytes(saved, excluded));
  c.layer->backward_input(context, on_device.dy, saved);
  EXPECT_EQ(cost.backward_input_flops, recorded_flops(rig));
  c.layer->backward_weight(context, saved);
  EXPECT_EQ(cost.backward_weight_flops, recorded_flops(rig));
  int64_t parameter_bytes = 0;
  for (const ParamSpec& spec : c.registry.specs())
    parameter_bytes += spec.padded_shape.numel() * static_cast<int64_t>(dtype_size(spec.dtype));
  EXPECT_EQ(cost.parameter_bytes, parameter_bytes);
}

}  // namespace polyreme::testing
