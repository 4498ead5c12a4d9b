"""A rank of `bench scaling`, under whichever launcher: every turn has a world of its own, of the first n ranks.

The worlds meet through the job's own, in which the other ranks wait asleep. Rank 0 tells the result.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import resource
import secrets
import sys
import time
from collections.abc import Callable
from itertools import filterfalse
from typing import Any

import numpy as np

import polyreme as pr
from polyreme.environment import RankEnvironment, read_rank_environment
from polyreme.environment.meeting import listen
from polyreme.errors import Error, InvalidArgument
from polyreme.launch.env import usable_cpus
from polyreme.schedule.kinds import PUBLISHED

from .pipeline_times import bubbles, is_of_stage, own_times
from .scaling import Case, ScalingOptions, default_sizes, render_scaling, summarise
from .scaling_plot import plot_scaling

_DAY_S = 86400.0  # how long ranks may wait for the turns of others
_MAX_CPUS = 4096

# What a turn gives, and how ranks' values become one.
_NUMBERS = ("seconds", "cpu_seconds", "peak_bytes", "rss_bytes", "collective_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Where the result goes: JSON lines instead of a table, a file of them, a picture."""

    json: bool = False
    out: str = ""
    plot: str = ""


def run_rank(options: ScalingOptions, output: Output) -> None:
    """Measures as a rank of the job that the environment tells of. Collective; rank 0 prints and writes."""
    environment = read_rank_environment()
    world = pr.init(num_threads=1, isa=options.isa, timeout_s=_DAY_S)
    if not options.sizes:
        options = options.with_sizes(default_sizes(world.size))
    if options.sizes[-1] > world.size:
        raise InvalidArgument(
            f"--sizes {','.join(map(str, options.sizes))}: this job has {world.size} rank(s); start"
            f" {options.sizes[-1]} of them, or give smaller sizes"
        )
    job = _Job(world, environment, options)
    _measure(job, _teller(output) if world.rank == 0 else _silent)
    job.group.barrier(timeout_s=_DAY_S)


