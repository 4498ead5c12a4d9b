"""`polyreme bench scaling`: what is measured, and what follows from it. Pure: scaling_worker.py measures.

A *case* is one way to run the model; a *turn* runs a case once, from fresh weights: warm-up steps, then timed ones.
The cases take turns, so that a machine that slows down does so for all of them; a *repeat* is a turn of every case.

Efficiency of n ranks is their tokens/s for each rank over those of the smallest size, repeat by repeat, so what
the machine did meanwhile cancels out. It is averaged as logarithms, with the interval of Student's t at 95 %.

*Copies* are as many jobs of one rank as a size has ranks, at once, which know nothing of each other; their time is that
of the slowest. Their efficiency is what the machine keeps (shared memory and caches, cores of different speed, what
else runs on them), and the best that any runtime can have there; what is missing beyond it is ours.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..checks import MAX_THREADS, check_int
from ..errors import InvalidArgument
from ..models import GPT
from ..schedule.kinds import PUBLISHED

__all__ = ["Case", "ScalingOptions", "default_sizes", "render_scaling", "summarise"]

KINDS = ("weak", "strong")
# Two-sided, 95 %, for 1, 2, ... degrees of freedom; the normal distribution's beyond.
# fmt: off
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
_NORMAL = 1.960


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the model.

    size: ranks. batch: samples of a step over all of them. schedule, micro_batches: of a pipeline, else "" and 0.
    copies: a job of one rank on each of them, of `batch` samples.
    """

    size: int
    batch: int
    zero: int
    precision: str
    sums: str
    bucket_mib: int
    overlap: bool
    prefetch: int = 1
    schedule: str = ""
    micro_batches: int = 0
    copies: bool = False

    @property
    def label(self) -> str:
        """What it is apart from its size."""
        if self.schedule:
            return f"{self.schedule}, {self.micro_batches} micro-batches, {self.precision}"
        overlap = "overlap" if self.overlap else "no overlap"
        ahead = f" prefetch {self.prefetch}" if self.prefetch != 1 else ""
        return f"zero={self.zero} {self.precision} {self.sums} {self.bucket_mib} MiB {overlap}{ahead}"


