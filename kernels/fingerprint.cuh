// A hash of the bytes of an array, as csrc/ops/fingerprint.cpp defines it: a sum that wraps, so that its
// order does not matter.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// cudaErrorInvalidValue for a negative size.
cudaError_t launch_fingerprint(const PolyremeFingerprint& args, cudaStream_t stream);

}  // namespace polyreme::kernels
