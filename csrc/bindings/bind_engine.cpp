#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/interruptible.h"
#include "bindings/optimizer_options.h"
#include "bindings/python_layer.h"
#include "engine/engine.h"
#include "mesh/world.h"
#include "nn/llama.h"

namespace py = pybind11;
using namespace py::literals;

namespace polyreme::bindings {
namespace {

using IntArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using ByteArray = py::array_t<uint8_t, py::array::c_style>;
using RangeArray = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;

HostBatch host_batch(const IntArray& tokens, const IntArray* targets) {
  require(tokens.ndim() == 2, "tokens have ", tokens.ndim(), " dims; expected [num_samples, seq_len]");
  HostBatch batch{.num_samples = tokens.shape(0), .seq_len = tokens.shape(1)};
  batch.tokens.assign(tokens.data(), tokens.data() + tokens.size());
  if (targets) {
    require(
        targets->ndim() == 2 && targets->shape(0) == tokens.shape(0) && targets->shape(1) == tokens.shape(1),
        "targets must have the shape of tokens, [", tokens.shape(0), ", ", tokens.shape(1), "]");
    batch.targets.assign(targets->data(), targets->data() + targets->size());
  }
  return batch;
}

// Rows of (part, begin, end).
std::vector<Engine::StateRange> state_ranges(const RangeArray& ranges) {
  require(ranges.ndim() == 2 && ranges.shape(1) == 3, "ranges: rows of (part, begin, end) are expected");
  const auto row = ranges.unchecked<2>();
  std::vector<Engine::StateRange> result;
  for (py::ssize_t i = 0; i < ranges.shape(0); ++i) result.push_back({row(i, 0), row(i, 1), row(i, 2)});
  return result;
}

py::dict stats_dict(const StepStats& stats) {
  return py::dict("loss"_a = stats.loss, "grad_norm"_a = stats.grad_norm, "tokens"_a = stats.tokens,
                  "valid_tokens"_a = stats.valid_tokens, "loss_scale"_a = stats.loss_scale,
                  "skipped"_a = stats.skipped, "not_finite"_a = stats.not_finite);
}

py::dict cost_dict(const Cost& cost) {
  return py::dict("forward_flops"_a = cost.forward_flops,
                  "backward_input_flops"_a = cost.backward_input_flops,
                  "backward_weight_flops"_a = cost.backward_weight_flops, "bytes_moved"_a = cost.bytes_moved,
                  "parameter_bytes"_a = cost.parameter_bytes, "saved_bytes"_a = cost.saved_bytes,
                  "comm_bytes"_a = cost.comm_bytes);
}

py::tuple shape_tuple(const Shape& shape) {
  py::tuple result(static_cast<size_t>(shape.size()));
  for (int i = 0; i < shape.size(); ++i) result[static_cast<size_t>(i)] = shape[i];
  return result;
}

py::list spec_list(const Model& model) {
  py::list result;
  for (const ParamSpec& spec : model.registry.specs()) {
    py::list cuts;
    for (const Cut& cut : spec.cuts)
      cuts.append(py::dict("dim"_a = cut.dim, "axis"_a = cut.axis, "blocks"_a = cut.blocks,
                           "replication"_a = cut.replication));
    result.append(py::dict("name"_a = spec.name, "shape"_a = shape_tuple(spec.shape),
                           "dtype"_a = dtype_name(spec.dtype), "tie_group"_a = spec.tie_group,
                           "weight_decay"_a = spec.weight_decay, "cuts"_a = cuts));
  }
  return result;
}

Shape param_shape(const Engine& engine, const std::string& name) {
  const ParamRegistry& registry = engine.model().registry;
  return registry.specs()[static_cast<size_t>(registry.index(name))].shape;
}

void bind_model(py::module_& m) {
  py::class_<GptConfig>(m, "GptConfig")
      .def(py::init([](int64_t layers, int64_t hidden, int64_t heads, int64_t vocab, int64_t seq_len,
                       int64_t mlp_hidden, float dropout, bool tied, float layer_norm_eps, double init_std,
                       const std::string& recompute, const std::string& dtype, const std::string& norm_dtype,
                       const std::string& logits_dtype, const py::dict& replace) {
             return GptConfig{.layers = layers,
                              .hidden = hidden,
                              .heads = heads,
                              .vocab = vocab,
                              .seq_len = seq_len,
                              .mlp_hidden = mlp_hidden,
                              .dropout = dropout,
                              .tied = tied,
                              .layer_norm_eps = layer_norm_eps,
                              .init_std = init_std,
                              .recompute = recompute_from_name(recompute),
                              .replacer = python_replacer(replace),
                              .dtype = dtype_from_name(dtype),
                              .norm_dtype = dtype_from_name(norm_dtype),
                              .logits_dtype = dtype_from_name(logits_dtype)};
           }),
           py::kw_only(), "layers"_a, "hidden"_a, "heads"_a, "vocab"_a, "seq_len"_a, "mlp_hidden"_a,
           "dropout"_a, "tied"_a, "layer_norm_eps"_a, "init_std"_a, "recompute"_a, "dtype"_a, "norm_dtype"_a,
           "logits_dtype"_a, "replace"_a);
  py::class_<LossScalerOptions>(m, "LossScalerOptions")
      .def(py::init([](bool dynamic, double initial, double growth, double backoff, int64_t interval,
                       double minimum, double maximum, int64_t hysteresis) {
             return LossScalerOptions{dynamic,  initial, growth,  backoff,
                                      interval, minimum, maximum, hysteresis};
           }),
           py::kw_only(), "dynamic"_a, "initial"_a, "growth"_a, "backoff"_a, "interval"_a, "minimum"_a,
           "maximum"_a, "hysteresis"_a);
  py::class_<LlamaConfig>(m, "LlamaConfig")
      .def(py::init([](int64_t layers, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t mlp_hidden,
                       int64_t vocab, int64_t seq_len, double rope_theta, float norm_eps, double init_std,
                       bool tied, const std::string& recompute, const std::string& dtype,
                       const std::string& norm_dtype, const std::string& logits_dtype,
                       const py::dict& replace) {
             return LlamaConfig{.layers = layers,
                                .hidden = hidden,
                                .heads = heads,
                                .kv_heads = kv_heads,
                                .mlp_hidden = mlp_hidden,
                                .vocab = vocab,
                                .seq_len = seq_len,
                                .rope_theta = rope_theta,
                                .norm_eps = norm_eps,
                                .init_std = init_std,
                                .tied = tied,
                                .recompute = recompute_from_name(recompute),
                                .replacer = python_replacer(replace),
                                .dtype = dtype_from_name(dtype),
                                .norm_dtype = dtype_from_name(norm_dtype),
                                .logits_dtype = dtype_from_name(logits_dtype)};
           }),
           py::kw_only(), "layers"_a, "hidden"_a, "heads"_a, "kv_heads"_a, "mlp_hidden"_a, "vocab"_a,
           "seq_len"_a, "rope_theta"_a, "norm_eps"_a, "init_std"_a, "tied"_a, "recompute"_a, "dtype"_a,
           "norm_dtype"_a, "logits_dtype"_a, "replace"_a);
  m.def(
      "model_param_specs", [](const ModelConfig& config) { return spec_list(build_model(config)); },
      "config"_a);
  m.def(
      "model_cost",
      [](const ModelConfig& config, int64_t num_samples, int64_t seq_len, int64_t tp, int64_t lanes_tp) {
        check_lanes("tp", lanes_tp, tp);
        return cost_dict(build_model(config, {lanes_tp, tp}).cost(num_samples, seq_len));
      },
      "config"_a, "num_samples"_a, "seq_len"_a, "tp"_a = 1, "lanes_tp"_a = 1);
}

std::unique_ptr<Engine> make_engine(
    World& world, Mesh& mesh, const ModelConfig& config, int64_t global_batch, int64_t micro_batch,
    int64_t lanes_dp, int64_t lanes_tp, uint64_t seed, float clip_norm, int zero_stage, int64_t shard_size,
    int64_t bucket_bytes, bool overlap, bool round_first, const std::string& gradient_dtype, int64_t prefetch,
    int64_t persist_below, bool gather_for_step, const LossScalerOptions& loss_scale, int64_t max_skipped,
    const py::dict& optimizer, const std::optional<pipeline::Schedule>& schedule, std::vector<int> split) {
  const EngineOptions options{.global_batch = global_batch,
                              .micro_batch = micro_batch,
                              .lanes_dp = lanes_dp,
                              .seed = seed,
                              .clip_norm = clip_norm,
                              .zero = {.stage = zero_stage,
                                       .shard_size = shard_size,
                                       .bucket_bytes = bucket_bytes,
                                       .overlap = overlap,
                                       .round_first = round_first,
                                       .wire = dtype_from_name(gradient_dtype),
                                       .prefetch = prefetch,
                                       .persist_below = persist_below,
                                       .gather_for_step = gather_for_step},
                              .loss_scale = loss_scale,
                              .max_skipped = max_skipped,
                              .optimizer = optimizer_options(optimizer),
                              .pipeline = {.schedule = schedule, .split = std::move(split)}};
  // Not as a call_guard, under which pybind11 would register the new object too.
  const Interruptible call(&world.communicator());
  const int64_t tp = mesh.layout().size("tp");
  const TensorLanes lanes{lanes_tp > 0 ? lanes_tp : tp, tp};
  check_lanes("tp", lanes.lanes, tp);
  const bool has_replacer = std::visit([](const auto& model) { return model.replacer != nullptr; }, config);
  require<NotAvailable>(!has_replacer || world.device().kind() == DeviceKind::kCpu,
                        "layers in Python work on memory of the host, not on ", world.device().description(),
                        "; train with device='cpu'");
  return std::make_unique<Engine>(world.device(), mesh, build_model(config, lanes), options);
}

void bind_steps(py::class_<Engine>& bound) {
  bound
      .def(
          "train_step",
          [](Engine& engine, const TokenDataset& data, const SampleOrder& order, int64_t step, double lr) {
            StepStats stats;
            {
              const Interruptible call(&engine.world());
              stats = engine.train_step(data, order, step, lr);
            }
            return stats_dict(stats);
          },
          "data"_a, "order"_a, "step"_a, "lr"_a)
      .def(
          "train_batch",
          [](Engine& engine, const IntArray& tokens, const IntArray& targets, double lr,
             std::vector<int64_t> lengths) {
            HostBatch batch = host_batch(tokens, &targets);
            batch.lengths = std::move(lengths);
            StepStats stats;
            {
              const Interruptible call(&engine.world());
              stats = engine.train_step(batch, lr);
            }
            return stats_dict(stats);
          },
          "tokens"_a, "targets"_a, "lr"_a, "lengths"_a = std::vector<int64_t>())
      .def(
          "evaluate",
          [](Engine& engine, const TokenDataset& data, int64_t first, int64_t num_samples) {
            StepStats stats;
            {
              const Interruptible call(&engine.world());
              stats = engine.evaluate(data, first, num_samples);
            }
            return stats_dict(stats);
          },
          "data"_a, "first"_a, "num_samples"_a)
      .def(
          "logits",
          [](Engine& engine, const IntArray& tokens) {
            const HostBatch batch = host_batch(tokens, nullptr);
            FloatArray result({batch.num_samples, batch.seq_len, engine.model().vocab});
            std::vector<float> values;
            {
              const Interruptible call(&engine.world());
              values = engine.logits(batch);
            }
            std::copy(values.begin(), values.end(), result.mutable_data());
            return result;
          },
          "tokens"_a);
}

void bind_params(py::class_<Engine>& bound) {
  bound
      .def(
          "read_param",
          [](Engine& engine, const std::string& name, const std::string& kind) {
            const Shape shape = param_shape(engine, name);
            FloatArray result(std::vector<py::ssize_t>(shape.begin(), shape.end()));
            std::vector<float> values;
            {
              const Interruptible call(&engine.world());
              values = engine.read_param(name, kind);
            }
            std::copy(values.begin(), values.end(), result.mutable_data());
            return result;
          },
          "name"_a, "kind"_a)
      .def(
          "write_param",
          [](Engine& engine, const std::string& name, const FloatArray& values) {
            engine.write_param(name, std::vector<float>(values.data(), values.data() + values.size()));
          },
          "name"_a, "values"_a)
      .def("check_replicas",
           [](Engine& engine) {
             const Interruptible call(&engine.world());
             return engine.check_replicas();
           })
      .def("memory", [](const Engine& engine) {
        py::list terms;
        for (const MemoryTerm& term : engine.memory())
          terms.append(py::make_tuple(term.name, term.bytes, term.stays, term.on_host));
        return terms;
      });
}

void bind_state(py::class_<Engine>& bound) {
  bound
      .def("state_parts",
           [](const Engine& engine) {
             const std::vector<ParamSpec>& specs = engine.model().registry.specs();
             py::list result;
             for (const StatePart& part : engine.state_parts())
               result.append(py::make_tuple(part.kind, specs[static_cast<size_t>(part.param)].name,
                                            dtype_name(part.tensor.dtype()), part.begin, part.size,
                                            part.part.dim, part.part.ranges));
             return result;
           })
      .def(
          "read_state",
          [](Engine& engine, const RangeArray& ranges, ByteArray& to) {
            const std::vector<Engine::StateRange> list = state_ranges(ranges);
            const std::span<std::byte> bytes(reinterpret_cast<std::byte*>(to.mutable_data()),
                                             static_cast<size_t>(to.nbytes()));
            const Interruptible call(&engine.world());
            engine.read_state(list, bytes);
          },
          "ranges"_a, "to"_a)
      .def(
          "write_state",
          [](Engine& engine, const RangeArray& ranges, const ByteArray& data) {
            const std::vector<Engine::StateRange> list = state_ranges(ranges);
            const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data.data()),
                                                   static_cast<size_t>(data.nbytes()));
            const py::gil_scoped_release release;
            engine.write_state(list, bytes);
          },
          "ranges"_a, "data"_a);
}

