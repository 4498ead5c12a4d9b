"""`polyreme bench`: speed as ratios against named rivals, taken in one run."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from . import UsageError, bench_scaling
from .signals import signals_raise

if TYPE_CHECKING:
    from polyreme.models import GPT


_SIZES = {"layers": 6, "hidden": 768, "heads": 12, "vocab": 50304, "seq_len": 1024}
# The head costs as much as a block then, so that two stages cost the same.
_EVEN_SIZES = {"layers": 7, "vocab": 10240}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser of `bench` and of its kinds."""
    parser = subparsers.add_parser("bench", help="measure speed against other libraries")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    gemm = kinds.add_parser("gemm", help="the model's matrix products")
    step = kinds.add_parser("step", help="whole training steps, with a breakdown and peak memory")
    comm = kinds.add_parser("comm", help="collectives between processes of this host")
    comm.add_argument("--ranks", type=int, default=2, metavar="N", help="(default 2)")
    comm.add_argument(
        "--sizes",
        default="4,1024,65536,1048576,16777216,268435456",
        metavar="LIST",
        help="bytes of the payload, measured in multiples of 4 bytes for each rank",
    )
    comm.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="turns of each contender (default 7)"
    )
    comm.add_argument("--against", default="", metavar="LIST", help="gloo (through PyTorch), mpi (Open MPI)")
    comm.add_argument("--json", action="store_true", help="print the result as JSON")
    rules = kinds.add_parser("optim", help="update rules against a triad, both bound by memory")
    rules.add_argument("--count", type=int, default=1 << 25, metavar="N", help="elements (default 2^25)")
    rules.add_argument("--repeats", type=int, default=9, metavar="N", help="runs, in turn (default 9)")
    rules.add_argument("--threads", type=int, default=1, metavar="N", help="(default 1)")
    rules.add_argument("--isa", default="auto", help="auto, avx2 or avx512 (default auto)")
    rules.add_argument("--json", action="store_true", help="print the result as JSON")
    checkpoint = kinds.add_parser("checkpoint", help="saving and loading on a disk, of one rank")
    checkpoint.add_argument("--mib", type=int, default=1024, metavar="N", help="of state (default 1024)")
    checkpoint.add_argument("--repeats", type=int, default=5, metavar="N", help="turns of each (default 5)")
    checkpoint.add_argument(
        "--directory", metavar="DIR", help="on the disk to measure (default: of temporary files)"
    )
    checkpoint.add_argument(
        "--against", default="", metavar="LIST", help="torch, dcp (torch.distributed.checkpoint)"
    )
    checkpoint.add_argument(
        "--train", action="store_true", help="also what saves cost a training (4 layers x 256, vocab 8192)"
    )
    checkpoint.add_argument("--json", action="store_true", help="print the result as JSON")
    scaling = bench_scaling.add_parser(kinds)
    for each in (gemm, step, scaling):
        size = each.add_argument_group("model")
        for name, default in _SIZES.items():
            even = f"; {_EVEN_SIZES[name]} along pp" if name in _EVEN_SIZES and each is not gemm else ""
            option = f"--{name.replace('_', '-')}"
            size.add_argument(option, type=int, metavar="N", help=f"(default {default}{even})")
        each.add_argument(
            "--threads", type=int, default=1, metavar="N", help="of every contender (default 1)"
        )
        each.add_argument("--isa", default="auto", help="auto, avx2, avx512 or amx (default auto)")
        each.add_argument("--json", action="store_true", help="print the result as JSON")
    gemm.add_argument("--batch", type=int, default=1, metavar="N", help="samples (default 1)")
    gemm.add_argument("--repeats", type=int, default=5, metavar="N", help="runs, in turn (default 5)")
    gemm.add_argument("--against", default="", metavar="LIST", help="torch,numpy")
    gemm.add_argument("--dtype", default="fp32", help="of the operands: fp32, bf16 or fp16 (default fp32)")
    step.add_argument(
        "--batch", type=int, default=2, metavar="N", help="samples of a step for each rank (default 2)"
    )
    step.add_argument(
        "--micro-batch", type=int, metavar="N", help="samples of a forward pass (default: batch)"
    )
    step.add_argument(
        "--steps", type=int, default=3, metavar="N", help="after one warm-up, in turn (default 3)"
    )
    step.add_argument(
        "--against",
        default="",
        metavar="LIST",
        help="torch, torch-compile, torch-ddp, torch-fsdp, deepspeed; torch-dtensor along tp, torch-pipelining along pp",
    )
    step.add_argument("--axis", default="dp", help="that the ranks are along: dp (default), tp, pp")
    step.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes of every contender (default 1, or 2 along tp and pp and against rivals that train on several)",
    )
    step.add_argument(
        "--zero", type=int, default=0, metavar="N", help="stage of ours and of DeepSpeed (default 0)"
    )
    step.add_argument("--precision", default="fp32", help="of every contender (default fp32)")
    step.add_argument("--no-record", action="store_true", help="without the recorder: no breakdown")


