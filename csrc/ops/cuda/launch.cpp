#include "ops/cuda/launch.h"

#include "base/error.h"

namespace polyreme {

void launch(CudaStream& stream, const char* op, std::vector<std::shared_ptr<Buffer>> buffers,
            const std::function<PolyremeCudaStatus(const PolyremeCudaTable& table, void* stream)>& issue) {
  const CudaDevice& device = as_cuda(stream.device());
  stream.enqueue(std::move(buffers), [&](void* handle) {
    const PolyremeCudaStatus status = issue(device.table(), handle);
    require<DeviceError>(status.code == 0, "cuda:", device.index(), ": ", op, " failed: ", status.text);
  });
}

}  // namespace polyreme
