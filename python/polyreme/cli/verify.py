"""`polyreme verify`: runs a script under several layouts and compares every bit with its 1-rank run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import asdict

from . import UsageError
from .signals import signals_raise

_MAX_DROP = 0.01  # of the loss in 16 bits against fp32
_END_S = 15.0  # the launcher's grace period for its ranks, and some more

_DESCRIPTION = """\
Runs the script on one rank and then under every layout, for a few steps each, and compares loss,
gradient norm, every gradient and every weight bit for bit. The script sets lanes explicitly
(lanes=pr.Lanes(dp=...)) and lets the mesh follow the number of ranks (pr.Mesh(world)).
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser of `verify`."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a script's bits over layouts",
        usage="polyreme verify [options] [--] script.py [arguments]",
        description=_DESCRIPTION,
        epilog="Exit code: 0 if all bits are equal (with --precision: the loss is not worse by more than 1 %%), 1 if"
        " not, 2 if the script could not be run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--layouts",
        default="dp=2",
        metavar="LIST",
        help="separated by spaces, such as 'dp=2 dp=4' (default dp=2)",
    )
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp16"),
        help="instead: compare the losses of the script in this precision with those of its twin in fp32",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps of each run (default 3, with --precision 50)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs and compares; returns the exit code."""
    from polyreme.verification import first_difference, read_records

    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if args.steps is None:
        args.steps = 50 if args.precision else 3
    if not command or args.steps < 1:
        raise UsageError(
            "verify: give a script and at least 1 step, as in: polyreme verify --steps 3 script.py"
        )
    if args.precision:
        return _compare_precisions(args, command)
    layouts = {text: _num_ranks(text) for text in args.layouts.split()}
    if not layouts:
        raise UsageError(f"verify: --layouts {args.layouts!r} is empty; give at least one, such as 'dp=2'")
    results = []
    with signals_raise(), tempfile.TemporaryDirectory(prefix="polyreme-verify-") as folder:
        _say(args, "dp=1: the 1-rank run")
        expected = read_records(_execute(command, 1, args.steps, folder), 1)[0]
        for layout, num_ranks in layouts.items():
            records = read_records(_execute(command, num_ranks, args.steps, folder), num_ranks)
            difference = first_difference(expected, records)
            results.append(
                {"layout": layout, "equal": difference is None, "difference": str(difference or "")}
            )
            _say(args, f"{layout}: {'equal bits' if difference is None else difference}")
    equal = all(result["equal"] for result in results)
    if args.json:
        print(json.dumps({"steps": len(expected), "equal": equal, "layouts": results}, indent=2))
    else:
        tensors = len(expected[0]["weights"])
        verdict = "equal to the 1-rank run" if equal else "NOT equal to the 1-rank run"
        print(f"{len(expected)} steps, {tensors} parameters: {verdict}")
    return 0 if equal else 1


def _compare_precisions(args: argparse.Namespace, command: list[str]) -> int:
    """Runs the script on one rank in both precisions and compares their losses; returns the exit code."""
    from polyreme.verification import compare_losses, read_records

    runs = []
    with signals_raise(), tempfile.TemporaryDirectory(prefix="polyreme-verify-") as folder:
        for precision in (args.precision, "fp32"):
            _say(args, f"{precision}: {args.steps} steps")
            runs.append(read_records(_execute(command, 1, args.steps, folder, precision), 1)[0])
    found = compare_losses(*runs)
    passed = found.drop <= _MAX_DROP
    if args.json:
        result = {"precision": args.precision, "passed": passed, "drop": found.drop, **asdict(found)}
        print(json.dumps(result, indent=2))
    else:
        verdict = "passes" if passed else f"fails: more than {100 * _MAX_DROP:g} % worse"
        print(
            f"loss after {found.steps} steps: {found.final:.6g} in {args.precision}, {found.twin_final:.6g} in fp32:"
            f" {100 * found.drop:+.3f} %; largest difference of a step {100 * found.worst:.3f} %;"
            f" {found.skipped} skipped: {verdict}"
        )
    return 0 if passed else 1


def _num_ranks(layout: str) -> int:
    match = re.fullmatch(r"dp=([1-9][0-9]*)", layout)
    if match is None:
        raise UsageError(f"verify: layout '{layout}'; this version has data parallelism: expected dp=N")
    return int(match[1])


def _execute(
    command: list[str], num_ranks: int, steps: int, folder: str, precision: str | None = None
) -> str:
    """Runs the script and returns the folder of its records."""
    from polyreme.verification import DIR_VARIABLE, PRECISION_VARIABLE, STEPS_VARIABLE

    records = tempfile.mkdtemp(prefix=f"dp-{num_ranks}-", dir=folder)
    environment = {**os.environ, DIR_VARIABLE: records, STEPS_VARIABLE: str(steps)}
    if precision is not None:
        environment[PRECISION_VARIABLE] = precision
    launcher = [sys.executable, "-m", "polyreme", "run", "-n", str(num_ranks), "--", *command]
    output = f"{records}.out"
    with open(output, "wb") as file:
        code = _wait(subprocess.Popen(launcher, env=environment, stdout=file, stderr=subprocess.STDOUT))
    if code != 0:
        with open(output, encoding="utf-8", errors="replace") as text:
            tail = "".join(deque(text, maxlen=30)).rstrip("\n")
        raise UsageError(f"verify: the script ended with exit code {code} on {num_ranks} rank(s):\n{tail}")
    return records


def _wait(launcher: subprocess.Popen[bytes]) -> int:
    """The launcher's exit code; ends it, and so the job, when this process is told to end."""
    try:
        return launcher.wait()
    except BaseException:
        launcher.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(_END_S)
        finally:  # its guard ends the ranks that it leaves behind
            launcher.kill()
            launcher.wait()
        raise


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        print(text, flush=True)
