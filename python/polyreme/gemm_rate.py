"""The sgemm rate that MFU is measured against."""

from __future__ import annotations

import numpy as np

from .mesh import Mesh
from .models import Model

__all__ = ["measure_gemm_rate", "measure_peak_flops"]


def measure_gemm_rate(
    mesh: Mesh, model: Model, *, micro_batch: int, repeats: int = 3
) -> list[dict[str, float | str]]:
    """Times the model's own matrix products on this rank's device.

    Returns one row per product: name, m, n, k, count (per micro-batch), seconds, gflops.
    """
    from . import _core

    rows: list[dict[str, float | str]] = []
    for name, m, n, k, transpose_a, transpose_b, count in model.gemm_shapes(micro_batch):
        seconds = _core.time_gemm(
            mesh.world._core, m=m, n=n, k=k, transpose_a=transpose_a, transpose_b=transpose_b, repeats=repeats
        )
        gflops = 2e-9 * m * n * k / seconds
        rows.append(
            {"name": name, "m": m, "n": n, "k": k, "count": count, "seconds": seconds, "gflops": gflops}
        )
    return rows


def measure_peak_flops(mesh: Mesh, model: Model, *, micro_batch: int) -> float:
    """FLOP/s of all ranks together on the model's products, weighted as the model uses them.

    Collective: the ranks measure at the same time, as they will compute.
    """
    mesh.world.barrier()
    rows = measure_gemm_rate(mesh, model, micro_batch=micro_batch)
    flops = sum(2.0 * float(r["m"]) * float(r["n"]) * float(r["k"]) * float(r["count"]) for r in rows)
    seconds = sum(float(r["seconds"]) * float(r["count"]) for r in rows)
    return float(mesh[mesh.order].all_reduce(np.array([flops / seconds]))[0])
