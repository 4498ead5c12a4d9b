"""`polyreme bench comm`: latency and bandwidth of collectives over shared memory, beside those of Gloo and Open MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from ..errors import Error, InvalidArgument
from .mpi_rival import find_open_mpi

__all__ = ["bench_comm", "render_comm"]


def bench_comm(*, ranks: int, sizes: list[int], repeats: int, against: list[str]) -> dict[str, Any]:
    """Times all_reduce, reduce_scatter and all_gather of float32 over `ranks` processes of this host.

    Contenders take turns; a row has the median over `repeats` of the slowest rank's time, their lowest and highest,
    and the bus bandwidth that follows (2(n-1)/n of the payload for all_reduce, (n-1)/n for the others).
    "polyreme" uses memory of the group, which the ranks read of each other in place, "staged" any other. The fast
    mode is the ordered one over shared memory, so there is no row for it.

    "copy" is the floor to measure against: the time in which all ranks at once copy as many bytes as the payload
    has, each in memory of its own, by memcpy or by streaming stores, whichever is faster. An all_gather cannot take
    less, an all_reduce not less than about 2 - 1/n of it (a slice of each rank is read and one written, then the
    other slices are copied); a rival whose time is k of it cannot be beaten by more than k.
    """
    if ranks < 2 or repeats < 1 or not sizes or min(sizes) < 4:
        raise InvalidArgument(
            f"bench comm: ranks={ranks}, sizes={sizes}, repeats={repeats};"
            " expected at least 2 ranks, sizes of 4 bytes and more, and 1 repeat"
        )
    for name in against:
        if name not in ("gloo", "mpi"):
            raise InvalidArgument(f"--against {name}: expected gloo, mpi")
    if "mpi" in against:
        find_open_mpi()  # said here rather than by a rank
    with tempfile.TemporaryDirectory(prefix="polyreme-bench-") as folder:
        settings = {
            "sizes": sizes,
            "repeats": repeats,
            "against": against,
            "rendezvous": os.path.join(folder, "gloo"),
        }
        command = [sys.executable, "-m", "polyreme", "run", "-n", str(ranks), "--prefix", "never"]
        command += ["-m", "polyreme.bench.comm_worker", json.dumps(settings)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"ranks"')]
    if done.returncode != 0 or not lines:
        raise Error(f"bench comm: the ranks ended with exit code {done.returncode}; their error is above")
    result: dict[str, Any] = json.loads(lines[0])
    return result


def microseconds(seconds: float) -> str:
    """As text; three digits at least."""
    us = 1e6 * seconds
    return f"{us:.3f}" if us < 10 else f"{us:.1f}"


def render_comm(result: dict[str, Any]) -> list[str]:
    """The result as a table for people."""
    rivals = [who for who in result["rows"][0]["seconds"] if who != "polyreme"]
    lines = [
        f"{result['ranks']} ranks over shared memory; memcpy {result['memcpy_gb_s']:.1f} GB/s one way;"
        f" {result['cpus']} CPUs, load {result['load_average']:.1f}"
    ]
    lines.append(
        f"bytes are those measured: what was asked for in whole numbers of 4 bytes for each rank ({4 * result['ranks']})"
    )
    lines.append("us: the median of a turn; +-%: half of its spread; ratio: of the rival's time to ours")
    lines.append("copy: all ranks at once copy as many bytes in memory of their own: the floor of all_gather")
    lines.append(
        f"{'operation':15} {'bytes':>10} {'us':>10} {'+-%':>4} {'bus GB/s':>9}"
        + "".join(f" {w:>10} {'ratio':>6}" for w in rivals)
    )
    for row in result["rows"]:
        line = f"{row['op']:15} {row['bytes']:10} {microseconds(row['seconds']['polyreme']):>10}"
        low, high = row["spread"]["polyreme"]
        line += f" {50 * (high - low) / row['seconds']['polyreme']:4.0f} {row['bus_gb_s']['polyreme']:9.2f}"
        for who in rivals:
            ratio = row["seconds"][who] / row["seconds"]["polyreme"]
            line += f" {microseconds(row['seconds'][who]):>10} {ratio:6.2f}"
        lines.append(line)
    return lines
