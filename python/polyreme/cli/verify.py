"""`polyreme verify`: runs a script under several layouts and compares every bit with its 1-rank run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from . import UsageError
from .signals import signals_raise

Records = list[dict[str, Any]]  # of a rank, a step each

_MAX_DROP = 0.01  # of the loss in 16 bits against fp32
_END_S = 15.0  # the launcher's grace period for its ranks, and some more

_DESCRIPTION = """\
Runs the script on one rank and then under every layout, for a few steps each, and compares loss,
gradient norm, every gradient and every weight bit for bit. A layout takes the place of the sizes that
the script gives pr.Mesh and, where it names them, of zero=, schedule= and micro_batch= of pr.Trainer:

  polyreme verify --layouts "dp=2,zero=3 tp=2,pp=2 pp=2,schedule=zb_v" train.py --config small.json
  polyreme verify -n 4 train.py        # the script's own layout, which has 4 ranks

Lanes that the script leaves open (lanes=pr.Lanes(...)) are the same in all runs. Checkpoints are read, but
nothing is saved.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser of `verify`."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a script's bits over layouts",
        usage="polyreme verify [options] [--] script.py [arguments]",
        description=_DESCRIPTION,
        epilog="Exit code: 0 if all bits are equal (with --precision: the loss is not worse by more than 1 %), 1 if"
        " not, 2 if the script could not be run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--layouts",
        metavar="LIST",
        help="separated by spaces; each of dp, tp, pp, zero, schedule, micro_batch, joined by commas (default"
        " dp=2)",
    )
    parser.add_argument("-n", type=int, metavar="N", help="instead: the script's own layout, on N ranks")
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
    from polyreme.verification import first_difference

    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if args.steps is None:
        args.steps = 50 if args.precision else 3
    if not command or args.steps < 1 or (args.n is not None and args.n < 1):
        raise UsageError(
            "verify: give a script and at least 1 step and rank, as in: polyreme verify --steps 3 script.py"
        )
    given = [f"--{name}" for name in ("layouts", "precision") if getattr(args, name) is not None]
    given += ["-n"] if args.n is not None else []
    if len(given) > 1:
        raise UsageError(f"verify: {' and '.join(given)}: give one of them; each is a comparison of its own")
    if args.precision:
        return _compare_precisions(args, command)
    results = []
    with signals_raise(), tempfile.TemporaryDirectory(prefix="polyreme-verify-") as folder:
        for text, records, expected in _runs(args, command, folder):
            difference = first_difference(expected, records)
            results.append({"layout": text, "equal": difference is None, "difference": str(difference or "")})
            _say(args, f"{text}: {'equal bits' if difference is None else difference}")
    equal = all(result["equal"] for result in results)
    if len(expected) < args.steps:
        _say(args, f"the script ends after {len(expected)} of {args.steps} steps")
    if args.json:
        print(json.dumps({"steps": len(expected), "equal": equal, "layouts": results}, indent=2))
    else:
        tensors = len(expected[0]["weights"])
        verdict = "equal to the 1-rank run" if equal else "NOT equal to the 1-rank run"
        print(f"{len(expected)} step{'s'[: len(expected) != 1]}, {tensors} parameters: {verdict}")
    return 0 if equal else 1


def _runs(
    args: argparse.Namespace, command: list[str], folder: str
) -> Iterator[tuple[str, list[Records], Records]]:
    """Each layout with the records of its ranks and of the 1-rank run."""
    from polyreme.errors import InvalidArgument
    from polyreme.layout import Layout, lanes_of

    def execute(num_ranks: int, layout: str | None, lanes: dict[str, int]) -> list[Records]:
        return _execute(command, num_ranks, args.steps, folder, layout=layout, lanes=lanes)

    def execute_alone(lanes: dict[str, int]) -> Records:
        _say(args, "the 1-rank run")
        return execute(1, "dp=1", lanes)[0]

    if args.n is not None:
        text = f"the script's own layout on {args.n} rank{'s' if args.n > 1 else ''}"
        own = execute(args.n, None, {})
        yield text, own, execute_alone(own[0][0]["lanes"])
        return
    layouts_text = "dp=2" if args.layouts is None else args.layouts
    try:
        layouts = {text: Layout.parse(text) for text in layouts_text.split()}
    except InvalidArgument as error:
        raise UsageError(f"verify: {error}") from None
    if not layouts:
        raise UsageError(f"verify: --layouts {args.layouts!r} is empty; give at least one, such as 'dp=2'")
    lanes = lanes_of(layouts.values())
    expected = execute_alone(lanes)
    for text, layout in layouts.items():
        yield text, execute(layout.num_ranks, text, lanes), expected


def _compare_precisions(args: argparse.Namespace, command: list[str]) -> int:
    """Runs the script on one rank in both precisions and compares their losses; returns the exit code."""
    from polyreme.verification import compare_losses

    runs = []
    with signals_raise(), tempfile.TemporaryDirectory(prefix="polyreme-verify-") as folder:
        for precision in (args.precision, "fp32"):
            _say(args, f"{precision}: {args.steps} steps")
            runs.append(_execute(command, 1, args.steps, folder, precision=precision)[0])
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


def _execute(
    command: list[str],
    num_ranks: int,
    steps: int,
    folder: str,
    *,
    layout: str | None = None,
    lanes: dict[str, int] | None = None,
    precision: str | None = None,
) -> list[Records]:
    """Runs the script and returns the records of its ranks."""
    from polyreme.verification import read_records, variables

    place = tempfile.mkdtemp(prefix=f"{num_ranks}-ranks-", dir=folder)
    environment = {**os.environ, **variables(place, steps, layout=layout, lanes=lanes, precision=precision)}
    launcher = [sys.executable, "-m", "polyreme", "run", "-n", str(num_ranks), "--", *command]
    output = f"{place}.out"
    with open(output, "wb") as file:
        code = _wait(subprocess.Popen(launcher, env=environment, stdout=file, stderr=subprocess.STDOUT))
    if code != 0:
        with open(output, encoding="utf-8", errors="replace") as text:
            tail = "".join(deque(text, maxlen=30)).rstrip("\n")
        where = f"{num_ranks} rank(s)" + (f" with {layout}" if layout is not None else "")
        raise UsageError(f"verify: the script ended with exit code {code} on {where}:\n{tail}")
    return read_records(place, num_ranks)


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
