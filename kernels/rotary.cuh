// Rotary position embedding (Su et al. 2021), in place.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// Each pair (a, b) = (x[i], x[i + head_dim / 2]) of a head turns by the angle of its token's position, token
// % seq, whose cosine c and sine s stand in tables: (a c - b s, b c + a s); backward: by minus the angle.
// head_dim is even. The groups of a token may lie apart (row_stride), so that q and k of a fused projection
// turn where they are. cudaErrorInvalidValue for anything else.
cudaError_t launch_rotary(const PolyremeRotary& args, cudaStream_t stream);
// The tables: pair i turns by position * theta^(-2 i / head_dim) radians. The bits are the CPU's.
cudaError_t launch_rotary_table(const PolyremeRotaryTable& args, cudaStream_t stream);

}  // namespace polyreme::kernels
