#!/usr/bin/env python3
"""Prints what each CUDA kernel takes of a multiprocessor, as the compiler says: registers, shared memory, spills.

The build keeps the reports of ptxas beside the objects (scripts/keep_ptxas_report.sh). Fails where a kernel spills
registers to memory and EXPECTED does not say why, where a report is missing, and where EXPECTED names a kernel that
does not spill any more.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

# Kernels that may spill: the name without arguments, and the reason.
EXPECTED: dict[str, str] = {}

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\d+)\w*'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class Use:
    """Of one kernel on one architecture."""

    registers: int = 0
    shared_bytes: int = 0
    spill_bytes: int = 0


def read_report(text: str) -> dict[tuple[str, str], Use]:
    """By mangled name and architecture."""
    uses: dict[tuple[str, str], Use] = {}
    use = Use()
    for line in text.splitlines():
        if match := ENTRY.search(line):
            use = uses.setdefault((match.group(1), match.group(2)), Use())
        elif match := SPILLS.search(line):
            use.spill_bytes = int(match.group(2)) + int(match.group(3))
        elif match := USED.search(line):
            use.registers = int(match.group(1))
            shared = SHARED.search(line)
            use.shared_bytes = int(shared.group(1)) if shared else 0
    return uses


def demangle(names: list[str]) -> list[str]:
    """Names of kernels with their template arguments, without the rest."""
    output = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    short = []
    for name in output.splitlines():
        # The last pair of parentheses that closes at the end holds the parameters.
        depth, end = 0, len(name)
        for i in range(len(name) - 1, -1, -1):
            depth += (name[i] == ")") - (name[i] == "(")
            if depth == 0:
                end = i
                break
        name = name[:end].removeprefix("void ")
        for noise in ("polyreme::", "kernels::", "(anonymous namespace)::"):
            name = name.replace(noise, "")
        short.append(name)
    return short


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path, help="build folder, after the target polyreme_cuda")
    parser.add_argument("--kernels", type=Path, default=Path(__file__).resolve().parent.parent / "kernels")
    args = parser.parse_args()

    problems = []
    reports = {path.name.removesuffix(".o.ptxas"): path for path in args.build.rglob("*.cu.o.ptxas")}
    by_kernel: dict[str, dict[str, Use]] = defaultdict(dict)
    for source in sorted(args.kernels.glob("*.cu")):
        if source.name not in reports:
            problems.append(
                f"{source.name}: no report of ptxas in {args.build}; build the target polyreme_cuda"
            )
            continue
        uses = read_report(reports[source.name].read_text(encoding="utf-8"))
        for key, kernel in zip(uses, demangle([name for name, _ in uses]), strict=True):
            by_kernel[f"{source.stem}: {kernel}"][key[1]] = uses[key]

    print(f"{'registers on ' + ' '.join(ARCHITECTURES):32} {'shared':>7} {'spills':>7}  kernel")
    spilling = set()
    for kernel, uses in by_kernel.items():
        missing = [name for name in ARCHITECTURES if name not in uses]
        if missing:
            problems.append(f"{kernel}: not compiled for {', '.join(missing)}")
        registers = " ".join(
            f"{uses[name].registers:>6}" if name in uses else "     -" for name in ARCHITECTURES
        )
        shared = max(use.shared_bytes for use in uses.values())
        spills = max(use.spill_bytes for use in uses.values())
        print(f"{registers:32} {shared:>7} {spills:>7}  {kernel}")
        plain = re.sub(r"<.*", "", kernel.split(": ")[1])
        if spills:
            spilling.add(plain)
            if plain not in EXPECTED:
                problems.append(
                    f"{kernel}: spills {spills} bytes; list the reason in EXPECTED, or use fewer registers"
                )
    for name in EXPECTED.keys() - spilling:
        problems.append(f"EXPECTED names {name}, which does not spill")
    for problem in problems:
        print(problem)
    print(f"kernels: {len(by_kernel)}, problems: {len(problems)}")
    return 1 if problems or not by_kernel else 0


if __name__ == "__main__":
    sys.exit(main())
