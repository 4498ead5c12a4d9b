#!/usr/bin/env bash
# Formatters, linters and our own checks, all of them even if one fails.
#
#   scripts/lint.sh         says what is wrong
#   scripts/lint.sh --fix   repairs what can be repaired, then says what is left
#
# The tools come with scripts/setup.sh --dev. clang-tidy and shellcheck are the system's; where they
# are missing that is said, and it is an error in CI.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

FIX=""
case "${1:-}" in
  "") ;;
  --fix) FIX=--fix ;;
  *) die "unknown option '$1'" "run scripts/lint.sh, or scripts/lint.sh --fix" ;;
esac
BIN="$VENV/bin"
[ -x "$BIN/ruff" ] || die "the linters are not installed" "run scripts/setup.sh --dev"

# NUL-separated files of C++ and CUDA.
cpp_files() {
  find csrc kernels tests/cpp tests/emulator tests/fuzz -regex '.*\.\(h\|cpp\|cu\|cuh\)' -print0 2>/dev/null || true
}

format_cpp() {
  if [ -n "$FIX" ]; then
    cpp_files | xargs -0 "$BIN/clang-format" -i
  else
    cpp_files | xargs -0 "$BIN/clang-format" --dry-run --Werror
  fi
}

format_python() {
  if [ -n "$FIX" ]; then "$BIN/ruff" format; else "$BIN/ruff" format --check; fi
}

check_python() {
  if [ -n "$FIX" ]; then "$BIN/ruff" check --fix; else "$BIN/ruff" check; fi
}

check_types() { "$BIN/mypy"; }

check_text() { "$BIN/python" scripts/check_text.py ${FIX:+"$FIX"}; }

check_layers() { "$BIN/python" scripts/check_layers.py; }

# missing TOOL: whether to go on without it.
missing() {
  say "skipped: $1 is not installed"
  [ "${CI:-}" != true ]
}

check_shell() {
  have shellcheck || missing shellcheck || return 1
  have shellcheck || return 0
  shellcheck --external-sources scripts/*.sh scripts/launch/* .ci/run
}

# Every source of the core as the dev build compiles it; the kernels are left out, since their
# intrinsics take most of the time and show nothing.
check_tidy() {
  have clang-tidy || missing clang-tidy || return 1
  have clang-tidy || return 0
  [ -e build/dev/compile_commands.json ] || cmake --preset dev >/dev/null
  # Clang does not know g++'s pragmas, and the compiler's command makes warnings errors.
  find csrc -name '*.cpp' -not -path '*/kernels/*' -not -path 'csrc/bindings/*' -print0 |
    xargs -0 -n 4 -P "$(num_jobs)" clang-tidy -p build/dev --quiet --extra-arg=-Wno-unknown-pragmas 2>/dev/null
}

FAILED=()
run_check() {
  local start=${EPOCHREALTIME/[^0-9]/} verdict=ok output
  output="$(mktemp)"
  run_isolated "$2" >"$output" 2>&1
  ((ISOLATED_STATUS == 0)) || verdict=failed
  printf '%-42s %-6s %6s s\n' "$1" "$verdict" "$(seconds_since "$start")"
  if [ "$verdict" = failed ]; then
    FAILED+=("$1")
    cat "$output"
  else
    grep -E '^(skipped|repaired)' "$output" || true
  fi
  rm -f "$output"
}

run_check "format of C++ (clang-format)" format_cpp
run_check "Python (ruff check)" check_python
run_check "format of Python (ruff format)" format_python
run_check "types of Python (mypy --strict)" check_types
run_check "text (scripts/check_text.py)" check_text
run_check "layers (scripts/check_layers.py)" check_layers
run_check "shell (shellcheck)" check_shell
run_check "C++ (clang-tidy)" check_tidy

if ((${#FAILED[@]} > 0)); then
  say "lint: ${#FAILED[@]} of 8 checks failed; scripts/lint.sh --fix repairs formats"
  exit 1
fi
say "lint: all checks passed"
