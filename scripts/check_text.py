#!/usr/bin/env python3
"""Checks what editors get wrong in any text file: tabs, spaces at the end of a line, carriage
returns, a missing last newline; and comments of Python, shell and CMake that are not ASCII.

Usage: check_text.py [--fix]
"""

from __future__ import annotations

import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".cmake", ".cpp", ".cu", ".cuh", ".h", ".in"} | {
    ".json",
    ".md",
    ".py",
    ".pyi",
    ".sbatch",
    ".sh",
    ".toml",
    ".txt",
}
NAMES = {"run", "LICENSE", ".clang-format", ".clang-tidy", ".editorconfig", ".gitignore"}
# Written by others, letter for letter.
VERBATIM = {"LICENSE"}


def files() -> Iterator[Path]:
    """Text files that git tracks or would track."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        path = ROOT / name
        if path.is_file() and (path.suffix in SUFFIXES or path.name in NAMES) and path.name not in VERBATIM:
            yield path


def comments(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line, comment) of a Python, shell or CMake file. In the latter two a # in a string counts."""
    if path.suffix in (".py", ".pyi"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    elif path.suffix in (".sh", ".sbatch", ".cmake") or path.name in ("CMakeLists.txt", "run"):
        for number, line in enumerate(text.splitlines(), start=1):
            if "#" in line:
                yield number, line[line.index("#") :]


def repaired(text: str) -> str:
    """The text with the ends of lines and of the file put right. Tabs are left to people."""
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return "".join(line + "\n" for line in lines)


def check(path: Path, text: str) -> Iterator[str]:
    name = path.relative_to(ROOT)
    for number, line in enumerate(text.splitlines(), start=1):
        if "\t" in line:
            yield f"{name}:{number}: tab"
    if repaired(text) != text:
        yield f"{name}: spaces at the end of a line, carriage returns, or a wrong end of file; use --fix"
    for number, comment in comments(path, text):
        if not comment.isascii():
            yield f"{name}:{number}: comment is not ASCII"


def main() -> int:
    fix = sys.argv[1:] == ["--fix"]
    if sys.argv[1:] and not fix:
        print(__doc__)
        return 2
    num_problems = 0
    for path in files():
        # newline="" keeps carriage returns visible.
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        if fix and repaired(text) != text:
            text = repaired(text)
            path.write_text(text, encoding="utf-8")
            print(f"repaired {path.relative_to(ROOT)}")
        for problem in check(path, text):
            print(problem)
            num_problems += 1
    print(f"text: {num_problems} violation(s)" if num_problems else "text: ok")
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
