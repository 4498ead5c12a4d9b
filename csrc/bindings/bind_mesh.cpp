#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/interruptible.h"
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
             const Interruptible call(&world.communicator());
             return std::make_unique<Mesh>(world.communicator(), layout, groups);
           }),
           "world"_a, "layout"_a, "groups"_a, py::keep_alive<1, 2>())
      .def(
          "members",
          [](const Mesh& mesh, const std::vector<std::string>& axes) {
            mesh.group(axes);  // throws for a group that is not there
            return mesh.layout().group(mesh.world().rank(), axes);
          },
          "axes"_a);
}

}  // namespace polyreme::bindings
