#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cmath>

#include "bindings/array_view.h"
#include "bindings/bindings.h"
#include "bindings/interruptible.h"
#include "bindings/optimizer_options.h"
#include "mesh/mesh.h"
#include "mesh/world.h"
#include "ops/update.h"
#include "optim/loss_scaler.h"
#include "optim/sharded_optimizer.h"

namespace py = pybind11;
using namespace py::literals;

namespace polyreme::bindings {
namespace {

using ParamTuple = std::tuple<std::string, std::vector<int64_t>, std::string>;  // name, shape, dtype

std::vector<ParamSpec> specs_of(const std::vector<ParamTuple>& params) {
  std::vector<ParamSpec> specs;
  for (const auto& [name, dims, dtype] : params) {
    const Shape shape{std::span(dims)};
    specs.push_back({.name = name, .shape = shape, .dtype = dtype_from_name(dtype), .padded_shape = shape});
  }
  return specs;
}

// A ShardedOptimizer whose arrays are Python's.
class ArrayOptimizer {
 public:
  ArrayOptimizer(World& world, const Mesh& mesh, const std::vector<std::string>& axes,
                 const std::vector<ParamTuple>& params, const ShardedOptimizerOptions& options)
      : device_(world.device()),
        world_(world.communicator()),
        core_(device_, world.background(), mesh.group(axes), specs_of(params), options) {}

  void add(int param, const py::object& grad) {
    const std::string& name = core_.specs().at(static_cast<size_t>(param)).name;
    try {
      const Tensor tensor = view_of(device_, grad, false, "gradient");
      const Interruptible call(&world_);
      core_.gradients().add(param, tensor);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(concat("gradient of '", name, "': ", error.what()));
    }
  }
  void end_micro_batch() {
    const Interruptible call(&world_);
    core_.gradients().end_micro_batch();
  }
  void restart() { core_.gradients().restart(); }
  // Empty: this rank can go on. Otherwise all ranks throw.
  void agree(const std::string& refusal) {
    const Interruptible call(&world_);
    core_.agree(refusal.empty() ? nullptr : std::make_exception_ptr(InvalidArgument(refusal)));
  }
  py::dict step(double lr, double loss_scale, int64_t count, bool counted) {
    ShardedStepResult result;
    {
      const Interruptible call(&world_);
      result = core_.step({.lr = lr, .loss_scale = loss_scale, .count = count, .counted = counted});
    }
    return py::dict("grad_norm"_a = result.grad_norm, "count"_a = result.count, "applied"_a = result.applied,
                    "culprit_param"_a = result.culprit_param, "culprit_rank"_a = result.culprit_rank);
  }
  // None for arrays that are left out.
  void read(const std::string& kind, const std::vector<py::object>& arrays) {
    std::vector<Tensor> out;
    for (size_t i = 0; i < arrays.size(); ++i)
      out.push_back(arrays[i].is_none() ? Tensor() : view_of(device_, arrays[i], true, name_of(i)));
    const Interruptible call(&world_);
    core_.read(kind, out);
  }
  void write(const std::string& kind, int param, const py::object& array) {
    const Tensor values = view_of(device_, array, false, name_of(static_cast<size_t>(param)));
    const Interruptible call(&world_);
    core_.write(kind, param, values);
  }
  // This rank's part of a kind of state: (param, first element, float32 values).
  std::vector<std::tuple<int, int64_t, py::array_t<float>>> pieces(const std::string& kind) {
    std::vector<std::tuple<int, int64_t, py::array_t<float>>> result;
    for (const ShardMap::Piece& piece : core_.map().pieces(core_.shard())) {
      const Tensor part = core_.piece(kind, piece);
      if (!part.defined()) continue;
      const HostMapping mapping(part.buffer());
      result.emplace_back(piece.param, piece.param_begin,
                          py::array_t<float>(piece.size, part.address<float>()));
    }
    return result;
  }
  std::vector<std::string> state_kinds() {
    std::vector<std::string> names;
    for (const OptimizerState& state : core_.rule().state()) names.push_back(state.name);
    return names;
  }
  bool has_state(const std::string& kind, int param) {
    for (const OptimizerState& state : core_.rule().state())
      if (state.name == kind) return state.slices[static_cast<size_t>(core_.map().unit_of(param))].defined();
    return false;
  }
  ShardedOptimizer& core() { return core_; }

