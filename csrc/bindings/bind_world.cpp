#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/interruptible.h"
#include "device/cuda_loader.h"
#include "mesh/dry_world.h"

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

LocalDevice local_device(const std::string& name) {
  if (name == "cpu") return LocalDevice::kCpu;
  if (name == "cuda") return LocalDevice::kGpuEach;
  require(name == "cuda:0", "unknown device '", name,
          "' for ranks that are threads; expected cpu, cuda or cuda:0");
  return LocalDevice::kSharedGpu;
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// The thread of a world's background stream may want the GIL while the world waits for it to end.
struct DeleteWithoutGil {
  void operator()(World* world) const {
    if (world->is_inherited()) return;
    const py::gil_scoped_release release;
    delete world;
  }
};

}  // namespace

void bind_world(py::module_& m) {
  py::class_<World, std::unique_ptr<World, DeleteWithoutGil>>(m, "World")
      .def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def_property_readonly("hosts", &World::hosts)
      .def_property_readonly("device_description", [](const World& w) { return w.device().description(); })
      .def(
          "barrier",
          [](const World& w, double timeout_s) {
            const Interruptible call(&w.communicator());
            w.communicator().barrier(milliseconds(timeout_s));
          },
          "timeout_s"_a = 600.0)
      .def(
          "all_gather_bytes",
          [](World& w, const py::bytes& data, const std::string& what) {
            const std::string own = data;
            std::vector<std::string> all;
            w.background();  // under the GIL: one thread makes it
            {
              const Interruptible call(&w.communicator());
              all = w.all_gather_bytes(own, what);
            }
            py::list result;
            for (const std::string& part : all) result.append(py::bytes(part));
            return result;
          },
          "data"_a, "what"_a)
      .def(
          "store_set",
          [](const World& w, const std::string& key, const std::string& value) { w.store().set(key, value); },
          "key"_a, "value"_a, py::call_guard<py::gil_scoped_release>())
      .def(
          "store_get",
          [](const World& w, const std::string& key) { return w.store().try_get(key).value_or(""); }, "key"_a,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "abort", [](const World& w, const std::string& reason) { w.communicator().abort(reason); },
          "reason"_a, py::call_guard<py::gil_scoped_release>())
      .def("stop_background", &World::stop_background, "reason"_a, py::call_guard<py::gil_scoped_release>())
      .def("report_failure", &World::report_failure, "text"_a, py::call_guard<py::gil_scoped_release>())
      .def("leave", &World::leave, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("failure",
                             [](const World& w) { return w.watch() ? w.watch()->failure() : std::string(); })
      .def_property_readonly("num_stalls",
                             [](const World& w) { return w.watch() ? w.watch()->num_stalls() : int64_t{0}; })
      .def("freeze_watch",
           [](const World& w) {
             if (w.watch()) w.watch()->freeze();
           })
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
         const std::string& secret, const std::string& job_id, const std::string& transport, bool fast_sums,
         const std::string& interface, double init_timeout_s, double timeout_s, double greeting_limit_s,
         double heartbeat_s, double peer_timeout_s, const std::string& record_dir, int num_threads,
         const std::string& isa, const std::string& executor, uint64_t schedule_seed, int gpu,
         const py::function& progress) {
        const WorldOptions options{.rank = rank,
                                   .size = size,
                                   .master_addr = master_addr,
                                   .master_port = master_port,
                                   .store_fd = store_fd,
                                   .secret = secret,
                                   .job_id = job_id,
                                   .transport = transport,
                                   .reduce_mode = fast_sums ? ReduceMode::kFast : ReduceMode::kOrdered,
                                   .interface = interface,
                                   .init_timeout = milliseconds(init_timeout_s),
                                   .timeout = milliseconds(timeout_s),
                                   .greeting_limit = milliseconds(greeting_limit_s),
                                   .progress =
                                       [&progress](const std::string& text) {
                                         const py::gil_scoped_acquire acquire;
                                         progress(text);
                                       },
                                   .heartbeat_interval = milliseconds(heartbeat_s),
                                   .peer_timeout = milliseconds(peer_timeout_s),
                                   .record_dir = record_dir,
                                   .device = device_options(num_threads, isa, executor, schedule_seed),
                                   .gpu = gpu};
        const Interruptible call;
        return make_world(options).release();
      },
      py::return_value_policy::take_ownership, py::kw_only(), "rank"_a, "size"_a, "master_addr"_a,
      "master_port"_a, "store_fd"_a, "secret"_a, "job_id"_a, "transport"_a, "fast_sums"_a, "interface"_a,
      "init_timeout_s"_a, "timeout_s"_a, "greeting_limit_s"_a, "heartbeat_s"_a, "peer_timeout_s"_a,
      "record_dir"_a, "num_threads"_a, "isa"_a, "executor"_a, "schedule_seed"_a, "gpu"_a, "progress"_a);
  m.def(
      "make_dry_world",
      [](int rank, int size) {
        const auto traffic = std::make_shared<Traffic>();
        return py::make_tuple(
            py::cast(make_dry_world(rank, size, traffic).release(), py::return_value_policy::take_ownership),
            py::cpp_function([traffic] { return *traffic; }));
      },
      py::kw_only(), "rank"_a, "size"_a);
  m.def(
      "make_local_worlds",
      [](int size, const std::string& device, int num_threads, const std::string& isa,
         const std::string& executor, uint64_t schedule_seed, double timeout_s) {
        py::list worlds;
        for (auto& world : make_local_worlds(size, local_device(device),
                                             device_options(num_threads, isa, executor, schedule_seed),
                                             milliseconds(timeout_s)))
          worlds.append(py::cast(world.release(), py::return_value_policy::take_ownership));
        return worlds;
      },
      py::kw_only(), "size"_a, "device"_a, "num_threads"_a, "isa"_a, "executor"_a, "schedule_seed"_a,
      "timeout_s"_a);
  m.def("num_gpus", &num_gpus);
}

}  // namespace polyreme::bindings
