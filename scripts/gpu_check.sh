#!/usr/bin/env bash
# For a machine with one or more NVIDIA GPUs: builds the CUDA and NCCL backends and shows whether they work there.
# Prints one JSON object: the device, the kernel of ordered reductions against the CPU bit by bit, all collectives
# over NCCL with one rank per GPU, and the bandwidth of all_reduce, fast and ordered.
#
#   scripts/gpu_check.sh [BUILD_FOLDER]     default: build/gpu
#
# Needs CMake 3.25, Ninja, g++ 12, GoogleTest, the CUDA toolkit and NCCL. Exit status: 0 all is well, 1 not, 77 no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
FOLDER="${1:-build/gpu}"

cmake -S . -B "$FOLDER" -G Ninja -DPOLYREME_CUDA=ON -DPOLYREME_NCCL=ON -DPOLYREME_MPI=OFF -DPOLYREME_TESTS=ON \
  -DPOLYREME_PYTHON=OFF >&2
cmake --build "$FOLDER" --target gpu_check >&2
exec timeout --kill-after=10 300 "$FOLDER/bin/gpu_check"
