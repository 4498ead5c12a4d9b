#include <pybind11/chrono.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "mesh/mesh.h"
#include "mesh/world.h"

namespace py = pybind11;
using namespace py::literals;

namespace polyreme::bindings {
namespace {

CpuDeviceOptions device_options(int num_threads, const std::string& isa, const std::string& executor,
                                uint64_t seed) {
  require(executor == "immediate" || executor == "deferred", "unknown executor '", executor,
          "'; expected immediate or deferred");
  return {num_threads, isa, executor == "deferred" ? CpuExecutor::kDeferred : CpuExecutor::kImmediate, seed};
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// A new array with the ordered sum (max, min) over the group of everybody's array.
template <typename T>
py::array all_reduce(Communicator& group, Device& device, const py::array& array, ReduceOp op) {
  py::array_t<T, py::array::c_style | py::array::forcecast> result = array.attr("copy")();
  {
    T* data = result.mutable_data();
    const int64_t count = result.size();
    const py::gil_scoped_release release;
    const auto stream = device.create_stream("all_reduce");
    const Tensor tensor = empty(device, dtype_of<T>(), {count}, "all_reduce");
    const auto access_bytes = static_cast<size_t>(tensor.size_bytes());
    {
      const HostMapping mapping(tensor.buffer());
      std::memcpy(tensor.raw_address(), data, access_bytes);
    }
    group.all_reduce(tensor, op, *stream)->wait();
    const HostMapping mapping(tensor.buffer());
    std::memcpy(data, tensor.raw_address(), access_bytes);
  }
  return result;
}

ReduceOp reduce_op(const std::string& name) {
  if (name == "sum") return ReduceOp::kSum;
  if (name == "max") return ReduceOp::kMax;
  if (name == "min") return ReduceOp::kMin;
  throw InvalidArgument(concat("unknown reduction '", name, "'; expected sum, max or min"));
}

py::array all_reduce_any(const Mesh& mesh, World& world, const std::string& axis, const py::array& array,
                         const std::string& op) {
  Communicator& group = mesh.group(axis);
  const ReduceOp reduction = reduce_op(op);
  if (py::isinstance<py::array_t<float>>(array))
    return all_reduce<float>(group, world.device(), array, reduction);
  if (py::isinstance<py::array_t<double>>(array))
    return all_reduce<double>(group, world.device(), array, reduction);
  if (py::isinstance<py::array_t<int32_t>>(array))
    return all_reduce<int32_t>(group, world.device(), array, reduction);
  if (py::isinstance<py::array_t<int64_t>>(array))
    return all_reduce<int64_t>(group, world.device(), array, reduction);
  throw InvalidArgument(
      concat("all_reduce takes float32, float64, int32 or int64, got ", std::string(py::str(array.dtype()))));
}

}  // namespace

void bind_world(py::module_& m) {
  py::class_<World>(m, "World")
      .def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def_property_readonly("device_description", [](const World& w) { return w.device().description(); })
      .def(
          "barrier",
          [](const World& w, double timeout_s) { w.communicator().barrier(milliseconds(timeout_s)); },
          "timeout_s"_a = 600.0, py::call_guard<py::gil_scoped_release>())
      .def(
          "abort", [](const World& w, const std::string& reason) { w.communicator().abort(reason); },
          "reason"_a, py::call_guard<py::gil_scoped_release>())
      .def("memory",
           [](const World& w) {
             const MemoryStats stats = w.device().memory();
             return py::dict("in_use_bytes"_a = stats.in_use_bytes, "peak_bytes"_a = stats.peak_bytes,
                             "reserved_bytes"_a = stats.reserved_bytes);
           })
      .def("reset_peak_memory", [](const World& w) { w.device().reset_peak_memory(); })
      .def(
          "record", [](const World& w, bool on) { w.device().recorder().enable(on); }, "on"_a)
      .def("clear_spans", [](const World& w) { w.device().recorder().clear(); })
      .def("spans", [](const World& w) {
        py::list result;
        for (const Span& span : w.device().recorder().spans())
          result.append(py::dict("name"_a = span.name, "kind"_a = op_kind_name(span.kind),
                                 "stream"_a = span.stream, "sequence"_a = span.sequence,
                                 "start_ns"_a = span.start_ns, "end_ns"_a = span.end_ns,
                                 "flops"_a = span.flops, "bytes"_a = span.bytes));
        return result;
      });

  m.def(
      "make_world",
      [](int rank, int size, const std::string& master_addr, int master_port, int store_fd,
         const std::string& secret, const std::string& job_id, double init_timeout_s, double timeout_s,
         double greeting_limit_s, int num_threads, const std::string& isa, const std::string& executor,
         uint64_t schedule_seed, const py::function& progress) {
        const WorldOptions options{.rank = rank,
                                   .size = size,
                                   .master_addr = master_addr,
                                   .master_port = master_port,
                                   .store_fd = store_fd,
                                   .secret = secret,
                                   .job_id = job_id,
                                   .init_timeout = milliseconds(init_timeout_s),
                                   .timeout = milliseconds(timeout_s),
                                   .greeting_limit = milliseconds(greeting_limit_s),
                                   .progress =
                                       [&progress](const std::string& text) {
                                         const py::gil_scoped_acquire acquire;
                                         progress(text);
                                       },
                                   .device = device_options(num_threads, isa, executor, schedule_seed)};
        const py::gil_scoped_release release;
        return make_world(options);
      },
      py::kw_only(), "rank"_a, "size"_a, "master_addr"_a, "master_port"_a, "store_fd"_a, "secret"_a,
      "job_id"_a, "init_timeout_s"_a, "timeout_s"_a, "greeting_limit_s"_a, "num_threads"_a, "isa"_a,
      "executor"_a, "schedule_seed"_a, "progress"_a);
  m.def(
      "make_local_worlds",
      [](int size, int num_threads, const std::string& isa, const std::string& executor,
         uint64_t schedule_seed, double timeout_s) {
        return make_local_worlds(size, device_options(num_threads, isa, executor, schedule_seed),
                                 milliseconds(timeout_s));
      },
      py::kw_only(), "size"_a, "num_threads"_a, "isa"_a, "executor"_a, "schedule_seed"_a, "timeout_s"_a);

  py::class_<Mesh>(m, "Mesh")
      .def(py::init([](const World& world, const std::vector<std::pair<std::string, int>>& axes) {
             std::vector<Axis> list;
             for (const auto& [name, size] : axes) list.push_back({name, size});
             // Not as a call_guard, under which pybind11 would register the new object too.
             const py::gil_scoped_release release;
             return std::make_unique<Mesh>(world.communicator(), std::move(list));
           }),
           "world"_a, "axes"_a, py::keep_alive<1, 2>())
      .def(
          "size", [](const Mesh& mesh, const std::string& axis) { return mesh.layout().size(axis); },
          "axis"_a)
      .def("coordinate", &Mesh::coordinate, "axis"_a)
      .def(
          "group",
          [](const Mesh& mesh, int rank, const std::string& axis) { return mesh.layout().group(rank, axis); },
          "rank"_a, "axis"_a)
      .def("all_reduce", &all_reduce_any, "world"_a, "axis"_a, "array"_a, "op"_a);
}

}  // namespace polyreme::bindings
