// Embedding of tokens and positions; bits as csrc/ops/ops.h says, backward without atomics.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// rows = token_rows[token] + position_rows[position]; without positions the token's row alone. With a token
// outside of [0, vocab) `bad` tells its position and nothing else is written.
cudaError_t launch_embedding_forward(const PolyremeEmbedding& args, cudaStream_t stream);
// token_rows and position_rows, fp32, += rows: token after token in ascending order.
cudaError_t launch_embedding_backward(const PolyremeEmbedding& args, cudaStream_t stream);

}  // namespace polyreme::kernels
