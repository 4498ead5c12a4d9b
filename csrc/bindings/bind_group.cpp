#include <pybind11/stl.h>

#include "base/fork.h"
#include "bindings/array_view.h"
#include "bindings/bindings.h"
#include "bindings/interruptible.h"
#include "mesh/mesh.h"
#include "mesh/world.h"

namespace py = pybind11;
using namespace py::literals;

namespace polyreme::bindings {
namespace {

ReduceOp reduce_op(const std::string& name) {
  for (const ReduceOp op :
       {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kAverage})
    if (name == reduce_op_name(op)) return op;
  throw InvalidArgument(concat("unknown reduction '", name, "'; expected sum, product, max, min or average"));
}

// A collective in flight, for Python; holds the arrays by its stream, or for the way back from a GPU, until
// it has run.
class PendingWork {
 public:
  PendingWork(std::unique_ptr<Work> work, ArrayCopies copies, World& world, Communicator& group)
      : work_(std::move(work)), copies_(std::move(copies)), world_(world), group_(group) {}
  void wait() {
    fork_guard_.require_own("this work");
    const Interruptible call(&group_);
    if (work_) work_->wait();
    work_.reset();
    copies_.write_back(world_.device());
  }

 private:
  std::unique_ptr<Work> work_;
  ArrayCopies copies_;
  World& world_;
  Communicator& group_;
  ForkGuard fork_guard_;
};

// A group of a mesh for arrays of Python, on the background stream of its world.
class ArrayGroup {
 public:
  ArrayGroup(World& world, Communicator& group) : world_(world), group_(group) {}

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  const std::string& name() const { return group_.name(); }

  PendingWork all_reduce(const py::object& data, const std::string& op) {
    ArrayCopies copies;
    const Tensor tensor = view(copies, "all_reduce: array", data, true);
    const ReduceOp reduction = reduce_op(op);
    return issue(copies, [&](Stream& stream) { return group_.all_reduce(tensor, reduction, stream); });
  }
  PendingWork reduce_scatter(const py::object& input, const py::object& output, const std::string& op) {
    ArrayCopies copies;
    const Tensor from = view(copies, "reduce_scatter: array", input, false),
                 to = view(copies, "reduce_scatter: out", output, true);
    const ReduceOp reduction = reduce_op(op);
    return issue(copies, [&](Stream& stream) { return group_.reduce_scatter(from, to, reduction, stream); });
  }
  PendingWork all_gather(const py::object& input, const py::object& output,
                         const std::vector<int64_t>& counts) {
    ArrayCopies copies;
    const Tensor from = view(copies, "all_gather: array", input, false),
                 to = view(copies, "all_gather: out", output, true);
    return issue(copies, [&](Stream& stream) { return group_.all_gather(from, to, stream, counts); });
  }
  PendingWork broadcast(const py::object& data, int root) {
    ArrayCopies copies;
    const Tensor tensor = view(copies, "broadcast: array", data, root != rank());
    return issue(copies, [&](Stream& stream) { return group_.broadcast(tensor, root, stream); });
  }
  PendingWork all_to_all(const py::object& input, const py::object& output,
                         const std::vector<int64_t>& send_counts,
                         const std::vector<int64_t>& receive_counts) {
    ArrayCopies copies;
    const Tensor from = view(copies, "all_to_all: array", input, false),
                 to = view(copies, "all_to_all: out", output, true);
    return issue(copies, [&](Stream& stream) {
      return group_.all_to_all(from, to, stream, send_counts, receive_counts);
    });
  }
  using Parts = std::vector<std::pair<py::object, int>>;
  PendingWork exchange(const Parts& sends, const Parts& receives) {
    ArrayCopies copies;
    std::vector<Transfer> transfers;
    for (const auto& [array, peer] : sends)
      transfers.push_back(
          {Transfer::Kind::kSend, view(copies, "exchange: an array to send", array, false), peer});
    for (const auto& [array, peer] : receives)
      transfers.push_back(
          {Transfer::Kind::kReceive, view(copies, "exchange: an array to receive", array, true), peer});
    return issue(copies, [&](Stream& stream) { return group_.exchange(transfers, stream); });
  }
  void set_label(const std::string& label) { group_.set_label(label); }
  void barrier(double timeout_s) {
    const Interruptible call(&group_);
    group_.barrier(std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000)));
  }

 private:
  Tensor view(ArrayCopies& copies, const char* what, const py::object& array, bool writable) {
    if (world_.device().kind() == DeviceKind::kCpu) return view_of(world_.device(), array, writable, what);
    return copies.add(world_.background(), array, writable, what);
  }
  template <typename Call>
  PendingWork issue(ArrayCopies& copies, const Call& call) {
    Stream& stream = world_.background();        // under the GIL: one thread makes it
    const Interruptible interruptible(&group_);  // the deferred executor may run it, and wait, here
    return PendingWork(call(stream), std::move(copies), world_, group_);
  }

  World& world_;
  Communicator& group_;
};

}  // namespace

void bind_group(py::module_& m) {
  py::class_<PendingWork>(m, "Work").def("wait", &PendingWork::wait);

  // What Python gets of a collective keeps its group itself (polyreme.group.Work): pybind11 would look at the
  // result of a call whose arguments it could not convert.
  py::class_<ArrayGroup>(m, "Group")
      .def(py::init([](World& world, const Mesh& mesh, const std::vector<std::string>& axes) {
             return std::make_unique<ArrayGroup>(world, mesh.group(axes));
           }),
           "world"_a, "mesh"_a, "axes"_a, py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def_property_readonly("rank", &ArrayGroup::rank)
      .def_property_readonly("size", &ArrayGroup::size)
      .def_property_readonly("name", &ArrayGroup::name)
      .def("all_reduce", &ArrayGroup::all_reduce, "data"_a, "op"_a)
      .def("reduce_scatter", &ArrayGroup::reduce_scatter, "input"_a, "output"_a, "op"_a)
      .def("all_gather", &ArrayGroup::all_gather, "input"_a, "output"_a, "counts"_a)
      .def("broadcast", &ArrayGroup::broadcast, "data"_a, "root"_a)
      .def("all_to_all", &ArrayGroup::all_to_all, "input"_a, "output"_a, "send_counts"_a, "receive_counts"_a)
      .def("exchange", &ArrayGroup::exchange, "sends"_a, "receives"_a)
      .def("set_label", &ArrayGroup::set_label, "label"_a)
      .def("barrier", &ArrayGroup::barrier, "timeout_s"_a);
}

}  // namespace polyreme::bindings
