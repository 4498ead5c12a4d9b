#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "mesh/mesh.h"
#include "mesh/world.h"

namespace py = pybind11;
using namespace py::literals;

namespace polyreme::bindings {
namespace {

Topology topology(const std::string& name) {
  if (name == "launch") return Topology::kLaunch;
  if (name == "host") return Topology::kHost;
  throw InvalidArgument(concat("unknown topology '", name, "'; expected launch or host"));
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

py::array all_reduce_any(const Mesh& mesh, World& world, const std::vector<std::string>& axes,
                         const py::array& array, const std::string& op) {
  Communicator& group = mesh.group(axes);
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

void bind_mesh(py::module_& m) {
  py::class_<MeshLayout>(m, "MeshLayout")
      .def(py::init([](const std::vector<std::pair<std::string, int>>& axes, std::vector<std::string> hosts,
                       const std::string& topology_name) {
             std::vector<Axis> list;
             for (const auto& [name, size] : axes) list.push_back({name, size});
             return MeshLayout(std::move(list), std::move(hosts), topology(topology_name));
           }),
           "axes"_a, "hosts"_a, "topology"_a)
      .def("size", &MeshLayout::size, "axis"_a)
      .def("coordinate", &MeshLayout::coordinate, "rank"_a, "axis"_a)
      .def("group", &MeshLayout::group, "rank"_a, "axes"_a)
      .def("host_span", &MeshLayout::host_span, "axis"_a);

  py::class_<Mesh>(m, "Mesh")
      .def(py::init([](const World& world, const MeshLayout& layout,
                       const std::vector<std::vector<std::string>>& groups) {
             // Not as a call_guard, under which pybind11 would register the new object too.
             const py::gil_scoped_release release;
             return std::make_unique<Mesh>(world.communicator(), layout, groups);
           }),
           "world"_a, "layout"_a, "groups"_a, py::keep_alive<1, 2>())
      .def(
          "members",
          [](const Mesh& mesh, const std::vector<std::string>& axes) {
            mesh.group(axes);  // throws for a group that is not there
            return mesh.layout().group(mesh.world().rank(), axes);
          },
          "axes"_a)
      .def("all_reduce", &all_reduce_any, "world"_a, "axes"_a, "array"_a, "op"_a);
}

}  // namespace polyreme::bindings
