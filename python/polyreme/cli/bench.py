"""`polyreme bench`: speed as ratios against named rivals, taken in one run."""

from __future__ import annotations

import argparse
import json


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser of `bench` and of its kinds."""
    parser = subparsers.add_parser("bench", help="measure speed against other libraries")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    gemm = kinds.add_parser("gemm", help="the model's matrix products")
    step = kinds.add_parser("step", help="whole training steps, with a breakdown and peak memory")
    for each in (gemm, step):
        size = each.add_argument_group("model")
        for name, default in (("layers", 6), ("hidden", 768), ("heads", 12), ("vocab", 50304), ("seq-len", 1024)):
            size.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"(default {default})")
        each.add_argument("--threads", type=int, default=1, metavar="N", help="of every contender (default 1)")
        each.add_argument("--isa", default="auto", help="auto, avx2 or avx512 (default auto)")
        each.add_argument("--json", action="store_true", help="print the result as JSON")
    gemm.add_argument("--batch", type=int, default=1, metavar="N", help="samples (default 1)")
    gemm.add_argument("--repeats", type=int, default=5, metavar="N", help="runs, in turn (default 5)")
    gemm.add_argument("--against", default="", metavar="LIST", help="torch,numpy")
    step.add_argument("--batch", type=int, default=2, metavar="N", help="samples of a step (default 2)")
    step.add_argument("--micro-batch", type=int, metavar="N", help="samples of a forward pass (default: batch)")
    step.add_argument("--steps", type=int, default=3, metavar="N", help="after one warm-up, in turn (default 3)")
    step.add_argument("--against", default="", metavar="LIST", help="torch")
    step.add_argument("--no-record", action="store_true", help="without the recorder: no breakdown")


def run(args: argparse.Namespace) -> int:
    """Measures, prints, returns 0."""
    from polyreme.bench.gemm import bench_gemm, render_gemm
    from polyreme.bench.step import bench_step, render_step
    from polyreme.models import GPT

    model = GPT(layers=args.layers, hidden=args.hidden, heads=args.heads, vocab=args.vocab, seq_len=args.seq_len)
    against = [name for name in args.against.split(",") if name]
    if args.kind == "gemm":
        result = bench_gemm(
            model, batch=args.batch, threads=args.threads, isa=args.isa, repeats=args.repeats, against=against
        )
        lines = render_gemm(result)
    else:
        result = bench_step(
            model,
            batch=args.batch,
            micro_batch=args.micro_batch or args.batch,
            threads=args.threads,
            isa=args.isa,
            steps=args.steps,
            against=against,
            record=not args.no_record,
        )
        lines = render_step(result)
    print(json.dumps(result, indent=2) if args.json else "\n".join(lines))
    return 0
