# shellcheck shell=bash
# What the scripts share: messages, timed steps, and facts about the machine. Sourced, not run.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck disable=SC2034  # for the scripts that source this
VENV="${POLYREME_VENV:-$ROOT/.venv}"
LOGS="$ROOT/build/logs"
# Paths below it enter ccache's keys relative to the build folder, so that build/dev, the package's
# build and a wheel's build from an sdist share what they have in common.
export CCACHE_BASEDIR="$ROOT"
# The same name of the compiler everywhere, for the same reason: a Python names the one it was built by.
export CXX="${CXX:-g++}"

# A command that fails where nobody expected it must not end a script in silence.
trap_failures() {
  trap 'printf "error: %s, line %s: failed (%s): %s\n" "${BASH_SOURCE[0]}" "$LINENO" "$?" "$BASH_COMMAND" >&2' ERR
}
set -E
trap_failures

say() { printf '%s\n' "$*"; }

# die PROBLEM REMEDY: says both and ends the script.
die() {
  printf 'error: %s\n  remedy: %s\n' "$1" "$2" >&2
  exit 1
}

# Seconds since START, with one decimal. Bash's own clock, so that a step costs no processes.
seconds_since() {
  local tenths=$(((${EPOCHREALTIME/[^0-9]/} - $1) / 100000))
  printf '%d.%d' $((tenths / 10)) $((tenths % 10))
}

# step TEXT COMMAND...: runs the command with its output in a log file and says TEXT and the time.
# Returns the command's status, after showing the end of the log if it failed. LAST_LOG is the file.
step() {
  local text="$1" start status=0
  shift
  mkdir -p "$LOGS"
  LAST_LOG="$LOGS/$(printf '%s' "$text" | tr -cs 'A-Za-z0-9' '-' | cut -c1-60).log"
  printf '==> %s ... ' "$text"
  start=${EPOCHREALTIME/[^0-9]/}
  "$@" >"$LAST_LOG" 2>&1 </dev/null || status=$?
  if ((status == 0)); then
    printf '%s s\n' "$(seconds_since "$start")"
  else
    printf 'failed after %s s\n' "$(seconds_since "$start")"
    printf -- '---- the last lines of %s\n' "$LAST_LOG" >&2
    tail -n 40 "$LAST_LOG" >&2
    printf -- '----\n' >&2
  fi
  return "$status"
}

have() { command -v "$1" >/dev/null 2>&1; }

# Whether clang++ makes fuzz tests.
has_libfuzzer() {
  have clang++ && printf 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
    clang++ -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null 2>/dev/null
}

# version_at_least GOT WANTED
version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# Free gibibytes where the checkout lies.
free_gib() { echo $(($(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }') / 1024 / 1024)); }

num_jobs() { nproc 2>/dev/null || echo 2; }

# The oldest Python that the package takes, as 3.10.
PYTHON_FLOOR="$(sed -nE 's/^requires-python = ">=([0-9.]+)".*/\1/p' "$ROOT/pyproject.toml")"

# Prints the interpreter's version as 3.11 if it runs and is new enough.
python_version_of() {
  local version
  version="$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || return 1
  version_at_least "$version" "$PYTHON_FLOOR" && echo "$version"
}

# One line "VERSION PATH" for every Python on this machine that is new enough, oldest first.
list_pythons() {
  local candidate version
  for candidate in python3 /usr/bin/python3 python3.{9..19} "$HOME"/.pyenv/versions/*/bin/python3; do
    candidate="$(command -v "$candidate" 2>/dev/null)" || continue
    version="$(python_version_of "$candidate")" || continue
    echo "$version $candidate"
  done | sort -V -u -k1,1
}

# run_isolated FUNCTION: runs it in a subshell that ends at its first failing command, and leaves the
# status in ISOLATED_STATUS. (As a condition, `if FUNCTION`, bash would ignore `set -e` inside it.)
run_isolated() {
  trap - ERR
  set +e
  (
    set -e
    "$@"
  )
  # shellcheck disable=SC2034  # for the caller
  ISOLATED_STATUS=$?
  set -e
  trap_failures
}
