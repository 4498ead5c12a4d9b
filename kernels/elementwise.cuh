// Element-wise operations on flat arrays of fp32, bf16 or fp16; bits as csrc/ops/ops.h says.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// cudaErrorInvalidValue for other dtypes and negative counts. Outputs may be one of the inputs, not overlap
// them otherwise.
cudaError_t launch_add(const PolyremeElementwise& args, cudaStream_t stream);            // out = x + y
cudaError_t launch_gelu_forward(const PolyremeElementwise& args, cudaStream_t stream);   // out = gelu(x)
cudaError_t launch_gelu_backward(const PolyremeElementwise& args, cudaStream_t stream);  // out = y * gelu'(x)
cudaError_t launch_cast(const PolyremeCast& args, cudaStream_t stream);  // between any two of the dtypes
cudaError_t launch_fill(const PolyremeFill& args, cudaStream_t stream);
// out += x, of which x alone has args.dtype; not_finite becomes 1 if x has NaN or infinity.
cudaError_t launch_accumulate(const PolyremeAccumulate& args, cudaStream_t stream);
cudaError_t launch_scale(const PolyremeScale& args, cudaStream_t stream);  // x *= factor

// SwiGLU (Shazeer 2020): x = [gate | up] of a row, out = gate * sigmoid(gate) * up. Backward: out [rows, 2 *
// cols] gets the gradients of gate and up from dy; it may be x.
cudaError_t launch_swiglu_forward(const PolyremeSwiglu& args, cudaStream_t stream);
cudaError_t launch_swiglu_backward(const PolyremeSwiglu& args, cudaStream_t stream);

}  // namespace polyreme::kernels
