#!/usr/bin/env bash
# For a machine with one or more NVIDIA GPUs: builds the CUDA and NCCL backends and shows whether they work there.
# Prints one JSON object a line: every kernel against its reference (the tests that CI runs on an emulator), training
# steps of a tiny GPT and a tiny Llama against the CPU's bits, with one rank and with two that share the GPU, in C++ and
# from Python, a checkpoint from device memory, steps of GPT-2 124M and a GPT of 1.3B parameters in bf16 (tokens per
# second, MFU, memory), the small tests under compute-sanitizer, the
# bandwidth of each memory-bound kernel against that of a copy, and, in the last one, the device, the kernel of ordered
# reductions against the CPU bit by bit, all collectives over NCCL with one rank per GPU, and the bandwidth of
# all_reduce, fast and ordered. Registers, shared memory and spills of every kernel are in BUILD_FOLDER/kernels.txt.
#
#   scripts/gpu_check.sh [BUILD_FOLDER]     default: build/gpu
#
# Needs CMake 3.25, Ninja, g++ 12, GoogleTest, the CUDA toolkit and NCCL; Python with NumPy and pybind11 for the steps
# from Python (without them a line says so). Exit status: 0 all is well, 1 not, 77 no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
FOLDER="${1:-build/gpu}"

TARGETS=(gpu_check kernels_on_gpu kernel_bandwidth engine_on_gpu)
WITH_PYTHON=(-DPOLYREME_PYTHON=OFF)
if PYBIND="$(python3 -c 'import numpy, pybind11; print(pybind11.get_cmake_dir())' 2>/dev/null)"; then
  WITH_PYTHON=(-DPOLYREME_PYTHON=ON -Dpybind11_DIR="$PYBIND" -DPython_EXECUTABLE="$(command -v python3)")
  TARGETS+=(_core)
fi
cmake -S . -B "$FOLDER" -G Ninja -DPOLYREME_CUDA=ON -DPOLYREME_NCCL=ON -DPOLYREME_MPI=OFF -DPOLYREME_TESTS=ON \
  "${WITH_PYTHON[@]}" >&2
cmake --build "$FOLDER" --target "${TARGETS[@]}" >&2

STATUS=0
RESOURCES=0
# run_checked SECONDS PROGRAM...: a failure is kept for the end.
run_checked() { timeout --kill-after=10 "$@" || STATUS=$?; }

scripts/kernel_resources.py "$FOLDER" >"$FOLDER/kernels.txt" || RESOURCES=$?
# First, since it says whether there is a GPU.
run_checked 300 "$FOLDER/bin/gpu_check" >"$FOLDER/gpu_check.json"
if ((STATUS == 77)); then
  cat "$FOLDER/gpu_check.json"
  exit 77
fi
# run_tests NAME PROGRAM: the program's tests as lines {"NAME": ..., "outcome": ...}.
run_tests() {
  run_checked 120 "$FOLDER/bin/$2" --gtest_brief=1 --gtest_output="json:$FOLDER/$2.json" >&2
  python3 - "$1" "$FOLDER/$2.json" <<'PYTHON'
import json, sys
with open(sys.argv[2]) as report:
    for suite in json.load(report)["testsuites"]:
        for test in suite["testsuite"]:
            outcome = "failed" if test.get("failures") else "ok"
            print(json.dumps({sys.argv[1]: f"{suite['name']}.{test['name']}", "outcome": outcome}))
PYTHON
}
run_tests kernel_test kernels_on_gpu
run_tests training_test engine_on_gpu
# The package over this build, without an installation.
if [ -n "$PYBIND" ]; then
  rm -rf "$FOLDER/site"
  mkdir -p "$FOLDER/site/polyreme"
  BIN="$(realpath "$FOLDER/bin")"
  ln -s "$PWD"/python/polyreme/* "$BIN"/_core*.so "$BIN"/libpolyreme_*.so "$FOLDER/site/polyreme/"
  PYTHONPATH="$FOLDER/site" run_checked 240 python3 scripts/gpu_step.py
else
  echo '{"python_training": "cuda", "outcome": "not tried: no Python with NumPy and pybind11"}'
fi
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    OUTCOME=ok
    timeout --kill-after=10 150 compute-sanitizer --tool "$tool" --error-exitcode 1 "$FOLDER/bin/engine_on_gpu" \
      --gtest_brief=1 --gtest_filter='*OneGpu' >"$FOLDER/sanitizer_$tool.log" 2>&1 || {
      OUTCOME="failed: see $FOLDER/sanitizer_$tool.log"
      STATUS=1
    }
    printf '{"compute_sanitizer": "%s", "outcome": "%s"}\n' "$tool" "$OUTCOME"
  done
else
  echo '{"compute_sanitizer": "all", "outcome": "not tried: it is not on PATH"}'
fi
run_checked 120 "$FOLDER/bin/kernel_bandwidth"
cat "$FOLDER/gpu_check.json"
exit "$((STATUS != 0 || RESOURCES != 0))"
