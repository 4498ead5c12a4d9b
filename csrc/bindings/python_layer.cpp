#include "bindings/python_layer.h"

#include <pybind11/numpy.h>

#include <map>

#include "base/error.h"
#include "device/cpu/cpu_device.h"
#include "nn/parallel_layers.h"
#include "ops/ops.h"
#include "tensor/access.h"

namespace py = pybind11;
using namespace py::literals;

namespace polyreme::bindings {
namespace {

// A Python object that threads without the GIL may copy, pass on and let go of.
using Shared = std::shared_ptr<py::object>;

Shared share(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

// The tensor's memory as an array, which keeps it alive. fp32, contiguous.
py::array view(const Tensor& tensor) {
  auto* owner = new std::shared_ptr<Buffer>(tensor.buffer());
  const py::capsule base(owner, [](void* held) { delete static_cast<std::shared_ptr<Buffer>*>(held); });
  return py::array_t<float>(std::vector<py::ssize_t>(tensor.shape().begin(), tensor.shape().end()),
                            static_cast<float*>(tensor.raw_address()), base);
}

// By name; undefined ones are left out.
using Named = std::vector<std::pair<std::string, Tensor>>;

py::dict views(const Named& tensors) {
  py::dict result;
  for (const auto& [name, tensor] : tensors)
    if (tensor.defined()) result[py::str(name)] = view(tensor);
  return result;
}

// What a layer's methods share for one micro-batch: set by the forward, once it runs.
struct Call {
  Shared object;
};

class PythonLayer final : public Layer {
 public:
  PythonLayer(ParamRegistry& registry, Place place, Shared runner)
      : place_(std::move(place)), runner_(std::move(runner)) {
    const py::gil_scoped_acquire gil;
    for (const py::handle item : runner_->attr("parameters")(place_.in, place_.out)) declare(registry, item);
    const bool joins = place_.cut == PlaceCut::kIn || place_.cut == PlaceCut::kOut;
    require(place_.lanes.lanes == 1 || !joins || is_cut_, "the layer '", place_.name, "' (", description(),
            ") with lanes.tp=", place_.lanes.lanes, ": tensor parallelism cuts its ",
            place_.cut == PlaceCut::kIn ? "inputs" : "outputs",
            ", but none of its parameters; declare them with cut='",
            place_.cut == PlaceCut::kIn ? "row" : "column", "', or use tp=1");
  }

  // Whether it has parameters that tp cuts, which is then one lane's part of a sum.
  bool is_cut() const { return is_cut_; }

  Tensor forward(const Context& context, const Tensor& x, Saved* saved) const override {
    const Tensor input = wide(context, x);
    const Tensor output = new_fp32(context, {x.size(0), own_out()}, "output of a Python layer");
    const auto call = std::make_shared<Call>();
    if (saved) {
      saved->tensors = {input};
      saved->foreign = call;
    }
    const py::ssize_t samples = context.batch.num_samples(), seq_len = context.batch.seq_len();
    run(context, "forward", {{"x", input}}, weights(context), output,
        [call, samples, seq_len, training = context.training, first = context.batch.first_sample,
         step = context.step, seed = context.seed, lane = lane_of(context),
         lanes = is_per_lane() ? place_.lanes.lanes : 1](const py::object& runner) {
          call->object =
              share(runner.attr("begin")(samples, seq_len, training, first, step, seed, lane, lanes));
          return call;
        });
    const bool is_sum = is_per_lane() && (place_.cut == PlaceCut::kWhole || place_.cut == PlaceCut::kIn);
    return is_sum ? output : narrow(context, output);
  }

  Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const override {
    const Tensor grad = wide(context, dy);
    saved.tensors.push_back(grad);
    const Tensor input_grad = new_fp32(context, saved.tensors[0].shape(), "input gradient of a Python layer");
    run(context, "backward_input", {{"x", saved.tensors[0]}, {"dy", grad}}, weights(context), input_grad,
        again(saved));
    const bool is_sum = is_per_lane() && (place_.cut == PlaceCut::kWhole || place_.cut == PlaceCut::kOut);
    return is_sum ? input_grad : narrow(context, input_grad);
  }

  void backward_weight(const Context& context, Saved& saved) const override {
    Named grads;
    for (size_t i = 0; i < uses_.size(); ++i)
      if (context.params.is_trainable(uses_[i])) grads.emplace_back(names_[i], context.grad(uses_[i]));
    if (grads.empty()) return;
    run(context, "backward_weight", {{"x", saved.tensors[0]}, {"dy", saved.tensors[1]}}, grads, {},
        again(saved));
  }

  Cost cost(int64_t num_samples, int64_t seq_len) const override {
    const py::gil_scoped_acquire gil;
    const py::dict given = runner_->attr("cost")(num_samples, seq_len);
    // Of the whole layer, which the lanes share.
    const double parts = is_per_lane() ? static_cast<double>(place_.lanes.lanes) : 1.0;
    const auto number = [&given, parts](const char* name) {
      return given.contains(name) ? given[name].cast<double>() / parts : 0.0;
    };
    const int64_t rows = num_samples * seq_len, bytes = static_cast<int64_t>(sizeof(float));
    return {.forward_flops = number("forward_flops"),
            .backward_input_flops = number("backward_input_flops"),
            .backward_weight_flops = number("backward_weight_flops"),
            .bytes_moved = bytes * rows * (own_in() + own_out()),
            .parameter_bytes = bytes * parameters_,
            .saved_bytes = bytes * rows * own_in() + static_cast<int64_t>(number("saved_bytes"))};
  }

 private:
  using Begin = std::function<std::shared_ptr<Call>(const py::object& runner)>;

  void declare(ParamRegistry& registry, const py::handle item) {
    ParamSpec spec;
    const auto name = item["name"].cast<std::string>();
    spec.name = place_.name + "." + name;
    std::vector<int64_t> sizes;
    for (const py::handle size : item["shape"]) sizes.push_back(size.cast<int64_t>());
    spec.shape = Shape(std::span<const int64_t>(sizes));
    spec.weight_decay =
        item["weight_decay"].is_none() ? spec.shape.size() >= 2 : item["weight_decay"].cast<bool>();
    const auto init = item["init"].cast<double>();  // < 0: ones
    spec.init = init < 0    ? ParamInit{ParamInit::Kind::kOnes}
                : init == 0 ? ParamInit{ParamInit::Kind::kZeros}
                            : ParamInit{ParamInit::Kind::kNormal, init};
    if (const auto dim = item["cut"].cast<int>(); dim >= 0) {
      spec.cuts = {{.dim = dim, .axis = "tp", .blocks = item["blocks"].cast<int64_t>()}};
      is_cut_ = true;
    } else {
      spec.grad_reductions.push_back({"tp", GradReduction::kLaneSum});
    }
    parameters_ += local_shape(spec, "tp", place_.lanes.lanes).numel();  // refuses what does not divide
    names_.push_back(name);
    uses_.push_back(registry.declare(std::move(spec)));
  }

  // Whether it computes one lane of tp, and not the whole.
  bool is_per_lane() const { return place_.lanes.lanes > 1 && (place_.is_in_branch() || is_cut_); }
  int64_t lane_of(const Context& context) const {
    return is_per_lane() ? context.tp->lanes().first + context.lane : 0;
  }
  int64_t own_in() const {
    const bool is_part = place_.cut == PlaceCut::kIn || place_.cut == PlaceCut::kBoth;
    return is_part ? place_.in / place_.lanes.lanes : place_.in;
  }
  int64_t own_out() const {
    const bool is_part = place_.cut == PlaceCut::kOut || place_.cut == PlaceCut::kBoth;
    return is_part ? place_.out / place_.lanes.lanes : place_.out;
  }
  std::string description() const { return runner_->attr("description").cast<std::string>(); }

  Named weights(const Context& context) const {
    Named result;
    for (size_t i = 0; i < uses_.size(); ++i) result.emplace_back(names_[i], context.weight(uses_[i]));
    return result;
  }

  static Begin again(const Saved& saved) {
    return [call = std::static_pointer_cast<Call>(saved.foreign)](const py::object&) { return call; };
  }

  static Tensor new_fp32(const Context& context, const Shape& shape, const char* label) {
    return empty(context.stream.device(), DType::kF32, shape, label);
  }

  static Tensor wide(const Context& context, const Tensor& x) {
    if (x.dtype() == DType::kF32) return x;
    const Tensor result = new_fp32(context, x.shape(), "input of a Python layer");
    cast(context.stream, x, result);
    return result;
  }

  Tensor narrow(const Context& context, const Tensor& x) const {
    if (place_.dtype == DType::kF32) return x;
    const Tensor result = empty(context.stream.device(), place_.dtype, x.shape(), "output of a Python layer");
    cast(context.stream, x, result);
    return result;
  }

  // Enqueues runner.<method>(call, inputs, parameters, output). In backward_weight `parameters` are
  // gradients.
  void run(const Context& context, const char* method, Named inputs, Named parameters, const Tensor& output,
           Begin begin) const {
    std::vector<Access> accesses;
    for (const auto& [name, tensor] : inputs) accesses.push_back(reads(tensor));
    const bool adds = !output.defined();
    for (const auto& [name, tensor] : parameters) {
      accesses.push_back(reads(tensor));
      if (adds) accesses.push_back(writes(tensor));
    }
    if (!adds) accesses.push_back(writes(output));
    as_cpu(context.stream)
        .enqueue({"python layer", OpKind::kOther}, std::move(accesses),
                 [runner = runner_, place = place_.name, method, inputs = std::move(inputs),
                  parameters = std::move(parameters), output, begin = std::move(begin)](const CpuContext&) {
                   const py::gil_scoped_acquire gil;
                   try {
                     const std::shared_ptr<Call> call = begin(*runner);
                     runner->attr(method)(*call->object, views(inputs), views(parameters),
                                          output.defined() ? py::object(view(output)) : py::none());
                   } catch (const py::error_already_set& error) {  // which must not outlive the GIL
                     throw Error(concat("the layer '", place, "' failed in ", method, ": ", error.what()));
                   }
                 });
  }

  Place place_;
  Shared runner_;
  std::vector<std::string> names_;
  std::vector<ParamUse> uses_;
  int64_t parameters_ = 0;
  bool is_cut_ = false;
};

class PythonReplacer final : public LayerReplacer {
 public:
  explicit PythonReplacer(const py::dict& runners) {
    for (const auto& [place, runner] : runners) {
      runners_[place.cast<std::string>()] = share(py::reinterpret_borrow<py::object>(runner));
      description_ += concat(description_.empty() ? "" : ", ", place.cast<std::string>(), "=",
                             runner.attr("description").cast<std::string>());
    }
  }

  LayerPtr make(ParamRegistry& registry, const Place& place) const override {
    const auto found = runners_.find(place.name);
    if (found == runners_.end()) return nullptr;
    auto layer = std::make_unique<PythonLayer>(registry, place, found->second);
    if (place.lanes.lanes == 1 || place.is_in_branch()) return layer;
    if (!layer->is_cut())
      return std::make_unique<LaneReplica>(std::move(layer), place.in, place.dtype, place.lanes);
    return std::make_unique<LaneBranch>(
        std::move(layer),
        LaneBranchOptions{.lanes = place.lanes, .features = place.in, .dtype = place.dtype, .bias = {}});
  }
  std::string description() const override { return description_; }

 private:
  std::map<std::string, Shared> runners_;
  std::string description_;
};

}  // namespace

Replacer python_replacer(const py::dict& runners) {
  return runners.empty() ? nullptr : std::make_shared<PythonReplacer>(runners);
}

}  // namespace polyreme::bindings
