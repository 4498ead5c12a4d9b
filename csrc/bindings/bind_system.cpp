#include <pybind11/stl.h>

#include "base/build_info.h"
#include "bindings/bindings.h"
#include "comm/nccl/nccl_loader.h"
#include "device/cpu/isa.h"
#include "device/cuda_loader.h"

namespace py = pybind11;
using namespace py::literals;

namespace polyreme::bindings {
namespace {

py::dict build_info_dict() {
  const BuildInfo& info = build_info();
  return py::dict("version"_a = info.version, "git_describe"_a = info.git_describe,
                  "compiler"_a = info.compiler, "cxx_flags"_a = info.cxx_flags,
                  "build_type"_a = info.build_type, "sanitizers"_a = info.sanitizers, "isas"_a = info.isas,
                  "cuda_version"_a = info.cuda_version, "cuda_architectures"_a = info.cuda_architectures,
                  "cuda_absent"_a = info.cuda_absent, "nccl_version"_a = info.nccl_version,
                  "nccl_absent"_a = info.nccl_absent, "mpi_version"_a = info.mpi_version,
                  "mpi_absent"_a = info.mpi_absent);
}

py::dict cuda_dict() {
  const CudaProbe probe = probe_cuda();
  py::list devices;
  for (const GpuInfo& gpu : probe.devices)
    devices.append(py::dict("index"_a = gpu.index, "name"_a = gpu.name,
                            "compute_capability"_a = py::make_tuple(gpu.compute_major, gpu.compute_minor),
                            "multiprocessors"_a = gpu.multiprocessors,
                            "total_memory_bytes"_a = gpu.total_memory_bytes, "problem"_a = gpu.problem));
  return py::dict("built"_a = probe.built, "loaded"_a = probe.loaded, "library"_a = probe.library,
                  "message"_a = probe.message, "runtime_version"_a = probe.runtime_version,
                  "driver_version"_a = probe.driver_version, "devices"_a = devices);
}

py::dict nccl_dict() {
  const NcclProbe probe = probe_nccl();
  return py::dict("built"_a = probe.built, "loaded"_a = probe.loaded, "library"_a = probe.library,
                  "message"_a = probe.message, "version"_a = probe.version);
}

}  // namespace

void bind_system(py::module_& m) {
  m.attr("__version__") = build_info().version;
  m.def("build_info", &build_info_dict);
  m.def("probe_cuda", &cuda_dict);
  m.def("probe_nccl", &nccl_dict);
  m.def("supported_isas", [] {
    std::vector<std::string> names;
    for (const Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
    return names;
  });
}

}  // namespace polyreme::bindings