void bind_progress(py::class_<Engine>& bound) {
  bound.def_property_readonly("updates", [](const Engine& engine) { return engine.updates(); })
      .def("set_progress", &Engine::set_progress, "applied_steps"_a, "skipped_steps"_a, "skipped_in_a_row"_a,
           "updates"_a)
      .def_property_readonly("applied_steps", &Engine::applied_steps)
      .def_property_readonly("skipped_steps", &Engine::skipped_steps)
      .def_property_readonly("skipped_in_a_row", &Engine::skipped_in_a_row)
      .def_property(
          "loss_scaler_state",
          [](Engine& engine) {
            const LossScalerState& state = engine.loss_scaler().state();
            return std::tuple(state.scale, state.good_steps, state.hysteresis_left);
          },
          [](Engine& engine, const std::tuple<double, int64_t, int64_t>& state) {
            engine.loss_scaler().load({std::get<0>(state), std::get<1>(state), std::get<2>(state)});
          })
      .def_property_readonly("lanes_dp", [](const Engine& engine) { return engine.options().lanes_dp; })
      .def_property_readonly("lanes_tp", [](const Engine& engine) { return engine.model().lanes.lanes; })
      .def_property_readonly("num_parameters", [](const Engine& engine) { return engine.num_parameters(); });
}

}  // namespace

void bind_engine(py::module_& m) {
  bind_model(m);
  py::class_<Engine> bound(m, "Engine");
  bound.def(py::init(&make_engine), "world"_a, "mesh"_a, "config"_a, py::kw_only(), "global_batch"_a,
            "micro_batch"_a, "lanes_dp"_a, "lanes_tp"_a, "seed"_a, "clip_norm"_a, "zero_stage"_a,
            "shard_size"_a, "bucket_bytes"_a, "overlap"_a, "round_first"_a, "gradient_dtype"_a, "prefetch"_a,
            "persist_below"_a, "gather_for_step"_a, "loss_scale"_a, "max_skipped"_a, "optimizer"_a,
            "schedule"_a, "split"_a, py::keep_alive<1, 2>(), py::keep_alive<1, 3>());
  bind_steps(bound);
  bind_params(bound);
  bind_state(bound);
  bind_progress(bound);
}

}  // namespace polyreme::bindings
