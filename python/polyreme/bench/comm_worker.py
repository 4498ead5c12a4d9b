"""A rank of `bench comm`: times collectives of its own world and, in turn, of Gloo.

Started by `polyreme run`; rank 0 prints one JSON object, the list of rows.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import polyreme as pr
from polyreme import _core
from polyreme.errors import NotAvailable

OPS = ("all_reduce", "reduce_scatter", "all_gather")


def bus_factor(op: str, ranks: int) -> float:
    """Bytes on the wire per byte of payload, for each rank: what makes rates comparable between operations."""
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


def make_gloo(world: pr.World, rendezvous: str) -> Callable[[str, int], float]:
    """Gloo through PyTorch: a function of (op, count) that returns seconds."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise NotAvailable("--against gloo: PyTorch is not installed; pip install torch") from None
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=world.rank, world_size=world.size
    )

    def run(op: str, count: int) -> float:
        full, part = torch.ones(count), torch.ones(count // world.size)
        calls = {
            "all_reduce": lambda: dist.all_reduce(full),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
            "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        }
        world.barrier()
        start = time.perf_counter()
        calls[op]()
        return time.perf_counter() - start

    return run


def measure(world: pr.World, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of {op, bytes, seconds: {who: median}, bus_gb_s: {who: rate}}; the slowest rank counts."""
    group = pr.Mesh(world)["dp"]
    contenders: dict[str, Callable[[str, int], float]] = {
        "polyreme": lambda op, count: _core.time_collective(world._core, op, count)
    }
    if "gloo" in settings["against"]:
        contenders["gloo"] = make_gloo(world, settings["rendezvous"])
    rows = []
    for size in settings["sizes"]:
        count = max(1, size // 4 // world.size) * world.size
        repeats = settings["repeats"] if size > 1 << 20 else 5 * settings["repeats"]
        for op in OPS:
            times: dict[str, list[float]] = {who: [] for who in contenders}
            for index in range(repeats + 1):
                for who, run in contenders.items():
                    seconds = float(group.all_reduce(np.array([run(op, count)]), "max")[0])
                    if index > 0:  # the first one warms up
                        times[who].append(seconds)
            medians = {who: statistics.median(values) for who, values in times.items()}
            bus = 4e-9 * count * bus_factor(op, world.size)
            rates = {who: bus / seconds for who, seconds in medians.items()}
            rows.append({"op": op, "bytes": 4 * count, "seconds": medians, "bus_gb_s": rates})
    return rows


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
        print(json.dumps({"ranks": world.size, "rows": rows, "memcpy_gb_s": max(copies)}), flush=True)
    world.barrier()


if __name__ == "__main__":
    main()
