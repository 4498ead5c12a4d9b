"""`polyreme bench optim`: the fused update rules against a triad, all bound by memory."""

from __future__ import annotations

from typing import Any

from .. import _core
from ..checks import MAX_THREADS, check_int
from ..environment import RankEnvironment
from ..world import init

__all__ = ["bench_optim", "render_optim"]

# Bytes that a rule reads and writes for each element. The triad x + y -> x moves 12: in place as the rules are, so
# that no cache line is fetched only to be overwritten.
# LAMB takes two passes, between which its norms are known; of Muon it is what is not a product of matrices, where
# the direction is such a line.
BYTES = {"adamw": 28, "sgd": 20, "lion": 20, "lamb": 40, "muon": 32}
TRIAD_BYTES = 12


def bench_optim(*, count: int, threads: int, isa: str, repeats: int) -> dict[str, Any]:
    """The best of `repeats` updates of `count` elements, each right beside a triad of as many.

    Returns {"device", "threads", "count", "repeats", "rules": [{"rule", "gb_per_s", "triad_gb_per_s", "ratio"}]}.
    """
    check_int("bench optim: count", count, 1)
    check_int("bench optim: repeats", repeats, 1)
    check_int("bench optim: threads", threads, 1, MAX_THREADS)
    world = init(environment=RankEnvironment(), num_threads=threads, isa=isa)
    rows = []
    for rule, size in BYTES.items():
        seconds, triad_seconds = _core.time_rule(world._core, rule, count, repeats)
        rate, triad_rate = 1e-9 * size * count / seconds, 1e-9 * TRIAD_BYTES * count / triad_seconds
        rows.append(
            {"rule": rule, "gb_per_s": rate, "triad_gb_per_s": triad_rate, "ratio": rate / triad_rate}
        )
    return {
        "device": world.device,
        "threads": threads,
        "count": count,
        "repeats": repeats,
        "rules": rows,
    }


def render_optim(result: dict[str, Any]) -> list[str]:
    """The result as a table for people."""
    lines = [
        f"updates of {result['count']:,} elements, {result['device']}, best of {result['repeats']}",
        f"{'rule':8} {'GB/s':>6} {'triad':>6} {'ratio':>6}",
    ]
    lines += [
        f"{row['rule']:8} {row['gb_per_s']:6.1f} {row['triad_gb_per_s']:6.1f} {row['ratio']:6.2f}"
        for row in result["rules"]
    ]
    return lines
