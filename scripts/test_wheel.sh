#!/usr/bin/env bash
# Builds the sdist, and from it a wheel for the oldest and the newest Python on this machine (--all:
# for every one), and tests each in a fresh environment away from this folder.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

ALL=""
case "${1:-}" in
  "") ;;
  --all) ALL=1 ;;
  *) die "unknown option '$1'" "run scripts/test_wheel.sh, or scripts/test_wheel.sh --all" ;;
esac

WORK="$(mktemp -d "${TMPDIR:-/tmp}/polyreme-wheel-XXXXXX")"
trap 'rm -rf "$WORK"' EXIT
# The build runs in a temporary folder of pip's; see lib.sh.
export CCACHE_BASEDIR="${TMPDIR:-/tmp}"
unset PYTHONPATH POLYREME_REQUIRE_TORCH POLYREME_REQUIRE_LAUNCHERS

build_sdist() { "$VENV/bin/python" -m build --sdist --no-isolation --outdir "$WORK" "$ROOT"; }

# An sdist must build, so it has the sources; and it must not have what only lies around.
check_sdist() {
  local names name
  names="$(tar tzf "$1" | cut -d / -f 2-)"
  for name in CMakeLists.txt csrc/CMakeLists.txt pyproject.toml LICENSE README.md CHANGELOG.md \
    python/polyreme/py.typed tests/cpp/CMakeLists.txt scripts/test.sh; do
    grep -qx "$name" <<<"$names" || die "the sdist lacks $name" "see sdist.include in pyproject.toml"
  done
  if grep -E '(^|/)(build|\.venv|\.git|__pycache__|\.[a-z]+_cache)/|\.so$' <<<"$names"; then
    die "the sdist has files that belong to one machine" "see sdist.exclude in pyproject.toml"
  fi
}

# make_wheel PYTHON FOLDER: the environment FOLDER/venv, and in FOLDER the wheel.
make_wheel() {
  "$1" -m venv "$2/venv"
  # Equal flags let ccache help; see scripts/setup.sh. Without MPI: which one the machines of others have is not
  # known here; who wants it builds on them.
  "$2/venv/bin/python" -m pip wheel --no-deps --wheel-dir "$2" \
    --config-settings=cmake.define.POLYREME_WERROR=ON --config-settings=cmake.define.POLYREME_MPI=OFF "$SDIST"
}

install_wheel() { "$1/venv/bin/python" -m pip install "$1"/*.whl pytest; }

# What the wheel asks of the system: the oldest glibc is the last number of the tag.
show_floor() {
  local report
  report="$("$VENV/bin/auditwheel" show "$1"/*.whl 2>/dev/null)"
  printf '%s\n' "$report" >"$1/auditwheel.txt"
  say "    glibc floor: $(grep -oE 'manylinux_[0-9]+_[0-9]+' <<<"$report" | head -n 1 | sed 's/manylinux_//;s/_/./') \
($(basename "$1"/*.whl))"
}

check_import() {
  cd "$1"
  venv/bin/python - "$1" <<'PYTHON'
import pathlib, sys
import polyreme, polyreme._core
folder = pathlib.Path(polyreme.__file__).parent
assert folder.is_relative_to(sys.argv[1]), folder
for name in ("py.typed", "_core.pyi"):
    assert (folder / name).is_file(), f"the wheel lacks {name}"
PYTHON
  venv/bin/polyreme --help
  venv/bin/polyreme doctor
}

train() {
  cd "$1"
  venv/bin/polyreme run -n 2 "$SOURCE/examples/01_train_gpt.py" --steps 5
}

# What the core computes is the same under every Python: without --all these run in the Python part alone.
CORE_TESTS=(checkpoint_crash forecast layout_scenarios layouts model_reference norms pipeline precision
  resident_memory sharded_optimizer sharded_optimizer_scenarios tensor_parallel training_scenarios zero zero_matrix)

# Beside the tests lies no package: they must find the installed one.
run_tests() {
  local left_out=() name
  mkdir "$1/tree"
  cp -r "$SOURCE"/{README.md,csrc,examples,pyproject.toml,scripts,tests} "$1/tree/"
  cd "$1/tree"
  if [ -z "$ALL" ]; then
    for name in "${CORE_TESTS[@]}"; do left_out+=("--ignore=tests/python/test_$name.py"); done
  fi
  ../venv/bin/python -m pytest -q -m "not slow and not torch" "${left_out[@]}"
}

step "Building the sdist" build_sdist || die "the sdist could not be built" "see above"
SDIST="$(echo "$WORK"/*.tar.gz)"
check_sdist "$SDIST"
tar xzf "$SDIST" -C "$WORK"
SOURCE="${SDIST%.tar.gz}"

mapfile -t PYTHONS < <(list_pythons)
if [ -z "$ALL" ] && ((${#PYTHONS[@]} > 2)); then PYTHONS=("${PYTHONS[0]}" "${PYTHONS[-1]}"); fi
for entry in "${PYTHONS[@]}"; do
  version="${entry%% *}"
  folder="$WORK/python$version"
  step "Python $version: building the wheel from the sdist" make_wheel "${entry#* }" "$folder" ||
    die "no wheel for Python $version" "see above"
  show_floor "$folder"
  step "Python $version: installing the wheel and pytest" install_wheel "$folder" || die "it does not install" "see above"
  step "Python $version: import, polyreme doctor" check_import "$folder" || die "the package does not work" "see above"
  step "Python $version: training on two ranks" train "$folder" || die "the example does not run" "see above"
  step "Python $version: tests" run_tests "$folder" || die "tests fail with the installed wheel" "see above"
  tail -n 1 "$LAST_LOG"
done
