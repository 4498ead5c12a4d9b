"""`polyreme schedule`: shows, draws, writes and checks pipeline schedules. Starts no ranks."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from polyreme import schedule as schedules
from polyreme.errors import InvalidArgument
from polyreme.schedule import Costs, Schedule, Timeline
from polyreme.schedule.kinds import PUBLISHED

from . import UsageError

_COSTS = (
    "forward",
    "backward_input",
    "backward_weight",
    "latency",
    "transfer_bytes",
    "bandwidth",
    "gather",
    "reduce",
    "step",
)
_SUFFIXES = (".svg", ".txt", ".json")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser of `schedule` and of its actions."""
    parser = subparsers.add_parser("schedule", help="show, draw and check pipeline schedules")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    show = actions.add_parser(
        "show",
        help="draw a schedule, with its bubble and its peak of activations",
        description="Draws a published schedule or one of a file: letters F (forward), B (both halves of the"
        " backward), I (of the input), W (of the weights), small ones for the later chunks of a rank.",
    )
    what = show.add_mutually_exclusive_group(required=True)
    what.add_argument("--kind", choices=list(PUBLISHED), help="a published schedule")
    what.add_argument("--file", metavar="FILE", help="a schedule in the text form, or the JSON form (.json)")
    show.add_argument("--stages", type=int, metavar="N", help="ranks of the pipeline (with --kind)")
    show.add_argument("--micro-batches", type=int, metavar="N", help="micro-batches of a step (with --kind)")
    show.add_argument("--chunks", type=int, metavar="N", help="chunks per rank of interleaved (2)")
    show.add_argument("--forward-only", action="store_true", help="the lists for evaluation")
    show.add_argument(
        "--costs",
        default="",
        metavar="LIST",
        help="such as forward=1,backward_input=1.1,backward_weight=0.9,latency=0.05; one number for each chunk"
        f" with colons: forward=1:2:2:1; of {', '.join(_COSTS)}",
    )
    show.add_argument("--out", metavar="FILE", help="write a picture (.svg) or the schedule (.txt, .json)")
    show.add_argument("--json", action="store_true", help="print figures and lists as JSON")

    check = actions.add_parser(
        "check",
        help="prove that a schedule of a file is complete, ordered and free of deadlocks",
        description="Exit code 0: valid; 1: not, with rank, position, action and reason.",
    )
    check.add_argument("file", metavar="FILE", help="the text form, or the JSON form if it ends in .json")
    check.add_argument("--lanes", type=int, default=1, metavar="N", help="equal runs of micro-batches (1)")
    check.add_argument("--json", action="store_true", help="print the verdict as JSON")


def run(args: argparse.Namespace) -> int:
    """Does the action and returns the exit code."""
    try:
        return _show(args) if args.action == "show" else _check(args)
    except InvalidArgument as error:
        if args.action == "check":
            raise
        raise UsageError(f"schedule show: {error}") from error
    except OSError as error:
        raise UsageError(
            f"schedule {args.action}: {error}; check the path, its permissions and the free space"
        ) from error


def _show(args: argparse.Namespace) -> int:
    if args.out is not None and Path(args.out).suffix not in _SUFFIXES:
        raise UsageError(
            f"schedule show: --out {args.out}: expected a name that ends in {', '.join(_SUFFIXES)}"
        )
    costs = _parse_costs(args.costs)
    built = _build(args)
    timeline = built.simulate(costs)
    if args.out is not None:
        forms = {".svg": lambda: built.svg(costs), ".txt": built.to_text, ".json": built.to_json}
        _write(Path(args.out), forms[Path(args.out).suffix]())
    if args.json:
        print(json.dumps(_figures(built, timeline) | {"schedule": json.loads(built.to_json())}))
        return 0
    width = shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 160
    print(built.terminal(costs, width=max(width, 20)), end="")
    print(f"makespan {timeline.makespan:g}, bubble {timeline.mean_bubble:.1%}")
    for rank, (bubble, peak) in enumerate(zip(timeline.bubble, built.peak_activations, strict=True)):
        print(f"rank {rank}: bubble {bubble:.1%}, at most {peak} activations at once")
    if args.out is not None:
        print(f"wrote {args.out}")
    return 0


