"""A rank of `bench comm`: times collectives of its own world and, in turn, of its rivals.

Started by `polyreme run`; rank 0 prints one JSON object, the list of rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import polyreme as pr
from polyreme import _core
from polyreme.errors import NotAvailable

from .mpi_rival import MpiJob

# Seconds of one operation, from its name, the floats that a rank holds in full, and how often in a row.
Contender = Callable[[str, int, int], float]

OPS = ("all_reduce", "reduce_scatter", "all_gather")


def bus_factor(op: str, ranks: int) -> float:
    """Bytes on the wire per byte of payload, for each rank: what makes rates comparable between operations."""
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


def iterations_for(size: int) -> int:
    """In a row, so that a turn is long against its start and short against the load of the machine."""
    return (
        2000
        if size <= 1 << 12
        else 200
        if size <= 1 << 16
        else 20
        if size <= 1 << 20
        else 3
        if size <= 1 << 24
        else 1
    )


def make_gloo(world: pr.World, rendezvous: str) -> Contender:
    """Gloo through PyTorch."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise NotAvailable("--against gloo: PyTorch is not installed; pip install torch") from None
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=world.rank, world_size=world.size
    )

    def run(op: str, count: int, iterations: int) -> float:
        full, part = torch.ones(count), torch.ones(count // world.size)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(full),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
            "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        }
        call = calls[op]
        call()
        world.barrier()
        for _ in range(3):
            call()
        start = time.perf_counter()
        for _ in range(iterations):
            call()
        return (time.perf_counter() - start) / iterations

    return run


def make_contenders(
    world: pr.World, settings: dict[str, Any], stack: contextlib.ExitStack
) -> dict[str, Contender]:
    """Ours in the memory of the group and in that of the device, a bare copy, and the rivals that were asked for."""

    def ours(staged: bool) -> Contender:
        return lambda op, count, iterations: _core.time_collective(world._core, op, count, iterations, staged)

    contenders = {
        "polyreme": ours(False),
        "staged": ours(True),
        "copy": lambda op, count, iterations: _core.time_copy(world._core, count, iterations),
    }
    if "gloo" in settings["against"]:
        contenders["gloo"] = make_gloo(world, settings["rendezvous"])
    if "mpi" in settings["against"]:
        # One rank drives the job; the others report nothing, and wait asleep.
        contenders["mpi"] = lambda op, count, iterations: 0.0
        if world.rank == 0:
            contenders["mpi"] = stack.enter_context(MpiJob(world.size)).time
    return contenders


def measure(world: pr.World, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of {op, bytes, seconds, spread, bus_gb_s}, each by contender; the slowest rank counts."""
    group = pr.Mesh(world)["dp"]
    rows = []
    with contextlib.ExitStack() as stack:
        contenders = make_contenders(world, settings, stack)
        for size in settings["sizes"]:
            count = max(1, size // 4 // world.size) * world.size
            for op in OPS:
                times: dict[str, list[float]] = {who: [] for who in contenders}
                for _ in range(settings["repeats"]):
                    for who, run in contenders.items():
                        seconds = run(op, count, iterations_for(size))
                        times[who].append(float(group.all_reduce(np.array([seconds]), "max")[0]))
                rows.append(summary(op, count, world.size, times))
    return rows


def summary(op: str, count: int, ranks: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """A row: the median, the lowest and the highest of the turns of each contender."""
    medians = {who: statistics.median(values) for who, values in times.items()}
    bus = 4e-9 * count * bus_factor(op, ranks)
    return {
        "op": op,
        "bytes": 4 * count,
        "seconds": medians,
        "spread": {who: [min(values), max(values)] for who, values in times.items()},
        "bus_gb_s": {who: bus / seconds for who, seconds in medians.items()},
    }


def main() -> None:
    """Measures; rank 0 prints the result."""
    settings = json.loads(sys.argv[1])
    world = pr.init(num_threads=1)
    rows = measure(world, settings)
    source, target = np.ones(1 << 26, dtype=np.float32), np.zeros(1 << 26, dtype=np.float32)
    copies = []
    for _ in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        copies.append(source.nbytes * 1e-9 / (time.perf_counter() - start))
    world.barrier()
    if world.rank == 0:
        result = {
            "ranks": world.size,
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "rows": rows,
            "memcpy_gb_s": max(copies),
        }
        print(json.dumps(result), flush=True)
    world.barrier()


if __name__ == "__main__":
    main()
