#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

#include "bindings/bindings.h"
#include "comm/stream_copy.h"
#include "mesh/world.h"
#include "ops/update.h"

namespace py = pybind11;
using namespace py::literals;

namespace polyreme::bindings {
namespace {

// Seconds of the fastest of `repeats` products of the given sizes on the world's device, as training makes
// them: c += op(a) op(b), c being fp32, or for operands of 16 bits c = op(a) op(b) rounded to their dtype,
// but for the gradient of weights (a transposed).
double time_gemm(const World& world, int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b,
                 int repeats, const std::string& dtype_text) {
  const DType dtype = dtype_from_name(dtype_text);
  require(m >= 1 && n >= 1 && k >= 1 && repeats >= 1, "time_gemm: sizes ", m, ", ", n, ", ", k,
          " and repeats ", repeats, " must be at least 1");
  Device& device = world.device();
  const auto stream = device.create_stream("gemm");
  const auto operand = [&](int64_t rows, int64_t cols, bool transposed, uint32_t key) {
    const Shape shape = transposed ? Shape{cols, rows} : Shape{rows, cols};
    const Tensor wide = empty(device, DType::kF32, shape, "operand");
    fill_normal(*stream, wide, 1.0f, {key}, 0);
    const Tensor tensor = dtype == DType::kF32 ? wide : empty(device, dtype, shape, "operand");
    if (dtype != DType::kF32) cast(*stream, wide, tensor);
    return transposed ? tensor.transpose(0, 1) : tensor;
  };
  const Tensor a = operand(m, k, transpose_a, 1);
  const Tensor b = operand(k, n, transpose_b, 2);
  const bool accumulate = dtype == DType::kF32 || transpose_a;
  const Tensor c = empty(device, accumulate ? DType::kF32 : dtype, {m, n}, "result");
  fill(*stream, c, 0.0f);
  double best = 0;
  for (int i = 0; i <= repeats; ++i) {  // the first one warms up
    const int64_t start = FlightRecorder::now_ns();
    gemm(*stream, a, b, c, accumulate);
    stream->synchronize();
    const double seconds = static_cast<double>(FlightRecorder::now_ns() - start) * 1e-9;
    if (i == 1 || (i > 1 && seconds < best)) best = seconds;
  }
  return best;
}

// The mean seconds of `once`, `iterations` times in a row, which all ranks begin together.
template <typename Once>
double time_in_step(Communicator& group, int iterations, const Once& once) {
  once();  // the first one warms up: pages, caches
  group.barrier(std::chrono::minutes(1));
  // Ranks that slept while others had their turn wake up some 50 us apart: that would be a multiple of a
  // small collective.
  for (int i = 0; i < 3; ++i) once();
  const int64_t start = FlightRecorder::now_ns();
  for (int i = 0; i < iterations; ++i) once();
  return static_cast<double>(FlightRecorder::now_ns() - start) * 1e-9 / iterations;
}

// Seconds of one collective over the world on float32 data, the mean of `iterations` in a row; collective.
// `count` is what a rank holds in full: the data of all_reduce, the input of reduce_scatter, the output of
// all_gather (multiples of the size). `staged`: in memory of the device, not in that of the group.
double time_collective(const World& world, const std::string& op, int64_t count, int iterations,
                       bool staged) {
  Communicator& group = world.communicator();
  require(count >= 1 && count % group.size() == 0, "time_collective: count ", count,
          " must be a multiple of the ", group.size(), " ranks");
  require(iterations >= 1, "time_collective: iterations ", iterations, " must be at least 1");
  const auto stream = world.device().create_stream("collective");
  const auto make = [&](int64_t elements) {
    const Tensor data = staged ? empty(world.device(), DType::kF32, {elements}, "bench")
                               : group.allocate(world.device(), DType::kF32, {elements}, "bench");
    fill(*stream, data, 1.0f);
    return data;
  };
  const Tensor full = make(count), part = make(count / group.size());
  if (op == "all_reduce")
    return time_in_step(group, iterations, [&] { group.all_reduce(full, ReduceOp::kSum, *stream)->wait(); });
  if (op == "reduce_scatter")
    return time_in_step(group, iterations,
                        [&] { group.reduce_scatter(full, part, ReduceOp::kSum, *stream)->wait(); });
  if (op == "all_gather")
    return time_in_step(group, iterations, [&] { group.all_gather(part, full, *stream)->wait(); });
  throw InvalidArgument(
      concat("time_collective: '", op, "'; expected all_reduce, reduce_scatter or all_gather"));
}

// Seconds in which a rank copies `count` floats while all others do the same, each in its own part of the
// group's memory and without a word to the others: by memcpy or by streaming stores, whichever is faster.
double time_copy(const World& world, int64_t count, int iterations) {
  require(count >= 1 && iterations >= 1, "time_copy: count ", count, " and iterations ", iterations,
          " must be at least 1");
  Communicator& group = world.communicator();
  const auto stream = world.device().create_stream("copy");
  const auto make = [&] {
    const Tensor data = group.allocate(world.device(), DType::kF32, {count}, "bench");
    fill(*stream, data, 1.0f);
    return data;
  };
  const Tensor from = make(), to = make();
  stream->synchronize();
  const auto bytes = static_cast<int64_t>(from.size_bytes());
  const double plain = time_in_step(
      group, iterations, [&] { std::memcpy(to.raw_address(), from.raw_address(), from.size_bytes()); });
  constexpr int64_t kStreams = int64_t{1} << 40;  // bytes in all, so that it streams
  const double streamed = time_in_step(
      group, iterations, [&] { stream_copy(to.raw_address(), from.raw_address(), bytes, kStreams); });
  return std::min(plain, streamed);
}

// Seconds that enqueuing one empty operation takes, over `count` of them.
double time_enqueue(const World& world, int count) {
  require(count >= 1, "time_enqueue: count ", count, " must be at least 1");
  const auto stream = world.device().create_stream("enqueue");
  CpuStream& cpu_stream = as_cpu(*stream);
  const int64_t start = FlightRecorder::now_ns();
  for (int i = 0; i < count; ++i) cpu_stream.enqueue({.name = "empty"}, {}, [](const CpuContext&) {});
  stream->synchronize();
  return static_cast<double>(FlightRecorder::now_ns() - start) * 1e-9 / count;
}

// Seconds of the fastest of `repeats` updates of `count` elements by a rule, and of as many triads x + y -> x
// of the same length right beside them.
std::pair<double, double> time_rule(const World& world, const std::string& rule, int64_t count, int repeats) {
  require(count >= 1 && repeats >= 1, "time_rule: count ", count, " and repeats ", repeats,
          " must be at least 1");
  Device& device = world.device();
  const auto stream = device.create_stream("rule");
  std::vector<Tensor> t;
  for (int i = 0; i < 4; ++i) {
    t.push_back(empty(device, DType::kF32, {count}, "operand"));
    fill(*stream, t.back(), 1e-3f);
  }
  const Tensor scale = empty(device, DType::kF32, {1}, "scale");
  fill(*stream, scale, 1.0f);
  const AdamWOptions adam{
      .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1, .step = 3};
  const Tensor sums = empty(device, DType::kI64, {2, ExactSum::kLimbs}, "sums");
  const auto update = [&] {
    if (rule == "adamw") return adamw(*stream, t[0], t[1], t[2], t[3], scale, adam);
    if (rule == "lamb") {
      for (int row = 0; row < 2; ++row)
        zero_limbs(*stream, sums.slice(0, row, row + 1).view({ExactSum::kLimbs}));
      lamb_moments(*stream, t[0], t[1], t[2], t[3], scale, adam, sums);
      return lamb_apply(*stream, t[0], t[2], t[3], sums, scale, adam);
    }
    if (rule == "muon") {
      muon_momentum(*stream, t[1], t[2], scale, 0.95, t[3]);
      return muon_apply(*stream, t[0], t[3], scale, {.lr = 1e-3, .weight_decay = 0.1, .factor = 1.0});
    }
    if (rule == "sgd")
      return sgd(*stream, t[0], t[1], t[2], scale,
                 {.lr = 1e-3, .momentum = 0.9, .weight_decay = 0.1, .first_step = false});
    if (rule == "lion")
      return lion(*stream, t[0], t[1], t[2], scale,
                  {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1});
    throw InvalidArgument(concat("time_rule: rule '", rule, "'; expected adamw, sgd, lion, lamb or muon"));
  };
  const auto seconds = [&](const auto& operation) {
    const int64_t start = FlightRecorder::now_ns();
    operation();
    stream->synchronize();
    return static_cast<double>(FlightRecorder::now_ns() - start) * 1e-9;
  };
  const auto triad = [&] { add(*stream, t[0], t[1], t[0]); };
  std::pair<double, double> best{seconds(update), seconds(triad)};  // the first ones warm up
  for (int i = 0; i < repeats; ++i) {
    const double of_rule = seconds(update), of_triad = seconds(triad);
    best = {i == 0 ? of_rule : std::min(best.first, of_rule),
            i == 0 ? of_triad : std::min(best.second, of_triad)};
  }
  return best;
}

}  // namespace

void bind_ops(py::module_& m) {
  m.def("time_gemm", &time_gemm, "world"_a, py::kw_only(), "m"_a, "n"_a, "k"_a, "transpose_a"_a,
        "transpose_b"_a, "repeats"_a, "dtype"_a, py::call_guard<py::gil_scoped_release>());
  m.def("time_copy", &time_copy, "world"_a, "count"_a, "iterations"_a,
        py::call_guard<py::gil_scoped_release>());
  m.def("time_collective", &time_collective, "world"_a, "op"_a, "count"_a, "iterations"_a, "staged"_a,
        py::call_guard<py::gil_scoped_release>());
  m.def("time_rule", &time_rule, "world"_a, "rule"_a, "count"_a, "repeats"_a,
        py::call_guard<py::gil_scoped_release>());
  m.def("time_enqueue", &time_enqueue, "world"_a, "count"_a, py::call_guard<py::gil_scoped_release>());
}

}  // namespace polyreme::bindings
