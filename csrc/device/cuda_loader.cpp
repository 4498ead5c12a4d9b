#include "device/cuda_loader.h"

#include <cstdlib>
#include <exception>

#include "base/error.h"
#include "device/backend_library.h"
#include "device/cuda/cuda_table.h"

namespace polyreme {
namespace {

// CUDA's numbers (driver_types.h), which the core does not include.
constexpr int kCudaErrorInsufficientDriver = 35;
constexpr int kCudaErrorNoDevice = 100;

constexpr BackendKind kCudaBackend{
    .name = "CUDA",
    .file_name = "libpolyreme_cuda.so",
    .symbol = POLYREME_CUDA_TABLE_SYMBOL,
    .version = POLYREME_CUDA_TABLE_VERSION,
    .size_bytes = sizeof(PolyremeCudaTable),
    .build_remedy = "to use GPUs, install the CUDA toolkit",
};

// "13.0" of 13000.
std::string version_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

// The table of the library at probe.library, or null with the reason in probe.message.
const PolyremeCudaTable* load_table(CudaProbe& probe) {
  const BackendLibrary library = open_backend(kCudaBackend, probe.library);
  probe.built = library.built;
  probe.loaded = library.table != nullptr;
  probe.message = library.message;
  return static_cast<const PolyremeCudaTable*>(library.table);
}

// Why no GPU can be counted, with the remedy.
std::string explain(const PolyremeCudaStatus& status, const CudaProbe& probe) {
  const std::string needed = version_text(probe.runtime_version);
  if (status.code == kCudaErrorInsufficientDriver && probe.driver_version == 0)
    return concat("no NVIDIA driver was found; install one that supports CUDA ", needed,
                  " or later, and in a container allow access to the GPUs [", status.text, "]");
  if (status.code == kCudaErrorInsufficientDriver)
    return concat("the NVIDIA driver supports CUDA ", version_text(probe.driver_version),
                  ", this build needs ", needed,
                  "; update the driver, or build polyreme with an older CUDA toolkit [", status.text, "]");
  if (status.code == kCudaErrorNoDevice) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    const std::string cause = visible == nullptr ? "CUDA_VISIBLE_DEVICES is not set"
                                                 : concat("CUDA_VISIBLE_DEVICES is '", visible, "'");
    return concat("the NVIDIA driver is there but shows no GPU; ", cause, "; see what nvidia-smi lists [",
                  status.text, "]");
  }
  return concat("CUDA does not start: ", status.text, "; see nvidia-smi and the kernel's log (dmesg)");
}

GpuInfo inspect_gpu(const PolyremeCudaTable& table, int index) {
  GpuInfo info;
  info.index = index;
  PolyremeCudaGpu gpu{};
  PolyremeCudaStatus status = table.device_info(index, &gpu);
  if (status.code == 0) {
    info.name = gpu.name;
    info.compute_major = gpu.compute_major;
    info.compute_minor = gpu.compute_minor;
    info.multiprocessors = gpu.multiprocessors;
    info.total_memory_bytes = gpu.total_memory_bytes;
    status = table.self_test(index);
  }
  if (status.code != 0) info.problem = status.text;
  return info;
}

void inspect(const PolyremeCudaTable& table, CudaProbe& probe) {
  // A version that cannot be had stays 0; what is wrong shows in the next call too.
  table.runtime_version(&probe.runtime_version);
  table.driver_version(&probe.driver_version);
  int32_t count = 0;
  const PolyremeCudaStatus status = table.device_count(&count);
  if (status.code != 0) {
    probe.message = explain(status, probe);
    return;
  }
  int num_usable = 0;
  for (int index = 0; index < count; ++index) {
    probe.devices.push_back(inspect_gpu(table, index));
    num_usable += probe.devices.back().problem.empty();
  }
  probe.message = concat("CUDA ", version_text(probe.runtime_version), ", driver for CUDA ",
                         version_text(probe.driver_version), ": ", num_usable, " of ", count, " GPUs usable");
}

}  // namespace

std::string cuda_library_path() { return backend_path(kCudaBackend); }

CudaProbe probe_cuda() noexcept { return probe_cuda(cuda_library_path()); }

CudaProbe probe_cuda(const std::string& path) noexcept {
  CudaProbe probe;
  try {
    probe.library = path;
    if (const PolyremeCudaTable* table = load_table(probe)) inspect(*table, probe);
  } catch (const std::exception& error) {
    probe.message = error.what();
  }
  return probe;
}

const PolyremeCudaTable& load_cuda() {
  CudaProbe probe{.library = cuda_library_path()};
  const PolyremeCudaTable* table = load_table(probe);
  require<NotAvailable>(table != nullptr, probe.message);
  table->runtime_version(&probe.runtime_version);
  table->driver_version(&probe.driver_version);
  int32_t count = 0;
  const PolyremeCudaStatus status = table->device_count(&count);
  require<NotAvailable>(status.code == 0, explain(status, probe));
  return *table;
}

int num_gpus() {
  int32_t count = 0;
  const PolyremeCudaStatus status = load_cuda().device_count(&count);
  require<DeviceError>(status.code == 0, "CUDA does not count its GPUs: ", status.text);
  return count;
}

}  // namespace polyreme
