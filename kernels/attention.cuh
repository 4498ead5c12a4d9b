// Causal multi-head attention: a correct fallback with the CPU's bits (csrc/ops/cpu/kernels/attention_tiles.h
// has the method and its words) that is the same on every run; no claim to speed.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// out = softmax(scale q k^T, causal) v; log_sum_exp of the scaled scores.
cudaError_t launch_attention_forward(const PolyremeAttention& args, cudaStream_t stream);
// dqkv from qkv, out, log_sum_exp and dout.
cudaError_t launch_attention_backward(const PolyremeAttention& args, cudaStream_t stream);

}  // namespace polyreme::kernels
