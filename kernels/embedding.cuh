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

// Where only the rows of some tokens are there: out = the token's row in fp32, zeros for the others' tokens.
cudaError_t launch_embedding_part_forward(const PolyremeEmbeddingPart& args, cudaStream_t stream);
// out += rows of the tokens that it has: token after token in ascending order. count below 2^31 - 1024.
cudaError_t launch_embedding_part_backward(const PolyremeEmbeddingPart& args, cudaStream_t stream);

}  // namespace polyreme::kernels
