#!/usr/bin/env bash
# Sets up like scripts/setup.sh --dev and runs the tests. Without options: all parts.
#
#   scripts/test.sh [--full] [--lint] [--cpp] [--python] [--docs] [--quickstart] [--wheel] [--sanitize]
#                   [--fuzz]
#
#   --lint        formats, linters, layers (scripts/lint.sh)
#   --cpp         C++ tests (GoogleTest by ctest)
#   --python      Python tests (pytest)
#   --docs        the commands that README.md and CONTRIBUTING.md show
#   --quickstart  scripts/quickstart.sh for a few steps
#   --wheel       sdist and wheel, tested away from this folder, on the oldest and newest Python
#   --sanitize    C++ tests of the lower modules under AddressSanitizer and UBSan
#   --fuzz        fuzz tests of what is read from sockets (clang's libFuzzer), together a minute
#   --full        all of the above, with every Python, every module and ThreadSanitizer too, fuzz tests longer
#
# A part that fails does not stop the others; the summary at the end names it and the exit status is 1.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

ALL_PARTS=(lint cpp python docs quickstart wheel sanitize fuzz)
# What every other module stands on, and where memory is handled by hand.
SANITIZED_MODULES="base|checkpoint|telemetry|device|tensor|ops|comm"

PARTS=()
FULL=""
for argument in "$@"; do
  case "$argument" in
    --full)
      FULL=1
      export POLYREME_TEST_FULL=1 # what takes gigabytes, too
      ;;
    --lint | --cpp | --python | --docs | --quickstart | --wheel | --sanitize | --fuzz) PARTS+=("${argument#--}") ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
      exit 0
      ;;
    *) die "unknown option '$argument'" "scripts/test.sh --help lists the options" ;;
  esac
done
((${#PARTS[@]} > 0)) || PARTS=("${ALL_PARTS[@]}")

part_lint() { scripts/lint.sh; }

part_cpp() {
  cmake --preset dev
  cmake --build --preset dev
  scripts/check_isa_objects.py build/dev
  ctest --preset dev
}

part_python() {
  # GPUs that are emulated, for test_gpu.py, where the C++ tests have them.
  cmake --preset dev
  if ninja -C build/dev -t query polyreme_emulated_backends >/dev/null 2>&1; then
    cmake --build --preset dev --target polyreme_emulated_backends
    export POLYREME_EMULATED_GPU="$ROOT/build/dev/bin/emulated"
  fi
  "$VENV/bin/python" -c 'import torch' ||
    die "PyTorch does not import, and tests need it" "scripts/setup.sh --dev installs it; rm -rf .venv starts afresh"
  "$VENV/bin/python" -m pytest
}

part_docs() { scripts/run_docs.py README.md CONTRIBUTING.md; }

part_quickstart() {
  scripts/quickstart.sh --steps 20 | tee "$LOGS/quickstart.log"
  "$VENV/bin/python" - "$LOGS/quickstart.log" <<'PYTHON' || die "the quick start's loss did not fall" "see above"
import json, sys
with open(sys.argv[1]) as log:
    losses = [json.loads(line)["loss"] for line in log if line.startswith("{")]
sys.exit(not (len(losses) == 20 and losses[-1] < losses[0] - 1.0))
PYTHON
}

part_wheel() { scripts/test_wheel.sh ${FULL:+--all}; }

# sanitized PRESET: builds and runs the tests of the chosen modules.
sanitized() {
  local preset="$1" modules="$SANITIZED_MODULES" targets
  [ -z "$FULL" ] || modules='.*'
  cmake --preset "$preset"
  # Modules without a test program have no target.
  targets="$(ninja -C "build/$preset" -t targets all | sed -nE "s/^bin\/(($modules)_test): .*/\1/p")"
  # shellcheck disable=SC2086  # a list
  cmake --build --preset "$preset" --target $targets
  ctest --preset "$preset" -L "^($modules)\$"
}

part_sanitize() {
  sanitized asan-ubsan
  [ -z "$FULL" ] || sanitized tsan
}

# fuzz_one TARGET SECONDS: starts from the target's own seeds and from what earlier runs found. No valid message
# takes as much memory as the limits; an input that takes 20 s counts as hung.
fuzz_one() {
  local target="$1" corpus="build/fuzz/corpus/$1"
  mkdir -p "$corpus" build/fuzz/findings
  UBSAN_OPTIONS=print_stacktrace=1 step "Fuzzing: $target" "build/fuzz/bin/$target" "$corpus" \
    -max_total_time="$2" -timeout=20 -malloc_limit_mb=8 -rss_limit_mb=1024 \
    -artifact_prefix="build/fuzz/findings/$target-" ||
    die "$target found a fault with the input in the 'Test unit' above" \
      "build/fuzz/bin/$target FILE tries that input again; a fix comes with a unit test"
  grep -P '^#\d+\tDONE' "$LAST_LOG"
}

part_fuzz() {
  local targets=() target seconds=60 failed=""
  has_libfuzzer || die "the fuzz tests need clang with libFuzzer" \
    "as root: apt-get install clang libclang-rt-dev (elsewhere the packages that provide them)"
  [ -z "$FULL" ] || seconds=600
  cmake --preset fuzz
  cmake --build --preset fuzz
  mapfile -t targets < <(ninja -C build/fuzz -t targets all | sed -nE 's/^bin\/(fuzz_\w+): .*/\1/p')
  seconds=$((seconds / ${#targets[@]}))
  for target in "${targets[@]}"; do
    (fuzz_one "$target" "$seconds") || failed+=" $target"
  done
  [ -z "$failed" ] || die "faults found by$failed" "see above"
}

SUMMARY=()
NUM_FAILED=0
run_part() {
  local name="$1" start=${EPOCHREALTIME/[^0-9]/} verdict=passed
  printf '\n======== %s\n' "$name"
  run_isolated "part_$name"
  if ((ISOLATED_STATUS != 0)); then
    verdict="FAILED"
    NUM_FAILED=$((NUM_FAILED + 1))
  fi
  SUMMARY+=("$(printf '%-12s %-7s %8s s' "$name" "$verdict" "$(seconds_since "$start")")")
}

scripts/setup.sh --dev || exit 1
# CMake and Ninja may be those of the environment (scripts/setup.sh).
export PATH="$PATH:$VENV/bin"
# Tests treat a missing PyTorch or launcher as a failure, not as a reason to skip.
export POLYREME_REQUIRE_TORCH=1 POLYREME_REQUIRE_LAUNCHERS=1

START=${EPOCHREALTIME/[^0-9]/}
for part in "${PARTS[@]}"; do run_part "$part"; done

printf '\n======== summary\n'
printf '%s\n' "${SUMMARY[@]}"
say "$((${#PARTS[@]} - NUM_FAILED)) of ${#PARTS[@]} parts passed in $(seconds_since "$START") s"
((NUM_FAILED == 0)) || exit 1