 private:
  std::string name_of(size_t param) const { return concat("'", core_.specs().at(param).name, "'"); }

  Device& device_;
  Communicator& world_;
  ShardedOptimizer core_;
};

// Adds arrays to a norm, one call for one that many ranks share out; then scales.
class ArrayNorm {
 public:
  // world: null for a norm of this process alone.
  ArrayNorm(World* world, double p)
      : own_device_(world == nullptr ? make_cpu_device({}) : nullptr),
        device_(world == nullptr ? *own_device_ : world->device()),
        stream_(device_.create_stream("norm")),
        p_(p),
        sums_(empty(device_, DType::kI64, norm_shape(p), "norm")) {
    const std::vector<int64_t> zeros(static_cast<size_t>(sums_.numel()), 0);
    copy_from_host(*stream_, zeros.data(), sums_);
    stream_->synchronize();
  }
  void add(const py::object& array) {
    const Tensor x = view_of(device_, array, false, "clip_grad_norm: an array");
    const py::gil_scoped_release release;
    Tensor wide = x;
    if (x.dtype() != DType::kF32) {
      wide = empty(device_, DType::kF32, x.shape(), "widened");
      cast(*stream_, x, wide);
    }
    add_to_norm(*stream_, wide, p_, sums_);
    stream_->synchronize();
  }
  void reduce(const Mesh& mesh, const std::vector<std::string>& axes) {
    const Interruptible call(&mesh.group(axes));
    mesh.group(axes)
        .all_reduce(sums_, std::isinf(p_) ? ReduceOp::kMax : ReduceOp::kSum, *stream_)
        ->wait_on(*stream_);
    stream_->synchronize();
  }
  double value() {
    std::vector<int64_t> sums(static_cast<size_t>(sums_.numel()));
    copy_to_host(*stream_, sums_, sums.data());
    stream_->synchronize();
    return norm_value(sums, p_);
  }
  void scale(const py::object& array, double factor) {
    const Tensor x = view_of(device_, array, true, "clip_grad_norm: an array");
    const py::gil_scoped_release release;
    polyreme::scale(*stream_, x, static_cast<float>(factor));
    stream_->synchronize();
  }

