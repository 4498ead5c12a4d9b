#!/usr/bin/env python3
"""Checks that the C++ sources include only what the layering allows. Prints each violation.

1. A module includes itself and what its DEPENDS in csrc/CMakeLists.txt reach, nothing else.
2. Headers of a vendor appear only in the folder of that backend, in kernels/ and in their tests.
3. Files in csrc/ops/cpu/kernels are compiled once per instruction set. They include only each other,
   C headers and a few headers without weak symbols: an inline function of any other header would be
   emitted with AVX-512 code in it, and the linker could choose that copy for every machine.
   (check_isa_objects.py looks at the objects themselves.)
4. C++ sources are ASCII.
5. CUDA sources start kernels by the macro of kernels/launch.h and keep to what runs on the CPU in tests too:
   no <<<, __shared__ or __CUDA_ARCH__.

A module `a_b` lives in csrc/a/b if that folder exists, else in csrc/a_b. The extension module lives
in csrc/bindings and may include everything.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".in"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
MODULE = re.compile(r"polyreme_module\(\s*(\w+)([^)]*)\)")
BINDINGS = "bindings"

# Vendor headers, and the backend folders that may include them.
VENDOR_HEADERS = (
    (
        re.compile(r"^(cuda|cublas|cudnn|cufft|curand|nvml|nvtx3/|cub/|thrust/|cooperative_groups)"),
        {"cuda", "nccl"},
    ),
    (re.compile(r"^nccl"), {"nccl"}),
    (re.compile(r"^mpi(-ext)?\.h$"), {"mpi"}),
)

CUDA_ONLY = re.compile(r"<<<|__shared__|__CUDA_ARCH__")

KERNELS = "csrc/ops/cpu/kernels/"
# Everything inline in them is forced inline, or not used by kernels.
KERNEL_HEADERS = {"base/philox.h", "device/cpu/thread_pool.h"}
KERNEL_SYSTEM_HEADERS = {"immintrin.h", "math.h", "stddef.h", "stdint.h", "string.h"}


@dataclass(frozen=True)
class Module:
    """One target of csrc/CMakeLists.txt."""

    name: str
    folder: str  # relative to csrc
    depends: tuple[str, ...]


def read_modules(root: Path) -> dict[str, Module]:
    """The modules by name."""
    text = re.sub(r"#[^\n]*", "", (root / "csrc/CMakeLists.txt").read_text())
    modules = {}
    for match in MODULE.finditer(text):
        name = match.group(1)
        words = match.group(2).split()
        depends = words[words.index("DEPENDS") + 1 :] if "DEPENDS" in words else []
        if "SOURCES" in depends:
            depends = depends[: depends.index("SOURCES")]
        nested = name.replace("_", "/", 1)
        folder = nested if (root / "csrc" / nested).is_dir() else name
        modules[name] = Module(name, folder, tuple(depends))
    modules[BINDINGS] = Module(BINDINGS, BINDINGS, tuple(modules))
    return modules


def reachable(modules: dict[str, Module], name: str) -> set[str]:
    """The module and everything below it."""
    found: set[str] = set()
    stack = [name]
    while stack:
        current = stack.pop()
        if current in modules and current not in found:
            found.add(current)
            stack.extend(modules[current].depends)
    return found


def module_of(modules: dict[str, Module], path: str) -> Module | None:
    """The module that holds `path` (relative to csrc): the one with the deepest folder."""
    candidates = [m for m in modules.values() if path.startswith(m.folder + "/")]
    return max(candidates, key=lambda m: len(m.folder), default=None)


def check_depends(modules: dict[str, Module]) -> Iterator[str]:
    """Every DEPENDS names a module."""
    for module in modules.values():
        for dependency in module.depends:
            if dependency not in modules:
                yield f"csrc/CMakeLists.txt: {module.name} depends on {dependency}, which is no module"


def check_modules(
    modules: dict[str, Module], path: str, includes: list[tuple[int, str, str]]
) -> Iterator[str]:
    """Rule 1 for the file at `path` (relative to csrc)."""
    own = module_of(modules, path)
    if own is None:
        if includes:
            yield f"csrc/{path}:1: belongs to no module of csrc/CMakeLists.txt; add one, or move the file"
        return
    allowed = reachable(modules, own.name)
    for line, quote, header in includes:
        target = module_of(modules, header) if quote == '"' else None
        if target is not None and target.name not in allowed:
            yield (
                f"csrc/{path}:{line}: {own.name} may not include {header}: it depends on "
                f"{', '.join(sorted(allowed - {own.name})) or 'nothing'}, not on {target.name}"
            )


def check_vendors(path: str, includes: list[tuple[int, str, str]]) -> Iterator[str]:
    """Rule 2 for the file at `path` (relative to the root)."""
    folders = set(Path(path).parent.parts)
    if path.startswith(("kernels/", "tests/cpp/kernels/")):
        return
    for line, quote, header in includes:
        if quote != "<":
            continue
        for pattern, allowed in VENDOR_HEADERS:
            if pattern.match(header) and not folders & allowed:
                yield (
                    f"{path}:{line}: <{header}> belongs to a backend; only kernels/ and folders named "
                    f"{' or '.join(sorted(allowed))} may include it"
                )
                break


def check_kernels(path: str, includes: list[tuple[int, str, str]]) -> Iterator[str]:
    """Rule 3 for the file at `path` (relative to the root)."""
    if not path.startswith(KERNELS):
        return
    for line, quote, header in includes:
        if quote == "<" and header not in KERNEL_SYSTEM_HEADERS:
            allowed = ", ".join(f"<{name}>" for name in sorted(KERNEL_SYSTEM_HEADERS))
            yield f"{path}:{line}: a kernel may not include <{header}>; only {allowed}"
        if quote == '"' and not f"csrc/{header}".startswith(KERNELS) and header not in KERNEL_HEADERS:
            yield (
                f"{path}:{line}: a kernel may not include {header}; only files of {KERNELS} and "
                f"{', '.join(sorted(KERNEL_HEADERS))}"
            )


def check_ascii(path: str, text: str) -> Iterator[str]:
    """Rule 4."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.isascii():
            character = next(c for c in line if not c.isascii())
            yield f"{path}:{number}: {character!r} is not ASCII"


def check_cuda(path: str, text: str) -> Iterator[str]:
    """Rule 5."""
    if not path.endswith((".cu", ".cuh")):
        return
    for number, line in enumerate(text.splitlines(), start=1):
        for match in CUDA_ONLY.findall(line.split("//")[0]):
            yield f"{path}:{number}: {match} does not run on the CPU; see kernels/launch.h"


def check(root: Path) -> list[str]:
    """All violations under `root`."""
    modules = read_modules(root)
    problems = list(check_depends(modules))
    for top in ("csrc", "kernels", "tests/cpp"):
        for file in sorted((root / top).rglob("*")):
            if file.suffix not in SOURCE_SUFFIXES or not file.is_file():
                continue
            path = file.relative_to(root).as_posix()
            text = file.read_text(encoding="utf-8")
            includes = [
                (text.count("\n", 0, m.start(1)) + 1, m.group(1), m.group(2)) for m in INCLUDE.finditer(text)
            ]
            if top == "csrc":
                problems += check_modules(modules, path[len("csrc/") :], includes)
            problems += check_vendors(path, includes)
            problems += check_kernels(path, includes)
            problems += check_ascii(path, text)
            problems += check_cuda(path, text)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    problems = check(parser.parse_args().root)
    for problem in problems:
        print(problem)
    print(f"layers: {len(problems)} violation(s)" if problems else "layers: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