def _silent(settings: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """What the other ranks say."""


def _teller(output: Output) -> Callable[[dict[str, Any], list[dict[str, Any]]], None]:
    """Writes records as they come, and with the summary the table and the picture."""
    for path in filter(None, (output.out, output.plot)):
        with open(path, "w", encoding="utf-8"):  # a path that cannot be written is told now
            pass

    def tell(settings: dict[str, Any], records: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(record) + "\n" for record in records)
        if output.json:
            print(lines, end="", flush=True)
        if output.out:
            with open(output.out, "a", encoding="utf-8") as file:
                file.write(lines)
        if records[0]["record"] != "summary":
            return
        if not output.json:
            print("\n".join(render_scaling(settings, records)), flush=True)
        if output.plot:
            with open(output.plot, "w", encoding="utf-8") as file:
                file.write(plot_scaling(settings, records))

    return tell


class _Job:
    """The job's world with its facts; makes the worlds of turns."""

    def __init__(self, world: pr.World, environment: RankEnvironment, options: ScalingOptions) -> None:
        self.world = world
        self.options = options
        self.environment = environment
        self.group = pr.Mesh(world)["dp"]
        self.cpus = self._pin()

    def _pin(self) -> list[list[int]]:
        """Pins this rank to as many CPUs as it has threads, where there are enough; the CPUs of every rank.

        Ranks of a host that may use the same CPUs share them out in order of rank; launchers that bind have
        done that already.
        """
        threads = self.options.threads
        own, _ = usable_cpus()
        sets = self._gather_cpus(own)
        hosts = self.world.hosts
        here = [r for r in range(self.world.size) if hosts[r] == hosts[self.world.rank]]
        sharers = [r for r in here if sets[r] == sorted(own)]
        if len(own) >= threads * len(sharers):
            place = threads * sharers.index(self.world.rank)
            os.sched_setaffinity(0, own[place : place + threads])
        return self._gather_cpus(sorted(os.sched_getaffinity(0)))

    def _gather_cpus(self, cpus: list[int]) -> list[list[int]]:
        bits = np.zeros((1, _MAX_CPUS), dtype=np.uint8)
        bits[0, [cpu for cpu in cpus if cpu < _MAX_CPUS]] = 1
        return [np.flatnonzero(row).tolist() for row in self.group.all_gather(bits)]

    @property
    def is_pinned(self) -> bool:
        """Every rank has CPUs of its own, as many as it has threads."""
        per_host: dict[str, list[int]] = {}
        for host, cpus in zip(self.world.hosts, self.cpus, strict=True):
            per_host.setdefault(host, []).extend(cpus)
        alone = all(len(set(cpus)) == len(cpus) for cpus in per_host.values())
        return alone and all(len(cpus) == self.options.threads for cpus in self.cpus)

    def crowded_sizes(self) -> list[int]:
        """Sizes at which some host has more threads than CPUs for them."""
        found = []
        for size in self.options.sizes:
            for host in set(self.world.hosts):
                here = [r for r in range(size) if self.world.hosts[r] == host]
                cpus = {cpu for r in here for cpu in self.cpus[r]}
                if len(here) * self.options.threads > len(cpus):
                    found.append(size)
                    break
        return found

    def make_environment(self, size: int, turn: int, *, copies: bool) -> RankEnvironment | None:
        """Who this rank is in a world of the first `size` ranks, or None; rank 0 tells its port and a secret.

        copies: each of them in a world of its own.
        """
        if size == 1 or copies:
            return RankEnvironment() if self.world.rank < size else None
        token = np.zeros(33, dtype=np.int64)
        listener = None
        if self.world.rank == 0:
            listener = listen(self.environment.master_addr)
            token[0] = listener.getsockname()[1]
            token[1:] = list(secrets.token_bytes(32))
        token = self.group.broadcast(token)
        hosts = self.world.hosts[:size]
        if self.world.rank >= size:
            return None
        here = [r for r in range(size) if hosts[r] == hosts[self.world.rank]]
        return RankEnvironment(
            launcher="bench scaling",
            rank=self.world.rank,
            size=size,
            local_rank=here.index(self.world.rank),
            local_size=len(here),
            master_addr=self.environment.master_addr,
            master_port=int(token[0]),
            secret=bytes(token[1:].tolist()).hex(),
            job_id=f"scaling-{int(token[0])}-{turn}",
            store_fd=None if listener is None else listener.detach(),
            port_is_held=True,
        )


def _measure(job: _Job, tell: Callable[[dict[str, Any], list[dict[str, Any]]], None]) -> None:
    options = job.options
    settings = {
        "record": "settings",
        **dataclasses.asdict(options),
        "launcher": job.environment.launcher if job.world.size > 1 else "one rank",
        "ranks": job.world.size,
        "hosts": job.world.hosts,
        "cpus": job.cpus,
        "pinned": job.is_pinned,
        "crowded_sizes": job.crowded_sizes(),
        "device": job.world.device,
        "load_average": os.getloadavg()[0],
        "version": pr.__version__,
    }
    tell(settings, [settings])
    cases = options.cases()
    turns: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for repeat in range(options.repeats):
        for index, case in enumerate(cases):
            number = repeat * len(cases) + index
            result = _turn(job, case, number)
            turns[case].append(result)
            tell(settings, [{"record": "turn", "repeat": repeat, **dataclasses.asdict(case), **result}])
            if job.world.rank == 0 and sys.stderr.isatty():
                print(f"\rturn {number + 1} of {options.repeats * len(cases)} ", end="", file=sys.stderr)
    _check_losses(turns, options.axis)
    tell(settings, summarise(options, turns))


def _turn(job: _Job, case: Case, number: int) -> dict[str, Any]:
    """One turn; the same on every rank of the job: the slowest rank's seconds, the largest rank's memory."""
    result: dict[str, Any] = dict.fromkeys(_NUMBERS, 0.0)
    environment = job.make_environment(case.size, number, copies=case.copies)
    if environment is not None:
        result.update(_train(job, case, environment))
    gc.collect()  # the trainer's memory, before the next turn takes its own
    values = np.array([result[name] for name in _NUMBERS])
    largest = job.group.all_reduce(values, "max")
    loss = job.group.broadcast(np.array([result.get("loss", 0.0)]))
    return {
        **dict(zip(_NUMBERS, largest.tolist(), strict=True)),
        **_bubbles(job, case, result.get("stage_times")),
        "loss": float(loss[0]),
        "step_seconds": result.get("step_seconds", []),
        "breakdown_s": result.get("breakdown_s", {}),
    }


def _bubbles(job: _Job, case: Case, own: Any) -> dict[str, float]:
    """What the ranks of a pipeline did with their time; nothing where they share no clock, or spans were lost."""
    if not case.schedule:
        return {}
    schedule = PUBLISHED[case.schedule]().build(case.size, case.micro_batches)
    steps = job.options.steps
    num_chunks = sum(len(chunks) for chunks in schedule.chunks)
    row = np.full((1, 3 * (steps + num_chunks)), np.nan)
    if own is not None:
        row[0] = own
    times = job.group.all_gather(row)[: case.size]
    if np.isnan(times).any() or len(set(job.world.hosts[: case.size])) > 1:
        return {}
    return bubbles(times, schedule, steps)


def _train(job: _Job, case: Case, environment: RankEnvironment) -> dict[str, Any]:
    """The turn on a rank that takes part in it."""
    options = job.options
    world = pr.init(environment=environment, num_threads=options.threads, isa=options.isa, sums=case.sums)
    axes: dict[str, Any] = {options.axis: world.size}
    mesh = pr.Mesh(world, **axes)
    trainer = pr.Trainer(
        options.model,
        mesh,
        optimizer=pr.AdamW(lr=1e-4, weight_decay=0.1),
        clip_norm=1.0,
        global_batch=case.batch,
        micro_batch=options.micro_batch,
        zero=pr.Zero(
            stage=case.zero,
            bucket_bytes=case.bucket_mib << 20,
            overlap=case.overlap,
            prefetch=case.prefetch,
        ),
        precision=case.precision,
        schedule=PUBLISHED[case.schedule]() if case.schedule else None,
    )
    rows = case.batch // mesh.size("dp")
    place = mesh.coordinate("dp")
    losses: list[float] = []
    seconds: list[float] = []
    cpu_seconds = 0.0
    for step in range(options.warmup + options.steps):
        tokens = _tokens(options, case, step)[place * rows : (place + 1) * rows]
        inputs, targets = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
        world._core.record(step >= options.warmup)
        world.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(trainer.step(inputs, targets).loss)
        if step >= options.warmup:
            seconds.append(time.perf_counter() - start)
            cpu_seconds += (time.process_time() - cpu_start) / options.steps
    world._core.record(False)
    breakdown: dict[str, float] = {}
    spans = world._core.spans()
    for span in filterfalse(is_of_stage, spans):
        taken = 1e-9 * (span["end_ns"] - span["start_ns"]) / options.steps
        breakdown[span["kind"]] = breakdown.get(span["kind"], 0.0) + taken
    result = {
        "seconds": sum(seconds) / options.steps,
        "cpu_seconds": cpu_seconds,
        "step_seconds": seconds,
        "loss": losses[0],
        "peak_bytes": world.memory()["peak_bytes"],
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "collective_s": breakdown.get("collective", 0.0),
        "breakdown_s": breakdown,
    }
    if trainer.schedule is not None:
        result["stage_times"] = own_times(spans, trainer.schedule, mesh.coordinate("pp"), options.steps)
    world.barrier()  # nobody leaves while another still computes
    return result


def _tokens(options: ScalingOptions, case: Case, step: int) -> Any:
    """int32 [batch, seq_len + 1] of the global batch, equal for equal batches."""
    shape = (case.batch, options.model.seq_len + 1)
    return np.random.default_rng(step).integers(0, options.model.vocab, shape, dtype=np.int32)


def _check_losses(turns: dict[Case, list[dict[str, Any]]], axis: str) -> None:
    """Equal batches have equal losses to the last bit at the first step, whoever computed them.

    Along tp those of one size: every size has as many lanes as ranks, which is the least work.
    """
    seen: dict[tuple[int, str, int], tuple[Case, float]] = {}
    for case, results in turns.items():
        for result in results:
            other, loss = seen.setdefault(
                (case.batch, case.precision, case.size if axis == "tp" else 0), (case, result["loss"])
            )
            if result["loss"] != loss:
                raise Error(
                    f"bench scaling: the first loss of {case} is {result['loss']!r}, of {other} {loss!r}; equal bits"
                    " were expected"
                )


def main() -> None:
    """As a module that `polyreme bench scaling` starts, with its settings as JSON."""
    settings = json.loads(sys.argv[1])
    options = settings["options"]
    model = pr.models.GPT(**options.pop("model"))
    lists = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    run_rank(ScalingOptions(model=model, **{**options, **lists}), Output(**settings["output"]))


if __name__ == "__main__":
    main()
