"""`polyreme bench gemm`: the rate of the model's own matrix products, beside other libraries'."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _core
from ..checks import MAX_THREADS, check_int
from ..environment import RankEnvironment
from ..errors import InvalidArgument, NotAvailable
from ..models import Model
from ..world import init

__all__ = ["RIVALS", "bench_gemm", "render_gemm"]

# A product c += op(a) op(b) of the given sizes; returns a function that runs it once.
Rival = Callable[[int, int, int, bool, bool, int], Callable[[], None]]


def _operands(m: int, n: int, k: int, transpose_a: bool, transpose_b: bool) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    a = random.standard_normal((k, m) if transpose_a else (m, k), dtype=np.float32)
    b = random.standard_normal((n, k) if transpose_b else (k, n), dtype=np.float32)
    return (a.T if transpose_a else a), (b.T if transpose_b else b)


def _torch_rival(
    m: int, n: int, k: int, transpose_a: bool, transpose_b: bool, threads: int
) -> Callable[[], None]:
    try:
        import torch
    except ImportError:
        raise NotAvailable("--against torch: PyTorch is not installed; pip install torch") from None
    torch.set_num_threads(threads)
    a, b = (torch.from_numpy(x) for x in _operands(m, n, k, transpose_a, transpose_b))
    c = torch.zeros(m, n)

    def product() -> None:
        torch.addmm(c, a, b, out=c)

    return product


def _numpy_rival(
    m: int, n: int, k: int, transpose_a: bool, transpose_b: bool, threads: int
) -> Callable[[], None]:
    # NumPy's OpenBLAS reads it when it is loaded, and has no call for it.
    found = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    if found != str(threads):
        raise InvalidArgument(
            f"--against numpy: OPENBLAS_NUM_THREADS is {found or 'not set'}, but --threads is {threads};"
            f" start it with OPENBLAS_NUM_THREADS={threads} in the environment"
        )
    a, b = _operands(m, n, k, transpose_a, transpose_b)
    c = np.zeros((m, n), dtype=np.float32)

    def product() -> None:
        np.matmul(a, b, out=c)

    return product


RIVALS: dict[str, Rival] = {"torch": _torch_rival, "numpy": _numpy_rival}


def _seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bench_gemm(
    model: Model, *, batch: int, threads: int, isa: str, repeats: int, against: list[str]
) -> dict[str, Any]:
    """Times every product of one micro-batch, interleaved with the rivals; medians of `repeats`.

    Returns {"isa", "threads", "shapes": [{"name", "m", "n", "k", "count", "gflops": {who: rate},
    "ratio": {rival: ours / theirs}}], "weighted_gflops", "ratio_geomean", "ratio_min"}.
    """
    for what, value in (("batch", batch), ("repeats", repeats)):
        check_int(f"bench gemm: {what}", value, 1)
    check_int("bench gemm: threads", threads, 1, MAX_THREADS)
    for name in against:
        if name not in RIVALS:
            raise InvalidArgument(f"--against {name}: expected one of {', '.join(RIVALS)}")
    world = init(environment=RankEnvironment(), num_threads=threads, isa=isa)
    rows = []
    for name, m, n, k, transpose_a, transpose_b, count in model.gemm_shapes(batch):
        rivals = {who: RIVALS[who](m, n, k, transpose_a, transpose_b, threads) for who in against}
        times: dict[str, list[float]] = {who: [] for who in ("polyreme", *against)}
        for _ in range(repeats):
            times["polyreme"].append(
                _core.time_gemm(
                    world._core, m=m, n=n, k=k, transpose_a=transpose_a, transpose_b=transpose_b, repeats=1
                )
            )
            for who, run in rivals.items():
                run()  # a warm-up right before, as time_gemm does one
                times[who].append(_seconds(run))
        rate = {who: 2e-9 * m * n * k / statistics.median(values) for who, values in times.items()}
        ratio = {
            who: statistics.median(
                theirs / ours for ours, theirs in zip(times["polyreme"], times[who], strict=True)
            )
            for who in against
        }
        rows.append({"name": name, "m": m, "n": n, "k": k, "count": count, "gflops": rate, "ratio": ratio})
    return {
        "device": world.device,
        "threads": threads,
        "repeats": repeats,
        "shapes": rows,
        **_summary(rows, against),
    }


def _summary(rows: list[dict[str, Any]], against: list[str]) -> dict[str, Any]:
    flops = [2e-9 * r["m"] * r["n"] * r["k"] * r["count"] for r in rows]
    weighted = {
        who: sum(flops) / sum(f / r["gflops"][who] for f, r in zip(flops, rows, strict=True))
        for who in ("polyreme", *against)
    }
    return {
        "weighted_gflops": weighted,
        "ratio_geomean": {
            who: math.exp(statistics.fmean(math.log(r["ratio"][who]) for r in rows)) for who in against
        },
        "ratio_min": {who: min(r["ratio"][who] for r in rows) for who in against},
    }


def render_gemm(result: dict[str, Any]) -> list[str]:
    """The result as a table for people."""
    rivals = list(result["ratio_geomean"])
    head = f"{'product':22} {'m':>6} {'n':>6} {'k':>6} {'GFLOP/s':>8}"
    head += "".join(f" {who:>8} {'ratio':>6}" for who in rivals)
    lines = [f"sgemm, {result['device']}, median of {result['repeats']}", head]
    for row in result["shapes"]:
        line = f"{row['name']:22} {row['m']:6} {row['n']:6} {row['k']:6} {row['gflops']['polyreme']:8.1f}"
        lines.append(line + "".join(f" {row['gflops'][who]:8.1f} {row['ratio'][who]:6.2f}" for who in rivals))
    lines.append(f"{'weighted by the model':43} {result['weighted_gflops']['polyreme']:8.1f}")
    for who in rivals:
        lines.append(
            f"against {who}: {result['ratio_geomean'][who]:.2f} in the geometric mean, worst {result['ratio_min'][who]:.2f}"
        )
    return lines