def run(args: argparse.Namespace) -> int:
    """Measures, prints, returns 0."""
    from polyreme.errors import InvalidArgument
    from polyreme.launch.config import LaunchError

    try:
        if args.kind == "scaling":
            return bench_scaling.run(args, _gpt(args))
        with signals_raise():
            result, lines = _KINDS[args.kind](args)
    except (InvalidArgument, LaunchError) as error:  # of what the command line says
        raise UsageError(str(error)) from error
    print(json.dumps(result, indent=2) if args.json else "\n".join(lines))
    return 0


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _gpt(args: argparse.Namespace) -> GPT:
    from polyreme.models import GPT

    along_pp = getattr(args, "axis", "dp") == "pp"
    sizes = {**_SIZES, **(_EVEN_SIZES if along_pp else {})}
    given = {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    # A tied head is summed over two stages, which the rivals do not have.
    return GPT(**{**sizes, **given}, tied=not along_pp)


def _optim(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from polyreme.bench.optim import bench_optim, render_optim

    result = bench_optim(count=args.count, threads=args.threads, isa=args.isa, repeats=args.repeats)
    return result, render_optim(result)


def _comm(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from polyreme.bench.comm import bench_comm, render_comm

    try:
        sizes = [int(size) for size in _names(args.sizes)]
    except ValueError:
        raise UsageError(f"--sizes {args.sizes}: expected bytes, such as 4,1048576") from None
    result = bench_comm(ranks=args.ranks, sizes=sizes, repeats=args.repeats, against=_names(args.against))
    return result, render_comm(result)


def _checkpoint(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from polyreme.bench.checkpoint import bench_checkpoint, bench_training, render_checkpoint
    from polyreme.models import GPT

    result = bench_checkpoint(
        num_bytes=args.mib << 20, repeats=args.repeats, directory=args.directory, against=_names(args.against)
    )
    if args.train:
        model = GPT(layers=4, hidden=256, heads=4, vocab=8192, seq_len=256)
        result["training"] = bench_training(model, repeats=args.repeats, directory=args.directory)
    return result, render_checkpoint(result)


def _gemm(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from polyreme.bench.gemm import bench_gemm, render_gemm

    result = bench_gemm(
        _gpt(args),
        batch=args.batch,
        threads=args.threads,
        isa=args.isa,
        repeats=args.repeats,
        against=_names(args.against),
        dtype=args.dtype,
    )
    return result, render_gemm(result)


def _step(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from polyreme.bench.step import StepOptions, bench_step, render_step
    from polyreme.bench.torch_rivals import DISTRIBUTED

    against = tuple(_names(args.against))
    options = StepOptions(
        model=_gpt(args),
        batch=args.batch,
        micro_batch=args.batch if args.micro_batch is None else args.micro_batch,
        threads=args.threads,
        ranks=args.ranks or (2 if args.axis != "dp" or set(against) & set(DISTRIBUTED) else 1),
        axis=args.axis,
        zero=args.zero,
        precision=args.precision,
        isa=args.isa,
        steps=args.steps,
        against=against,
        record=not args.no_record,
    )
    bench_scaling.check_available([args.zero], [args.precision], args.isa)
    result = bench_step(options)
    return result, render_step(result)


_KINDS = {"checkpoint": _checkpoint, "comm": _comm, "gemm": _gemm, "optim": _optim, "step": _step}
