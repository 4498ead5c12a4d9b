// gpu_check: prints the report of gpu_check.h as JSON. 0: all is well, 1: a check failed, 77: there is no
// GPU.
#include "comm/gpu_check.h"

#include <cstdio>

#include "comm/nccl/nccl_loader.h"
#include "device/cuda_loader.h"

int main() {
  using namespace polyreme;
  const CudaProbe cuda = probe_cuda();
  const NcclProbe nccl = probe_nccl();
  const int num_gpus = static_cast<int>(cuda.devices.size());
  gpu_check::Report report;
  for (const GpuInfo& gpu : cuda.devices)
    report.results.push_back(
        {concat("probe of cuda:", gpu.index, ", ", gpu.name), gpu.problem.empty() ? "ok" : gpu.problem});
  if (num_gpus == 0 || !nccl.loaded) report.results.push_back({"GPUs and NCCL", "not there"});
  if (report.ok()) {
    gpu_check::Report checks =
        gpu_check::run({.cuda = load_cuda(),
                        .nccl = load_nccl(),
                        .num_gpus = num_gpus,
                        .sizes_bytes = {4096, int64_t{1} << 20, int64_t{16} << 20, int64_t{256} << 20}});
    checks.results.insert(checks.results.begin(), report.results.begin(), report.results.end());
    report = std::move(checks);
  }
  std::printf("%s\n", gpu_check::to_json(report, num_gpus, cuda.message, nccl.message).c_str());
  return num_gpus == 0 ? 77 : report.ok() ? 0 : 1;
}