@dataclass(frozen=True, kw_only=True)
class ScalingOptions:
    """What to measure.

    sizes: numbers of ranks; the smallest is what efficiency refers to. Empty: by the job.
    kinds: "weak": `batch` samples for each rank; "strong": `batch` for each rank of the largest size, over all ranks.
    axis: "dp", "tp", or "pp": a pipeline of as many stages. There micro_batches takes the place of `batch`: those of a
        step on the largest size, and each rank's share of their samples on the others.
    zeros, precisions, sums, bucket_mibs, overlaps, prefetches, schedules, micro_batches: every combination is measured.
    threads: of each rank, which is pinned to as many CPUs.
    copies: measures them too, beside weak scaling from one rank.

    Raises:
        InvalidArgument: on construction, for what cannot be measured.
    """

    model: GPT
    axis: str = "dp"
    sizes: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ("weak",)
    zeros: tuple[int, ...] = (0,)
    precisions: tuple[str, ...] = ("fp32",)
    sums: tuple[str, ...] = ("ordered",)
    bucket_mibs: tuple[int, ...] = (25,)
    overlaps: tuple[bool, ...] = (True,)
    prefetches: tuple[int, ...] = (1,)
    schedules: tuple[str, ...] = ("one_f_one_b",)
    micro_batches: tuple[int, ...] = (2, 4, 8, 16)
    batch: int = 2
    micro_batch: int = 2
    threads: int = 1
    isa: str = "auto"
    repeats: int = 5
    steps: int = 1
    warmup: int = 1
    copies: bool = False

    def __post_init__(self) -> None:
        if self.axis not in ("dp", "tp", "pp"):
            raise InvalidArgument(f"--axis {self.axis}: expected dp, tp or pp")
        _check_list("--kinds", self.kinds, KINDS)
        _check_list("--precision", self.precisions)
        _check_list("--zero", self.zeros)
        _check_list("--bucket-mib", self.bucket_mibs)
        _check_list("--overlap", ["on" if overlap else "off" for overlap in self.overlaps])
        for mib in self.bucket_mibs:
            check_int("--bucket-mib", mib, 1)
        _check_list("--prefetch", self.prefetches)
        for layers in self.prefetches:
            check_int("--prefetch", layers, 0)
        if len(self.prefetches) > 1 and self.zeros != (3,):
            raise InvalidArgument("--prefetch: several of them make a difference with --zero 3 alone")
        _check_list("--sums", self.sums, ("ordered", "fast"))
        for name, low in (("batch", 1), ("micro_batch", 1), ("repeats", 1), ("steps", 1), ("warmup", 0)):
            check_int(f"bench scaling: {name}", getattr(self, name), low)
        check_int("bench scaling: threads", self.threads, 1, MAX_THREADS)
        if self.sizes:
            _check_list("--sizes", self.sizes)
            if self.copies and (self.sizes[0] != 1 or "weak" not in self.kinds):
                raise InvalidArgument(
                    "--copies: of one rank, beside weak scaling; give --kinds weak --sizes 1,2"
                )
            if min(self.sizes) < 1 or list(self.sizes) != sorted(self.sizes):
                raise InvalidArgument(f"--sizes {_text(self.sizes)}: expected ascending numbers of ranks")
        _check_list("--schedule", self.schedules, tuple(PUBLISHED))
        _check_list("--micro-batches", self.micro_batches)
        if self.axis == "pp":
            self._check_micro_batches()
        else:
            self._check_batch()

    def _check_micro_batches(self) -> None:
        for count in self.micro_batches:
            check_int("--micro-batches", count, 1)
            for size in self.sizes if "weak" in self.kinds else ():
                if count * self.micro_batch * size % self.sizes[-1]:
                    raise InvalidArgument(
                        f"--micro-batches {count} of {self.micro_batch} samples: {size} of {self.sizes[-1]} ranks have no"
                        f" equal share of them; choose multiples of {self.sizes[-1]}"
                    )

    def _check_batch(self) -> None:
        if self.batch % self.micro_batch:
            raise InvalidArgument(
                f"bench scaling: batch={self.batch} is not a multiple of micro_batch={self.micro_batch}"
            )
        if "strong" in self.kinds and self.sizes:
            for size in self.sizes:
                if self.batch * self.sizes[-1] % size:
                    raise InvalidArgument(
                        f"--kinds strong: {size} ranks do not divide the batch of {self.batch * self.sizes[-1]} samples,"
                        f" which is --batch {self.batch} for each of {self.sizes[-1]} ranks; choose other sizes or batch"
                    )

    def with_sizes(self, sizes: Sequence[int]) -> ScalingOptions:
        """The same with these sizes."""
        return dataclasses.replace(self, sizes=tuple(sizes))

    def batch_of(self, kind: str, size: int, micro_batches: int = 0) -> int:
        """Samples of a step over `size` ranks."""
        if micro_batches:
            whole = micro_batches * self.micro_batch
            return whole * size // self.sizes[-1] if kind == "weak" else whole
        return self.batch * (size if kind == "weak" else self.sizes[-1])

    def series(self) -> list[tuple[str, list[Case]]]:
        """(kind, cases by size) of every line of the result. Cases are shared: one rank has nothing to shard."""
        found = []
        reduction = (self.sums, self.bucket_mibs, self.overlaps, self.prefetches)
        choices = (self.kinds, self.zeros, self.precisions, *reduction)
        pipelines = itertools.product(self.schedules, self.micro_batches) if self.axis == "pp" else [("", 0)]
        for (kind, zero, precision, sums, mib, overlap, ahead), (schedule, count) in itertools.product(
            itertools.product(*choices), pipelines
        ):
            whole = Case(
                size=self.sizes[-1],
                batch=self.batch_of(kind, self.sizes[-1], count),
                schedule=schedule,
                micro_batches=count,
                zero=zero,
                precision=precision,
                sums=sums,
                bucket_mib=mib,
                overlap=overlap,
                prefetch=ahead,
            )
            found.append((kind, [self._at(whole, kind, size) for size in self.sizes]))
        return found

    def _at(self, case: Case, kind: str, size: int) -> Case:
        batch = self.batch_of(kind, size, case.micro_batches)
        if size > 1:
            count = -(-batch // self.micro_batch) if case.schedule else 0
            return dataclasses.replace(case, size=size, batch=batch, micro_batches=count)
        return Case(
            size=1,
            batch=batch,
            zero=0,
            precision=case.precision,
            sums="ordered",
            bucket_mib=self.bucket_mibs[0],
            overlap=self.overlaps[0],
            prefetch=self.prefetches[0],
        )

    def copies_of(self, base: Case) -> list[Case]:
        """The copies of a case of one rank, by size."""
        return [dataclasses.replace(base, size=size, copies=True) for size in self.sizes[1:]]

    def cases(self) -> list[Case]:
        """Every case once, in the order of their turns."""
        found: dict[Case, None] = {}
        for kind, cases in self.series():
            found[cases[0]] = None
            if self.copies and kind == "weak":
                found.update(dict.fromkeys(self.copies_of(cases[0])))
            found.update(dict.fromkeys(cases))
        return list(found)


def _check_list(name: str, values: Sequence[Any], known: Sequence[str] = ()) -> None:
    good = bool(values) and len(set(values)) == len(values) and (not known or set(values) <= set(known))
    if not good:
        expected = f"different ones among {', '.join(known)}" if known else "different values"
        raise InvalidArgument(f"{name} {_text(values)}: expected {expected}")


def _text(values: Sequence[Any]) -> str:
    return ",".join(str(value) for value in values) or "''"


def default_sizes(num_ranks: int) -> list[int]:
    """1, 2, 4, ... and num_ranks itself."""
    return sorted({1 << i for i in range(num_ranks.bit_length()) if 1 << i <= num_ranks} | {num_ranks})


def interval(ratios: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Geometric mean and its 95 % interval by Student's t on logarithms; without one for a single value."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None, None
    freedom = len(logs) - 1
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL
    half = student * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def summarise(options: ScalingOptions, turns: dict[Case, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each size of each series. `turns`: what every turn of a case gave, repeat by repeat.

    seconds: median of a step. efficiency with its interval refers to the smallest size of the series;
    ratio, of the first series of the same kind and batch (`reference`) over this one's seconds, to the same size.
    bubble, predicted, balance: as in pipeline_times, None without a pipeline.
    copies, of_copies: the efficiency of as many copies, and this one's over it, each with its interval; None if they
    were not measured.
    """
    rows = []
    first: dict[tuple[str, int, int], tuple[str, Case]] = {}
    for kind, cases in options.series():
        for case in cases:
            here = [turn["seconds"] for turn in turns[case]]
            rates = [case.batch / (case.size * seconds) for seconds in here]
            base = [cases[0].batch / (cases[0].size * turn["seconds"]) for turn in turns[cases[0]]]
            efficiency, low, high = interval([rate / b for rate, b in zip(rates, base, strict=True)])
            label, other = first.setdefault((kind, case.size, case.batch), (cases[-1].label, case))
            ratio, ratio_low, ratio_high = interval(
                [turn["seconds"] / seconds for turn, seconds in zip(turns[other], here, strict=True)]
            )
            seconds = statistics.median(here)
            copies = of_copies = None
            if options.copies and kind == "weak" and case.size > 1:
                copy = dataclasses.replace(cases[0], size=case.size, copies=True)
                own = [cases[0].batch / turn["seconds"] for turn in turns[copy]]
                copies = interval([rate / b for rate, b in zip(own, base, strict=True)])
                of_copies = interval([rate / c for rate, c in zip(rates, own, strict=True)])
            rows.append(
                {
                    "record": "summary",
                    "kind": kind,
                    # A series keeps its name at one rank, where its case is shared.
                    "label": cases[-1].label,
                    **dataclasses.asdict(cases[-1]),
                    "size": case.size,
                    "batch": case.batch,
                    "seconds": seconds,
                    "spread": [min(here), max(here)],
                    "tokens_per_s": case.batch * options.model.seq_len / seconds,
                    "efficiency": efficiency,
                    "efficiency_low": low,
                    "efficiency_high": high,
                    "copies": copies,
                    "of_copies": of_copies,
                    "reference": label,
                    "ratio": ratio,
                    "ratio_low": ratio_low,
                    "ratio_high": ratio_high,
                    "peak_bytes": max(turn["peak_bytes"] for turn in turns[case]),
                    "cpu_seconds": statistics.median(turn["cpu_seconds"] for turn in turns[case]),
                    **{name: _median(turns[case], name) for name in ("bubble", "predicted", "balance")},
                    "collective_s": statistics.median(turn["collective_s"] for turn in turns[case]),
                    "loss": turns[case][0]["loss"],
                }
            )
    return rows


def _median(turns: Sequence[dict[str, Any]], name: str) -> float | None:
    return statistics.median(turn[name] for turn in turns) if all(name in turn for turn in turns) else None


def _columns(row: dict[str, Any]) -> list[tuple[str, str]]:
    """(title, value) of what tells the series apart, as wide as the values."""
    if not row["schedule"]:
        return [
            ("zero", f"{row['zero']:>4}"),
            ("precision", f"{row['precision']:9}"),
            ("sums", f"{row['sums']:7}"),
            ("bucket", f"{row['bucket_mib']:>3} MiB"),
            ("overlap", f"{'on' if row['overlap'] else 'off':>7}"),
        ]

    def share(name: str) -> str:
        return "-" if row[name] is None else f"{100 * row[name]:.2f}%"

    return [
        ("schedule", f"{row['schedule']:12}"),
        ("precision", f"{row['precision']:9}"),
        ("m", f"{row['micro_batches']:>3}"),
        ("bubble", f"{share('bubble'):>7}"),
        ("predicted", f"{share('predicted'):>9}"),
        ("balance", f"{share('balance'):>7}"),
    ]


def _render_copies(rows: list[dict[str, Any]]) -> list[str]:
    def text(value: tuple[float, float | None, float | None]) -> str:
        mean, low, high = value
        return f"{100 * mean:.1f}%" + (
            "" if low is None or high is None else f" ({100 * low:.1f} - {100 * high:.1f}%)"
        )

    return [
        f"{row['size']} ranks, {row['label']}: {text(row['of_copies'])} of {row['size']} jobs of one rank at once, which"
        f" have an efficiency of {text(row['copies'])}"
        for row in rows
        if row["copies"]
    ]


def render_scaling(settings: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """The result as a table for people."""
    model = settings["model"]
    of_pipeline = bool(rows[0]["schedule"])
    samples = "" if of_pipeline else f"{settings['batch']} samples for each rank in "
    lines = [
        f"GPT {model['layers']} x {model['hidden']}, vocab {model['vocab']}, seq {model['seq_len']}; {samples}micro-batches"
        f" of {settings['micro_batch']}, {settings['threads']} thread(s) each;"
        f" {settings['repeats']} repeats of {settings['steps']} step(s) in turn",
        f"{settings['launcher']}: {settings['ranks']} ranks on {len(set(settings['hosts']))} host(s);"
        f" {'pinned' if settings['pinned'] else 'not pinned'}; load {settings['load_average']:.1f}; {settings['device']}",
        "efficiency: tokens/s for each rank over those of the smallest size, with its 95 % interval; CPU: processor time of"
        f" the busiest rank over time, {100 * settings['threads']}% on a quiet machine;"
        " collectives: time in flight, hidden behind computation or not",
    ]
    if of_pipeline:
        lines.append(
            "bubble: share of the stages' time without a computation, of m micro-batches; predicted: by the schedule, from the"
            " measured times of each stage's computations; balance: the mean stage's busy time over the busiest's"
        )
    titles = " ".join(f"{title:>{len(value)}}" for title, value in _columns(rows[0]))
    lines.append(
        f"{'kind':6} {titles} {'ranks':>5} {'batch':>5} {'s/step':>8} {'tokens/s':>10} {'efficiency':>10} {'interval':>16} {'CPU':>6} {'collectives':>11} {'memory':>10}"
    )
    for row in rows:
        low, high = row["efficiency_low"], row["efficiency_high"]
        is_base = low is None or low == high
        between = "-" if is_base else f"{100 * low:6.2f} - {min(100 * high, 999.99):6.2f}%"
        lines.append(
            f"{row['kind']:6} {' '.join(value for _, value in _columns(row))} {row['size']:>5} {row['batch']:>5}"
            f" {row['seconds']:8.4f} {row['tokens_per_s']:10.1f} {100 * row['efficiency']:9.2f}% {between:>16}"
            f" {100 * row['cpu_seconds'] / row['seconds']:5.0f}% {100 * row['collective_s'] / row['seconds']:10.2f}% {row['peak_bytes'] / 2**20:6.0f} MiB"
        )
    lines += _render_copies(rows)
    compared = [row for row in rows if row["label"] != row["reference"] and row["size"] > 1]
    for row in compared:
        low, high = row["ratio_low"], row["ratio_high"]
        between = f" ({low:.3f} to {high:.3f})" if low is not None else ""
        lines.append(
            f"{row['kind']}, {row['size']} ranks: {row['reference']} takes {row['ratio']:.3f}{between} of the time of"
            f" {row['label']}"
        )
    if len(settings["sums"]) > 1:
        lines.append("over shared memory, TCP and MPI the fast sums are the ordered ones; NCCL has others")
    crowded = settings["crowded_sizes"]
    if crowded:
        lines.append(f"more threads than CPUs at {_text(crowded)} ranks: no measure of scaling there")
    return lines