def _write(path: Path, text: str) -> None:
    existed = path.exists()
    try:
        path.write_text(text, encoding="ascii")
    except OSError:
        if not existed:
            path.unlink(missing_ok=True)  # half of it
        raise


def _build(args: argparse.Namespace) -> Schedule:
    if args.file is not None:
        return _build_file(args)
    if args.stages is None or args.micro_batches is None:
        raise UsageError("schedule show: --kind needs --stages N and --micro-batches N")
    if args.chunks is not None and args.kind != "interleaved":
        raise UsageError(f"schedule show: --chunks is for --kind interleaved, not for {args.kind}")
    chunks = {} if args.chunks is None else {"chunks": args.chunks}
    kind = PUBLISHED[args.kind](**chunks)
    build = kind.build_forward_only if args.forward_only else kind.build
    return build(args.stages, args.micro_batches)


def _build_file(args: argparse.Namespace) -> Schedule:
    fixed = schedules.from_file(args.file)
    if args.chunks is not None:
        raise UsageError("schedule show: --chunks is for --kind interleaved; a file has its own")
    stages = fixed.schedule.stages if args.stages is None else args.stages
    micro_batches = fixed.schedule.micro_batches if args.micro_batches is None else args.micro_batches
    build = fixed.build_forward_only if args.forward_only else fixed.build
    return build(stages, micro_batches)


def _parse_costs(text: str) -> Costs:
    values: dict[str, Any] = {}
    for entry in filter(None, text.split(",")):
        name, equals, numbers = entry.partition("=")
        if name not in _COSTS or not equals:
            raise UsageError(
                f"schedule show: --costs {entry!r}: expected name=number, of {', '.join(_COSTS)}"
            )
        if name in values:
            raise UsageError(f"schedule show: --costs: {name} is given twice")
        try:
            parsed = [float(number) for number in numbers.split(":")]
        except ValueError:
            raise UsageError(
                f"schedule show: --costs {entry!r}: {numbers!r} is no number, nor several with ':' between"
            ) from None
        values[name] = parsed[0] if len(parsed) == 1 else parsed
    return Costs(**values)


def _figures(built: Schedule, timeline: Timeline) -> dict[str, Any]:
    return {
        "event": "schedule",
        "stages": built.stages,
        "micro_batches": built.micro_batches,
        "makespan": timeline.makespan,
        "bubble": list(timeline.bubble),
        "mean_bubble": timeline.mean_bubble,
        "peak_activations": list(built.peak_activations),
    }


def _check(args: argparse.Namespace) -> int:
    name = os.fspath(args.file)
    try:
        read = schedules.from_file(name).schedule
    except InvalidArgument as error:
        if not args.json:
            raise
        print(json.dumps({"event": "schedule_check", "file": name, "valid": False, "reason": str(error)}))
        return 1
    problem = read.problem(lanes=args.lanes)
    if args.json:
        verdict: dict[str, Any] = {"event": "schedule_check", "file": name, "valid": problem is None}
        if problem is not None:
            names = ("rank", "position", "action", "waits_for")
            verdict |= {
                "rank": problem.rank,
                "position": problem.position,
                "action": problem.action,
                "reason": problem.reason,
                "cycle": [dict(zip(names, wait, strict=True)) for wait in problem.cycle],
            }
        print(json.dumps(verdict))
        return 0 if problem is None else 1
    if problem is not None:
        raise InvalidArgument(f"{name}: {problem.message}")
    computations = "" if read.has_transfers or read.stages == 1 else ", as computations; transfers are added"
    print(f"{name}: valid, {read.stages} stages, {read.micro_batches} micro-batches{computations}")
    print(f"at most {', '.join(map(str, read.peak_activations))} activations at once on the ranks")
    return 0
