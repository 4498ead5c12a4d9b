"""`polyreme bench step`: tokens/s, share of the sgemm rate, memory; interleaved with PyTorch."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from ..checks import MAX_THREADS, check_int
from ..errors import Error, InvalidArgument
from ..models import GPT
from .gemm import bench_gemm
from .step_worker import CONTENDERS

__all__ = ["bench_step", "render_step"]


class _Worker:
    """A contender's process. Commands and answers as step_worker says."""

    def __init__(self, name: str, settings: dict[str, Any], threads: int) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [
            sys.executable,
            "-m",
            "polyreme.bench.step_worker",
            json.dumps({**settings, "contender": name}),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": command}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # told below
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise Error(f"bench step: '{self.name}' ended with exit code {code}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def bench_step(
    model: GPT,
    *,
    batch: int,
    micro_batch: int,
    threads: int,
    isa: str,
    steps: int,
    against: list[str],
    record: bool,
) -> dict[str, Any]:
    """Medians over `steps` training steps after one warm-up, all contenders in turn.

    Every contender starts from the same weights and sees the same tokens; `loss` is that of every
    step, so equal mathematics can be seen.
    """
    for name in against:
        if name not in CONTENDERS or name == "polyreme":
            raise InvalidArgument(f"--against {name}: expected torch")
    check_int("bench step: threads", threads, 1, MAX_THREADS)
    if isa not in ("auto", "avx2", "avx512", "amx"):
        raise InvalidArgument(f"bench step: isa={isa!r}; expected auto, avx2, avx512 or amx")
    if batch < 1 or not 1 <= micro_batch <= batch or steps < 1:
        raise InvalidArgument(
            f"bench step: batch={batch}, micro_batch={micro_batch}, steps={steps};"
            " expected 1 <= micro_batch <= batch and steps >= 1"
        )
    runs: dict[str, dict[str, Any]] = {name: {"seconds": [], "loss": []} for name in ("polyreme", *against)}
    with ExitStack() as stack:
        weights = stack.enter_context(tempfile.TemporaryDirectory(prefix="polyreme-bench-"))
        settings = {
            "model": dataclasses.asdict(model),
            "batch": batch,
            "micro_batch": micro_batch,
            "threads": threads,
            "isa": isa,
            "weights": weights,
            "record": record,
        }
        workers = []
        for name in runs:  # one after the other: the first leaves the weights
            workers.append(_Worker(name, settings, threads))
            stack.callback(workers[-1].close)
        for index in range(steps + 1):
            for worker in workers:
                answer = worker.ask("step")
                runs[worker.name]["loss"].append(answer["loss"])
                if index > 0:
                    runs[worker.name]["seconds"].append(answer["seconds"])
        for worker in workers:
            runs[worker.name].update(worker.ask("finish"))
    # The rate that the step is measured against: the better of ours and the best library's.
    gemm = bench_gemm(model, batch=micro_batch, threads=threads, isa=isa, repeats=3, against=against)
    rate = max(gemm["weighted_gflops"].values())
    tokens = batch * model.seq_len
    for run in runs.values():
        seconds = statistics.median(run["seconds"])
        run["tokens_per_s"] = tokens / seconds
        run["gflops"] = 1e-9 * model.flops_per_token() * tokens / seconds
        run["share_of_sgemm"] = run["gflops"] / rate
    ours = runs["polyreme"]["seconds"]
    return {
        "model": dataclasses.asdict(model),
        "batch": batch,
        "micro_batch": micro_batch,
        "threads": threads,
        "steps": steps,
        "sgemm_gflops": gemm["weighted_gflops"],
        "runs": runs,
        "speed_ratio": {
            name: statistics.median(t / o for o, t in zip(ours, runs[name]["seconds"], strict=True))
            for name in against
        },
        "memory_ratio": {
            name: runs["polyreme"]["peak_rss_bytes"] / runs[name]["peak_rss_bytes"] for name in against
        },
    }


def render_step(result: dict[str, Any]) -> list[str]:
    """The result as a table for people."""
    model = result["model"]
    sgemm = ", ".join(f"{who} {rate:.0f}" for who, rate in result["sgemm_gflops"].items())
    lines = [
        f"GPT {model['layers']} x {model['hidden']}, vocab {model['vocab']}, seq {model['seq_len']}, batch"
        f" {result['batch']} in micro-batches of {result['micro_batch']}, {result['threads']} thread(s);"
        f" sgemm on its shapes in GFLOP/s: {sgemm}",
        f"{'':10} {'tokens/s':>9} {'GFLOP/s':>8} {'of sgemm':>8} {'s/step':>7} {'min':>7} {'max':>7} {'peak RSS':>9} {'loss':>9}",
    ]
    for name, run in result["runs"].items():
        times = run["seconds"]
        lines.append(
            f"{name:10} {run['tokens_per_s']:9.1f} {run['gflops']:8.1f} {100 * run['share_of_sgemm']:7.1f}%"
            f" {statistics.median(times):7.3f} {min(times):7.3f} {max(times):7.3f}"
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
