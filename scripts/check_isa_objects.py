#!/usr/bin/env python3
"""Checks the objects that are compiled once per instruction set: what they export lies in the
namespace of that set. Anything else (an inline function of a header, say) could be taken by the
linker for the whole program, and would then crash on a CPU without those instructions.

Usage: check_isa_objects.py BUILD_FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# CMake puts the objects of target T into T.dir; polyreme_isa_sources names targets <target>_<isa>.
TARGET = re.compile(r"_(avx2|avx512|amx)\.dir$")


def exported(objects: list[Path]) -> list[tuple[str, str]]:
    """(object, symbol) for every global or weak definition."""
    command = ["nm", "--demangle", "--extern-only", "--defined-only", "--print-file-name", *map(str, objects)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = []
    for line in output.splitlines():
        # <file>:<address> <type> <name>
        name, _, rest = line.partition(":")
        rows.append((name, rest.split(maxsplit=2)[2]))
    return rows


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    num_objects = 0
    problems = []
    for folder in sorted(Path(sys.argv[1]).rglob("*.dir")):
        match = TARGET.search(folder.name)
        if not match:
            continue
        isa = match.group(1)
        objects = sorted(folder.rglob("*.o"))
        num_objects += len(objects)
        if not objects:
            continue
        for path, symbol in exported(objects):
            if f"::{isa}::" not in symbol:
                problems.append(f"{path}: exports {symbol}, which is not in a namespace {isa}")
    for problem in problems:
        print(problem)
    if num_objects == 0:
        print(f"no object of an instruction set under {sys.argv[1]}; build first")
        return 1
    print(f"isa objects: {num_objects} checked, {len(problems)} violation(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
