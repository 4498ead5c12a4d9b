"""`polyreme doctor`: what this machine and this build can do, and what the promise covers."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser of `doctor`."""
    parser = subparsers.add_parser("doctor", help="show what this machine and this build can do")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 0 if this machine can train, 1 otherwise."""
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(render(report)))
    return 0 if report["can_train"] else 1


def examine() -> dict[str, Any]:
    """Everything that `doctor` knows, as plain data."""
    from polyreme import _core

    build = _core.build_info()
    isas = _core.supported_isas()
    cuda = _core.probe_cuda()
    nccl = _core.probe_nccl()
    backends = {
        "cpu": {
            "usable": bool(isas),
            "text": f"levels {', '.join(isas)}; fp32 bits are equal on all"
            if isas
            else "needs AVX2, FMA and F16C",
        },
        "cuda": {
            "usable": any(not gpu["problem"] for gpu in cuda["devices"]),
            "text": f"{cuda['message']}; training was seen on emulated GPUs alone",
        },
        "shm": {"usable": True, "text": "ranks of one host"},
        "tcp": {"usable": True, "text": "between hosts"},
        "nccl": {
            "usable": bool(nccl["loaded"] and cuda["devices"]),
            "text": f"{nccl['message']}; seen as an emulation alone",
        },
        "mpi": {"usable": bool(build["mpi_version"]), "text": _found(build, "mpi")},
    }
    return {
        "version": build["version"],
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shared_memory_bytes": _free_bytes("/dev/shm"),
        "build": build,
        "cuda": cuda,
        "nccl": nccl,
        "backends": backends,
        "can_train": bool(isas),
        "promise": PROMISE,
    }


# backend, what is equal to what, where it was seen: the table of the README
PROMISE = [
    {
        "backend": "CPU, fp32",
        "equal": "loss, gradient norm, weights and optimizer state: for dp 1, 2, 4, 8, ZeRO stages 0 to 3 (whole "
        "and hybrid shards, any bucket size and prefetch, overlap on or off), micro-batches of 1, 3 and 8"
        " samples, both orders of sums, 1 to 3 threads, recompute on or off, ranks as threads or "
        "processes, AVX2 or AVX-512, immediate or deferred executor; always with equal lanes",
        "seen": "`tests/python/test_same_bits.py` and `test_zero_matrix.py` (every two choices together; "
        "POLYREME_TEST_FULL=1: all) in CI",
    },
    {
        "backend": "CPU, fp32, pipelines",
        "equal": "the same, and logits: for pp 2, 3 and 4, alone and with dp 2 and 4, ZeRO stages 0 to 3, all six "
        "kinds of schedules, splits of the layers, tied and untied, immediate or deferred executor, ranks"
        " as threads or processes",
        "seen": "`tests/python/test_pipeline.py` in CI",
    },
    {
        "backend": "CPU, tensor parallel",
        "equal": "the same, and logits: for tp 1, 2, 4 (3 with three lanes), alone and with dp 2 and 4, pp 2, 3 "
        "and 4, ZeRO stages 0 to 3, all six kinds of schedules, recompute, fp32, bf16 and fp16, GPT and "
        "Llama, tied and untied, vocabularies that tp does not divide, checkpoints from any of these "
        "layouts to any, ranks as threads or processes, immediate or deferred executor; with equal "
        "`lanes.tp`",
        "seen": "`tests/python/test_layouts.py` (every two choices together; POLYREME_TEST_FULL=1: all) and "
        "`test_tensor_parallel.py` in CI",
    },
    {
        "backend": "CPU, bf16 and fp16",
        "equal": "the same within one instruction-set level, for dp 1, 2, 4, pp 2, ZeRO stages 0 to 3, skipped "
        "steps included. AVX2 and AVX-512 give equal bits; `amx` sums products of bf16 in an order of its"
        " own (`csrc/ops/cpu/kernels/gemm.h`), so it is a level apart, and all ranks run at the lowest of"
        " theirs (`pr.init(isa=)` pins one)",
        "seen": "`tests/python/test_precision.py` and `test_zero_matrix.py` in CI",
    },
    {
        "backend": "CUDA",
        "equal": "emulated only: loss, gradient norm, weights and optimizer state of a GPT and a Llama (fp32, "
        'bf16, fp16) equal one CPU\'s at `isa="avx2"`, for dp 2, pp 2, both, tp 2 (also with dp 2), and '
        "ZeRO stages 0 to 3, with AdamW; with LAMB, Muon, Lion and SGD for dp 2, ZeRO stage 2, in fp32",
        "seen": "`tests/cpp/engine/gpu_engine_test.cpp`, and from Python `tests/python/test_gpu.py` (ranks as "
        "threads over an emulated NCCL, as threads or processes by way of the host's memory; checkpoints "
        "from GPUs to CPUs and back), over emulated GPUs, in CI; not yet seen on a GPU",
    },
]


def _found(build: dict[str, str], name: str) -> str:
    version = build[f"{name}_version"]
    if not version:
        return f"not found by the build: {build[f'{name}_absent']}"
    return f"{version}, for transport='mpi'"


def _free_bytes(path: str) -> int | None:
    try:
        stats = os.statvfs(path)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"


def render(report: dict[str, Any]) -> list[str]:
    """The report as lines for people."""
    build = report["build"]
    lines = [
        f"polyreme {report['version']} ({build['git_describe'] or 'no git'}), {build['build_type']},"
        f" {build['compiler']}",
        f"  python   {report['python']} at {report['executable']}",
        f"  system   {report['system']}",
        f"  machine  {report['cpus']} CPUs, {_gib(report['memory_bytes'])} memory,"
        f" {_gib(report['shared_memory_bytes'])} free shared memory",
        "backends",
    ]
    for name, backend in report["backends"].items():
        lines.append(f"  {'yes' if backend['usable'] else 'no ':3}  {name:5} {backend['text']}")
    lines.append("same bits")
    for row in report["promise"]:
        lines += [f"  {row['backend']}: {row['equal']}", f"    seen: {row['seen']}"]
    if not report["can_train"]:
        lines.append(
            "This machine cannot train: its CPU lacks AVX2, FMA or F16C. Use an x86-64 CPU of 2013 or later."
        )
    return lines
