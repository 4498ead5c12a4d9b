"""`polyreme bench step`: tokens/s, share of the sgemm rate, memory; interleaved with rivals on as many ranks."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..checks import MAX_THREADS, check_int
from ..errors import Error, InvalidArgument
from ..models import GPT
from .contender import Contender
from .gemm import bench_gemm
from .torch_rivals import check_rivals

__all__ = ["StepOptions", "bench_step", "render_step"]

# How far the first losses may be apart, relatively: four digits, or the rounding of 16-bit activations.
_SAME_LOSS = {"fp32": 1e-4}
_SAME_LOSS_16_BIT = 3e-3


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What to measure.

    batch: samples of a step for each rank. micro_batch: of a forward pass.
    ranks: processes of every contender, with `threads` each. axis: along which they divide the work: "dp", "tp" or
        "pp", as a pipeline of equal cost. zero: stage of Polyreme and of DeepSpeed.
    steps: timed ones, after one that warms up. record: with the recorder on, for a breakdown.

    Raises:
        InvalidArgument, NotAvailable: on construction, for what cannot be measured.
    """

    model: GPT
    batch: int = 2
    micro_batch: int = 2
    threads: int = 1
    ranks: int = 1
    axis: str = "dp"
    zero: int = 0
    precision: str = "fp32"
    isa: str = "auto"
    steps: int = 3
    against: tuple[str, ...] = ()
    record: bool = True

    def __post_init__(self) -> None:
        check_int("bench step: threads", self.threads, 1, MAX_THREADS)
        check_int("bench step: ranks", self.ranks, 1)
        check_int("bench step: zero", self.zero, 0, 3)
        if self.isa not in ("auto", "avx2", "avx512", "amx"):
            raise InvalidArgument(f"bench step: isa={self.isa!r}; expected auto, avx2, avx512 or amx")
        if self.batch < 1 or not 1 <= self.micro_batch <= self.batch or self.steps < 1:
            raise InvalidArgument(
                f"bench step: batch={self.batch}, micro_batch={self.micro_batch}, steps={self.steps};"
                " expected 1 <= micro_batch <= batch and steps >= 1"
            )
        if self.axis not in ("dp", "tp", "pp"):
            raise InvalidArgument(f"bench step: --axis {self.axis}; expected dp, tp or pp")
        check_rivals(list(self.against), self.ranks, self.precision, self.batch, self.micro_batch, self.axis)

    @property
    def split(self) -> list[int] | None:
        """Blocks of each stage, of equal cost as far as that goes; None without a pipeline."""
        if self.axis != "pp" or self.ranks == 1:
            return None
        one, two = (dataclasses.replace(self.model, layers=n).cost()["forward_flops"] for n in (1, 2))
        head = one / (two - one) - 1  # in blocks
        others = self.ranks - 1

        def dearest(last: int) -> float:
            return max(last + head, -(-(self.model.layers - last) // others))

        last = min(range(1, self.model.layers - others + 1), key=dearest)
        rest = self.model.layers - last
        return [rest // others + (stage < rest % others) for stage in range(others)] + [last]


def bench_step(options: StepOptions) -> dict[str, Any]:
    """Medians over `steps` training steps after one warm-up, all contenders in turn.

    Every contender starts from the same weights and sees the same tokens; `loss` is that of every step.

    Raises:
        Error: the losses of the first step differ, so it is not the same mathematics; or a contender has ended.
    """
    names = ("polyreme", *options.against)
    runs: dict[str, dict[str, Any]] = {name: {"seconds": [], "cpu_seconds": [], "loss": []} for name in names}
    with ExitStack() as stack:
        weights = stack.enter_context(tempfile.TemporaryDirectory(prefix="polyreme-bench-"))
        settings = {
            **dataclasses.asdict(options),
            "weights": weights,
            "save_weights": bool(options.against),
            "split": options.split,
        }
        contenders = []
        for name in names:  # one after the other: the first leaves the weights
            contenders.append(Contender(name, settings))
            stack.callback(contenders[-1].close)
        for index in range(options.steps + 1):
            for contender in contenders:
                answers = contender.ask("step")
                run = runs[contender.name]
                run["loss"].append(statistics.fmean(answer["loss"] for answer in answers))
                if index > 0:
                    for name in ("seconds", "cpu_seconds"):
                        run[name].append(max(answer[name] for answer in answers))
            if index == 0:
                _check_losses(runs, options.precision)
        for contender in contenders:
            answers = contender.ask("finish")
            run = runs[contender.name]
            run.update(answers[0])
            run["peak_rss_bytes"] = max(answer["peak_rss_bytes"] for answer in answers)
    return _summary(options, runs)


def _check_losses(runs: dict[str, dict[str, Any]], precision: str) -> None:
    ours = runs["polyreme"]["loss"][0]
    limit = _SAME_LOSS.get(precision, _SAME_LOSS_16_BIT)
    for name, run in runs.items():
        if not abs(run["loss"][0] - ours) <= limit * abs(ours):
            raise Error(
                f"bench step: the first loss of {name} is {run['loss'][0]:.6f}, of polyreme {ours:.6f}; expected within"
                f" {limit:g} of it: this is not the same mathematics, so the times say nothing"
            )


def _summary(options: StepOptions, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    # The rate that the step is measured against: the better of ours and the best library's.
    gemm = bench_gemm(
        options.model,
        batch=options.micro_batch,
        threads=options.threads,
        isa=options.isa,
        repeats=3,
        against=["torch"] if options.against else [],
    )
    rate = options.ranks * max(gemm["weighted_gflops"].values())
    tokens = options.ranks * options.batch * options.model.seq_len
    for run in runs.values():
        seconds = statistics.median(run["seconds"])
        run["tokens_per_s"] = tokens / seconds
        run["gflops"] = 1e-9 * options.model.flops_per_token() * tokens / seconds
        run["share_of_sgemm"] = run["gflops"] / rate
    ours = runs["polyreme"]
    return {
        **dataclasses.asdict(options),
        "sgemm_gflops": gemm["weighted_gflops"],
        "runs": runs,
        "speed_ratio": {
            name: statistics.median(
                theirs / own for own, theirs in zip(ours["seconds"], runs[name]["seconds"], strict=True)
            )
            for name in options.against
        },
        "memory_ratio": {
            name: ours["peak_rss_bytes"] / runs[name]["peak_rss_bytes"] for name in options.against
        },
    }


def render_step(result: dict[str, Any]) -> list[str]:
    """The result as a table for people."""
    model = result["model"]
    sgemm = ", ".join(f"{who} {rate:.0f}" for who, rate in result["sgemm_gflops"].items())
    lines = [
        f"GPT {model['layers']} x {model['hidden']}, vocab {model['vocab']}, seq {model['seq_len']}, {result['precision']}:"
        f" {result['ranks']} rank(s) of {result['threads']} thread(s), each with {result['batch']} samples in micro-batches"
        f" of {result['micro_batch']}, zero={result['zero']}, along {result['axis']}",
        f"sgemm on its shapes, one rank, in GFLOP/s: {sgemm}; CPU: processor time of the busiest"
        f" rank over time, {100 * result['threads']}% on a quiet machine; peak RSS: the largest rank's",
        f"{'':13} {'tokens/s':>9} {'GFLOP/s':>8} {'of sgemm':>8} {'s/step':>7} {'min':>7} {'max':>7} {'CPU':>6} {'peak RSS':>9} {'loss':>9}",
    ]
    for name, run in result["runs"].items():
        times = run["seconds"]
        lines.append(
            f"{name:13} {run['tokens_per_s']:9.1f} {run['gflops']:8.1f} {100 * run['share_of_sgemm']:7.1f}%"
            f" {statistics.median(times):7.3f} {min(times):7.3f} {max(times):7.3f}"
            f" {100 * statistics.median(run['cpu_seconds']) / statistics.median(times):5.0f}%"
            f" {run['peak_rss_bytes'] / 2**30:5.2f} GiB {run['loss'][-1]:9.5f}"
        )
    for name, ratio in result["speed_ratio"].items():
        lines.append(
            f"against {name}: {ratio:.2f} x the speed, {result['memory_ratio'][name]:.2f} x the memory"
        )
    ours = result["runs"]["polyreme"]
    breakdown = ours["breakdown_s"]
    total = sum(breakdown.values())
    for kind, seconds in sorted(breakdown.items(), key=lambda item: -item[1]):
        lines.append(f"  {kind:12} {1e3 * seconds:10.3f} ms/step {100 * seconds / total:5.1f}%")
    if breakdown:
        cost = ours["spans"] * ours["span_cost_s"] / statistics.median(ours["seconds"])
        lines.append(
            f"recorder: {1e9 * ours['span_cost_s']:.0f} ns for each of {ours['spans']} spans"
            f" a step, {100 * cost:.4f}% of the step"
        )
    return lines