 private:
  std::unique_ptr<Device> own_device_;
  Device& device_;
  std::unique_ptr<Stream> stream_;
  double p_;
  Tensor sums_;
};

void bind_loss_scaler(py::module_& m) {
  py::class_<LossScaler>(m, "LossScaler")
      .def(py::init([](bool dynamic, double initial, double growth, double backoff, int64_t interval,
                       double minimum, double maximum, int64_t hysteresis) {
             return LossScaler({dynamic, initial, growth, backoff, interval, minimum, maximum, hysteresis});
           }),
           py::kw_only(), "dynamic"_a, "initial"_a, "growth"_a, "backoff"_a, "interval"_a, "minimum"_a,
           "maximum"_a, "hysteresis"_a)
      .def_property_readonly("scale", &LossScaler::scale)
      .def("update", &LossScaler::update, "overflowed"_a)
      .def("state",
           [](const LossScaler& scaler) {
             const LossScalerState& state = scaler.state();
             return py::dict("scale"_a = state.scale, "good_steps"_a = state.good_steps,
                             "hysteresis_left"_a = state.hysteresis_left);
           })
      .def(
          "load",
          [](LossScaler& scaler, double scale, int64_t good_steps, int64_t hysteresis_left) {
            scaler.load({.scale = scale, .good_steps = good_steps, .hysteresis_left = hysteresis_left});
          },
          "scale"_a, "good_steps"_a, "hysteresis_left"_a);
}

}  // namespace

OptimizerOptions optimizer_options(const py::dict& rule) {
  const auto number = [&rule](const char* key) { return rule[key].cast<double>(); };
  return {.rule = rule["rule"].cast<std::string>(),
          .beta1 = number("beta1"),
          .beta2 = number("beta2"),
          .eps = number("eps"),
          .momentum = number("momentum"),
          .weight_decay = rule["weight_decay"].cast<std::vector<double>>(),
          .lr_multiplier = rule["lr_multiplier"].cast<std::vector<double>>(),
          .trainable = rule["trainable"].cast<std::vector<uint8_t>>(),
          .elementwise = rule["elementwise"].cast<std::vector<uint8_t>>(),
          .offload = rule["offload"].cast<bool>()};
}

void bind_optim(py::module_& m) {
  bind_loss_scaler(m);
  py::class_<ArrayOptimizer>(m, "ShardedOptimizer")
      .def(py::init([](World& world, const Mesh& mesh, const std::vector<std::string>& axes,
                       const std::vector<ParamTuple>& params, int stage, int64_t lanes, int64_t micro_batches,
                       int64_t bucket_bytes, const std::string& gradient_dtype, float clip_norm,
                       double norm_type, bool stochastic_rounding, uint64_t seed, const py::dict& rule) {
             const ShardedOptimizerOptions options{.stage = stage,
                                                   .lanes = lanes,
                                                   .micro_batches = micro_batches,
                                                   .bucket_bytes = bucket_bytes,
                                                   .wire = dtype_from_name(gradient_dtype),
                                                   .clip_norm = clip_norm,
                                                   .norm_type = norm_type,
                                                   .stochastic_rounding = stochastic_rounding,
                                                   .seed = seed,
                                                   .rule = optimizer_options(rule)};
             const Interruptible call(&world.communicator());
             return std::make_unique<ArrayOptimizer>(world, mesh, axes, params, options);
           }),
           "world"_a, "mesh"_a, "axes"_a, "params"_a, py::kw_only(), "stage"_a, "lanes"_a, "micro_batches"_a,
           "bucket_bytes"_a, "gradient_dtype"_a, "clip_norm"_a, "norm_type"_a, "stochastic_rounding"_a,
           "seed"_a, "rule"_a, py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("add", &ArrayOptimizer::add, "param"_a, "grad"_a)
      .def("end_micro_batch", &ArrayOptimizer::end_micro_batch)
      .def("restart", &ArrayOptimizer::restart)
      .def("agree", &ArrayOptimizer::agree, "refusal"_a)
      .def("step", &ArrayOptimizer::step, "lr"_a, "loss_scale"_a, "count"_a, "counted"_a)
      .def("read", &ArrayOptimizer::read, "kind"_a, "arrays"_a)
      .def("write", &ArrayOptimizer::write, "kind"_a, "param"_a, "array"_a)
      .def("pieces", &ArrayOptimizer::pieces, "kind"_a)
      .def("has_state", &ArrayOptimizer::has_state, "kind"_a, "param"_a)
      .def(
          "set_updates",
          [](ArrayOptimizer& self, std::vector<int64_t> updates) { self.core().rule().set_updates(updates); },
          "updates"_a)
      .def_property_readonly("updates", [](ArrayOptimizer& self) { return self.core().rule().updates(); })
      .def_property_readonly("state_kinds", &ArrayOptimizer::state_kinds)
      .def_property_readonly(
          "micro_batches_done",
          [](ArrayOptimizer& self) { return self.core().gradients().micro_batches_done(); })
      .def_property_readonly("persistent_bytes", [](ArrayOptimizer& self) {
        py::dict result;
        for (const auto& [name, bytes] : self.core().persistent_bytes()) result[py::str(name)] = bytes;
        return result;
      });
  py::class_<ArrayNorm>(m, "ArrayNorm")
      .def(py::init<World*, double>(), py::arg("world").none(true), "p"_a, py::keep_alive<1, 2>())
      .def("add", &ArrayNorm::add, "array"_a)
      .def("reduce", &ArrayNorm::reduce, "mesh"_a, "axes"_a)
      .def("value", &ArrayNorm::value)
      .def("scale", &ArrayNorm::scale, "array"_a, "factor"_a);
}

}  // namespace polyreme::bindings
