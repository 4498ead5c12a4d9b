#!/usr/bin/env python3
"""Runs the commands that the documentation shows, so that they stay true.

Every ```bash block must say in the line before it what becomes of it:

    <!-- run -->              the block is run here, from the root, by bash -euo pipefail
    <!-- not run: REASON -->  it is not, and the reason says why (it is what CI itself runs, say)

Usage: run_docs.py FILE...
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```bash\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    place: str  # README.md:12
    mark: str  # "run", "not run: ...", or "" if there is none
    text: str


def blocks(path: Path) -> Iterator[Block]:
    """The bash blocks of a Markdown file."""
    text = path.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(f"{path.name}:{line}", match.group("mark") or "", match.group("text"))


def run(block: Block) -> str:
    """Runs the block. Returns "" or what went wrong."""
    environment = dict(os.environ)
    venv = environment.get("POLYREME_VENV", str(ROOT / ".venv"))
    environment["PATH"] = f"{venv}/bin{os.pathsep}{environment['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    tail = done.stdout.decode(errors="replace")[-3000:]
    return f"ended with status {done.returncode}:\n{tail}"


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    num_failed = num_run = 0
    for name in sys.argv[1:]:
        for block in blocks(ROOT / name):
            start = time.monotonic()
            if block.mark == "run":
                problem = run(block)
                num_run += 1
            elif block.mark.startswith("not run: "):
                continue
            else:
                problem = "a bash block without <!-- run --> or <!-- not run: REASON --> before it"
            verdict = "ok" if not problem else "FAILED"
            print(f"{block.place:<24} {verdict:<7} {time.monotonic() - start:6.1f} s")
            if problem:
                print(problem)
                num_failed += 1
    print(f"docs: {num_run} blocks run, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
