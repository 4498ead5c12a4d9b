#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct PolyremeCudaTable;

namespace polyreme {

// One GPU that the CUDA backend sees.
struct GpuInfo {
  int index = 0;
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int multiprocessors = 0;
  uint64_t total_memory_bytes = 0;
  std::string problem;  // empty if a test kernel ran on it; otherwise why not
};

// What became of looking for GPUs. `message` is one line for people: what is missing and the remedy,
// or that all is well.
struct CudaProbe {
  bool built = false;   // libpolyreme_cuda.so is there
  bool loaded = false;  // and could be loaded
  std::string library;  // where it was looked for
  std::string message;
  int runtime_version = 0;  // of CUDA, 1000 * major + 10 * minor; 0 if not known
  int driver_version = 0;   // the newest CUDA that the driver can run; 0 without a driver
  std::vector<GpuInfo> devices;
};

// libpolyreme_cuda.so in the folder of the object that holds this code: of _core in an installed
// package, of the program otherwise.
std::string cuda_library_path();

// Loads the CUDA backend (it stays loaded), asks for the GPUs and runs a test kernel on each. Never
// throws: whatever fails is told in `message` or in a GPU's `problem`. Any thread.
CudaProbe probe_cuda() noexcept;
// The same with the library at `path`.
CudaProbe probe_cuda(const std::string& path) noexcept;

// The GPUs that this process sees, at least one. Throws as load_cuda.
int num_gpus();
// The calls of the CUDA backend. Throws NotAvailable, with the remedy, where it cannot be loaded or shows no
// GPU.
const PolyremeCudaTable& load_cuda();

}  // namespace polyreme
