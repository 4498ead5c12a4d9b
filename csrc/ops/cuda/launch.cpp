#include "ops/cuda/launch.h"

#include "base/error.h"

namespace polyreme {
namespace {

// In place of an index, where every id is good: PolyremeEmbedding::bad.
constexpr int32_t kNoneIsBad = INT32_MAX;

}  // namespace

void launch(CudaStream& stream, const char* op, std::vector<std::shared_ptr<Buffer>> buffers,
            const std::function<PolyremeCudaStatus(const PolyremeCudaTable& table, void* stream)>& issue) {
  const CudaDevice& device = as_cuda(stream.device());
  stream.enqueue(std::move(buffers), [&](void* handle) {
    const PolyremeCudaStatus status = issue(device.table(), handle);
    require<DeviceError>(status.code == 0, "cuda:", device.index(), ": ", op, " failed: ", status.text);
  });
}

void refuse_bad_id(CudaStream& stream, const Tensor& bad,
                   std::function<void(int64_t index, int32_t id)> refuse) {
  stream.check_later(bad.buffer(), [refuse = std::move(refuse)](const int32_t* words) {
    if (words[0] != kNoneIsBad) refuse(words[0], words[1]);
  });
}

}  // namespace polyreme
