#!/usr/bin/env bash
# Installs what polyreme needs and builds it into .venv. Takes seconds when nothing is missing.
#
#   scripts/setup.sh        enough to train (no tests, no CUDA, no PyTorch)
#   scripts/setup.sh --dev  also CUDA where the toolkit is, the C++ tests' needs, PyTorch and the linters
#
# Environment: POLYREME_VENV (default .venv), PYTHON (the interpreter to make it from).
# Every finished part leaves a stamp; a part that was cut short has none and is done again.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

PROFILE=quick
case "${1:-}" in
  "") ;;
  --dev) PROFILE=dev ;;
  *) die "unknown option '$1'" "run scripts/setup.sh, or scripts/setup.sh --dev" ;;
esac

STAMPS="$VENV/.polyreme"

# ---- Debian packages -------------------------------------------------------------------------------

# Python.h of the interpreter that .venv would be made from.
has_python_headers() {
  "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

# Without these nothing can be built.
required_packages() {
  local python
  have "$CXX" || echo g++
  if python="$(choose_python)"; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    has_python_headers "$python" || echo python3-dev
  else
    printf '%s\n' python3-venv python3-dev
  fi
  if [ "$PROFILE" = dev ]; then
    [ -e /usr/include/gtest/gtest.h ] || [ -e /usr/local/include/gtest/gtest.h ] || echo libgtest-dev
  fi
}

# Without these the work goes on: slower, or with a check less.
optional_packages() {
  have ccache || echo ccache
  have git || echo git
  if [ "$PROFILE" = dev ]; then
    have shellcheck || echo shellcheck
    have clang-tidy || echo clang-tidy
    have tc || echo iproute2 # two hosts on one machine
    has_libfuzzer || printf '%s\n' clang libclang-rt-dev
    # Launchers for the tests, which call these commands by name: openmpi-bin and mpich both offer an mpirun.
    have mpirun.openmpi || echo openmpi-bin
    have mpicxx || echo libopenmpi-dev
    have mpiexec.hydra || echo mpich
    # Daemons, which PATH may not show to an ordinary user.
    [ -x /usr/sbin/slurmctld ] || have slurmctld || echo slurm-wlm
    [ -x /usr/sbin/munged ] || have munged || echo munge
  fi
}

apt_install() {
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    have sudo || {
      echo "not root, and there is no sudo"
      return 1
    }
    as_root=(sudo -n)
  fi
  # The first command finishes an installation that was cut short.
  "${as_root[@]}" dpkg --configure -a &&
    "${as_root[@]}" apt-get update &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

install_packages() {
  local required optional tried
  mapfile -t required < <(required_packages)
  mapfile -t optional < <(optional_packages)
  # What could not be had once is not tried again and again.
  tried="build/tried-$(printf '%s-' "${optional[@]}")"
  [ ! -e "$tried" ] || optional=()
  ((${#required[@]} + ${#optional[@]} > 0)) || return 0
  # Steps have no terminal; a password is asked for here.
  if [ "$(id -u)" != 0 ] && [ -t 0 ] && have sudo; then sudo -v || true; fi
  if have apt-get && step "Installing Debian packages: ${required[*]} ${optional[*]}" \
    apt_install "${required[@]}" "${optional[@]}"; then
    return 0
  fi
  mapfile -t required < <(required_packages)
  if ((${#required[@]} > 0)); then
    die "missing on this machine: ${required[*]}" \
      "as root: apt-get install ${required[*]} (elsewhere the packages that provide them); \
if a download failed, check the network; then run this again"
  fi
  touch "$tried"
  say "    going on without: ${optional[*]}"
}

check_compiler() {
  local version
  version="$("$CXX" -dumpfullversion -dumpversion)"
  version_at_least "$version" 11 ||
    die "$CXX $version does not know C++20" "install g++ 11 or newer, and set CXX to it if it is not the first on PATH"
}

check_disk() {
  local needed=2 free
  if [ "$PROFILE" = dev ] && [ ! -e "$STAMPS/dev" ]; then needed=12; fi # PyTorch alone takes 5.4 GB
  free="$(free_gib)"
  ((free >= needed)) || die "only $free GiB are free in $ROOT; $needed are needed" \
    "free some space, or set POLYREME_VENV to a folder on a larger disk"
}

# ---- The virtual environment -----------------------------------------------------------------------

# The interpreter to use, or nothing if none is new enough.
choose_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 /usr/bin/python3 python3.{19..9}; do
    candidate="$(command -v "$candidate" 2>/dev/null)" || continue
    if python_version_of "$candidate" >/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

create_venv() {
  rm -rf "$VENV"
  "$1" -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet --upgrade pip
}

make_venv() {
  local python
  if [ -e "$STAMPS/venv" ] && "$VENV/bin/python" -c 'import pip' 2>/dev/null; then return 0; fi
  python="$(choose_python)" ||
    die "no Python of version $PYTHON_FLOOR or newer was found" "install one, or name it: PYTHON=/path/to/python3"
  step "Making $(basename "$VENV") with Python $(python_version_of "$python")" create_venv "$python" ||
    die "the virtual environment could not be made" \
      "see above; if pip found no package index, check the network and pip's own configuration"
  mkdir -p "$STAMPS"
  touch "$STAMPS/venv"
}

# ---- Python packages and the build -----------------------------------------------------------------

# What an installation depends on. The package is installed in place (editable), so the text of the
# Python files is no part of it, but their names are.
inputs_hash() {
  {
    echo "$ROOT $CXX $("$CXX" -dumpfullversion -dumpversion) $("$VENV/bin/python" -VV)"
    find python -name '*.py' | LC_ALL=C sort
    find csrc cmake CMakeLists.txt pyproject.toml scripts/setup.sh -type f -print0 |
      LC_ALL=C sort -z | xargs -0 sha256sum
    # Made by the first kernels for the GPU.
    [ ! -d kernels ] || find kernels -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d ' ' -f 1
}

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check "$@"; }

# The system's CMake and Ninja if they are good enough, else the wheels.
build_requirements() {
  grep '^requires = ' pyproject.toml | grep -o '"[^"]*"' | tr -d '"'
  version_at_least "$(cmake --version 2>/dev/null | awk 'NR == 1 { print $3 }')" 3.25 || echo 'cmake>=3.25'
  have ninja || echo ninja
}

install_build_requirements() {
  local requirements=() wanted
  mapfile -t requirements < <(build_requirements)
  wanted="$STAMPS/build-$(printf '%s ' "${requirements[@]}" | sha256sum | cut -c1-16)"
  [ ! -e "$wanted" ] || return 0
  step "Installing build tools: ${requirements[*]}" pip_install "${requirements[@]}" ||
    die "pip could not install the build tools" "check the network and pip's configuration, then run this again"
  touch "$wanted"
}

install_polyreme() {
  local hash cuda=OFF extras="" stamp="$STAMPS/$PROFILE" text="Building polyreme"
  hash="$(inputs_hash)"
  # What is good enough for development is good enough for training.
  if grep -qsx "$hash" "$stamp" "$STAMPS/dev" && "$VENV/bin/python" -c 'import polyreme._core' 2>/dev/null; then
    return 0
  fi
  if [ "$PROFILE" = dev ]; then
    cuda=AUTO
    extras="[test,lint,dist]"
    text="Building polyreme, installing PyTorch and test tools"
  fi
  rm -f "$STAMPS/dev" "$STAMPS/quick"
  # PATH: cmake and ninja may be those of the environment. Warnings are errors here, as in the C++
  # tests; with equal flags ccache serves both builds.
  PATH="$VENV/bin:$PATH" step "$text" pip_install --no-build-isolation \
    --config-settings=cmake.define.POLYREME_CUDA=$cuda --config-settings=cmake.define.POLYREME_WERROR=ON \
    --editable ".$extras" ||
    die "polyreme could not be built or its Python packages not installed" \
      "see above: a compiler's error is in the sources; for a failed download check the network; then run this again"
  "$VENV/bin/python" -c 'import polyreme._core' ||
    die "polyreme was built, but its extension module does not load" "see above; rm -rf build .venv starts afresh"
  echo "$hash" >"$stamp"
}

START=${EPOCHREALTIME/[^0-9]/}
# One set-up at a time: a second one waits, then finds nothing to do.
mkdir -p build
exec 9>build/setup.lock
flock 9
check_disk
install_packages
check_compiler
make_venv
install_build_requirements
install_polyreme
say "==> polyreme is ready in $VENV ($(seconds_since "$START") s)"
