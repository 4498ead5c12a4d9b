"""`polyreme bench scaling`: efficiency over numbers of ranks, inside a launched job or as a job of its own."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import UsageError

if TYPE_CHECKING:
    from polyreme.bench.scaling import ScalingOptions
    from polyreme.models import GPT

_DESCRIPTION = """\
Trains the model on growing numbers of ranks, in turn, and says how much of a rank's speed is kept. Started by
torchrun, srun, mpirun or `polyreme run` it uses the ranks of that job; alone it starts its own on this machine:

  polyreme bench scaling --sizes 1,2 --kinds weak,strong --zero 0,1 --plot scaling.svg
  polyreme bench scaling --axis pp --sizes 1,2 --schedule one_f_one_b,zb_h1 --micro-batches 4,16
  torchrun --nproc-per-node 8 --no-python polyreme bench scaling --out scaling.jsonl
"""


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds the parser of `bench scaling`, without the model's sizes."""
    parser = kinds.add_parser(
        "scaling",
        help="efficiency over numbers of ranks",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--axis", default="dp", help="of the mesh that grows: dp (default), tp, or pp, a stage for each rank")
    add("--sizes", default="", metavar="LIST", help="numbers of ranks (default: 1,2,4,... up to the job's)")
    add("--kinds", default="weak", metavar="LIST", help="weak (default), strong")
    add("--zero", default="0", metavar="LIST", help="ZeRO stages (default 0)")
    add("--precision", default="fp32", metavar="LIST", help="(default fp32)")
    add("--sums", default="ordered", metavar="LIST", help="ordered (default), fast")
    add("--bucket-mib", default="25", metavar="LIST", help="sizes of gradient buckets (default 25)")
    add("--overlap", default="on", metavar="LIST", help="on (default), off: reduce while backward runs")
    add("--prefetch", default="1", metavar="LIST", help="layers gathered ahead with --zero 3 (default 1)")
    add(
        "--batch",
        type=int,
        default=2,
        metavar="N",
        help="samples for each rank (default 2); not with --axis pp",
    )
    add(
        "--micro-batch",
        type=int,
        metavar="N",
        help="samples of a forward pass (default: batch; 1 with --axis pp)",
    )
    add("--schedule", default="one_f_one_b", metavar="LIST", help="with --axis pp (default one_f_one_b)")
    add(
        "--micro-batches",
        default="2,4,8,16",
        metavar="LIST",
        help="with --axis pp: of a step on the most ranks",
    )
    add("--repeats", type=int, default=5, metavar="N", help="turns of each case (default 5)")
    add("--steps", type=int, default=1, metavar="N", help="timed steps of a turn (default 1)")
    add("--warmup", type=int, default=1, metavar="N", help="steps of a turn before them (default 1)")
    add(
        "--copies",
        action="store_true",
        help="measure as many jobs of one rank at once, too: what the machine keeps of its speed without any exchange",
    )
    add("--out", default="", metavar="FILE", help="write every turn and the summary there as JSON lines")
    add("--plot", default="", metavar="FILE", help="draw throughput and efficiency there, as an SVG")
    return parser


def run(args: argparse.Namespace, model: GPT) -> int:
    """Measures in the job that this process belongs to, or launches one; returns the exit code."""
    from polyreme.bench.scaling import ScalingOptions, default_sizes
    from polyreme.environment import read_rank_environment
    from polyreme.errors import InvalidArgument
    from polyreme.launch.env import usable_cpus

    if args.plot and not args.plot.endswith(".svg"):
        raise InvalidArgument(f"--plot {args.plot}: pictures are SVG; give a name that ends in .svg")
    for name, path in (("--out", args.out), ("--plot", args.plot)):  # not after an hour
        if path and not os.access(os.path.dirname(path) or ".", os.W_OK):
            raise InvalidArgument(
                f"{name} {path}: its directory is not there or cannot be written; choose another"
            )
    default_micro_batch = 1 if args.axis == "pp" else args.batch
    options = ScalingOptions(
        model=model,
        axis=args.axis,
        sizes=_numbers("--sizes", args.sizes),
        kinds=tuple(_names(args.kinds)),
        zeros=_numbers("--zero", args.zero),
        precisions=tuple(_names(args.precision)),
        sums=tuple(_names(args.sums)),
        bucket_mibs=_numbers("--bucket-mib", args.bucket_mib),
        overlaps=_switches("--overlap", args.overlap),
        prefetches=_numbers("--prefetch", args.prefetch),
        schedules=tuple(_names(args.schedule)),
        micro_batches=_numbers("--micro-batches", args.micro_batches),
        batch=args.batch,
        micro_batch=default_micro_batch if args.micro_batch is None else args.micro_batch,
        threads=args.threads,
        isa=args.isa,
        repeats=args.repeats,
        steps=args.steps,
        warmup=args.warmup,
        copies=args.copies,
    )
    check_available(options.zeros, options.precisions, options.isa)
    alone = read_rank_environment().size == 1
    if alone and not options.sizes:
        options = options.with_sizes(default_sizes(max(1, len(usable_cpus()[0]) // options.threads)))
    output = {"json": args.json, "out": args.out, "plot": args.plot}
    if alone and options.sizes[-1] > 1:
        return _launch(options, output)
    from polyreme.bench.scaling_worker import Output, run_rank

    run_rank(options, Output(**output))
    return 0


def check_available(zeros: Sequence[int], precisions: Sequence[str], isa: str) -> None:
    """Lets a trainer of a tiny model refuse what this version does not have, before anything is measured."""
    import polyreme as pr
    from polyreme.environment import RankEnvironment

    world = pr.init(environment=RankEnvironment(), num_threads=1, isa=isa)
    tiny = pr.models.GPT(layers=1, hidden=8, heads=1, vocab=8, seq_len=8)
    for zero in zeros:
        for precision in precisions:
            pr.Trainer(
                tiny, pr.Mesh(world), optimizer=pr.AdamW(), global_batch=1, zero=zero, precision=precision
            )


def _launch(options: ScalingOptions, output: dict[str, Any]) -> int:
    from polyreme.launch.config import LaunchConfig, LaunchError
    from polyreme.launch.launcher import launch

    settings = json.dumps({"options": dataclasses.asdict(options), "output": output})
    try:
        return launch(
            LaunchConfig(
                num_ranks=options.sizes[-1],
                command=("polyreme.bench.scaling_worker", settings),
                module=True,
                prefix="never",
            )
        )
    except LaunchError as error:
        raise UsageError(f"bench scaling: {error}") from error


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in _names(text))
    except ValueError:
        raise UsageError(f"{option} {text}: expected numbers, such as 1,2") from None


def _switches(option: str, text: str) -> tuple[bool, ...]:
    known = {"on": True, "off": False}
    if not set(_names(text)) <= set(known):
        raise UsageError(f"{option} {text}: expected on, off")
    return tuple(known[name] for name in _names(text))
