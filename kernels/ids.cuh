// Tokens and targets that are none: found before anything is written. The kernels that follow do nothing
// then; who launched them reads the word when the stream has passed, and tells.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace polyreme::kernels {

inline constexpr int32_t kNoneIsBad = INT32_MAX;

// bad[0]: the smallest i with ids[i] neither in [0, end) nor `other`, else kNoneIsBad; bad[1]: that id. count
// below 2^31 - 1024.
cudaError_t launch_check_ids(const int32_t* ids, int64_t count, int64_t end, int32_t other, int32_t* bad,
                             cudaStream_t stream);

}  // namespace polyreme::kernels
