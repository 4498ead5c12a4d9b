"""One rank of a contender of `bench step`, in a process of its own so that its peak memory is its own.

Reads one JSON command a line from standard input, writes one JSON answer a line to standard output:
{"do": "step"} -> {"seconds", "cpu_seconds", "loss"}, of its own samples or of all; {"do": "finish"} ->
{"peak_rss_bytes", ...}.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from itertools import filterfalse
from typing import Any

import numpy as np

from .pipeline_times import is_of_stage
from .torch_rivals import CLIP_NORM, EPS, LR, RIVALS, WEIGHT_DECAY, Step

DAY_S = 86400.0  # how long ranks may wait for the turns of others

Contender = tuple[Step, Callable[[], dict[str, Any]]]  # one step, and what there is to say at the end


def batch(settings: dict[str, Any], index: int) -> tuple[Any, Any]:
    """This rank's tokens and targets of step `index`, int32 [batch, seq_len]; the same for every contender."""
    each, rank = settings["batch"], settings["rank"]
    shape = (each * settings["ranks"], settings["model"]["seq_len"] + 1)
    tokens = np.random.default_rng(index).integers(0, settings["model"]["vocab"], shape, dtype=np.int32)
    if settings["axis"] == "dp":  # along the other axes every rank has the samples of all
        tokens = tokens[rank * each : (rank + 1) * each]
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def span_cost(world: Any) -> float:
    """Seconds that the recorder adds to one operation: median of empty operations with and without."""
    from polyreme import _core

    def measure(on: bool) -> float:
        world._core.record(on)
        return _core.time_enqueue(world._core, 20000)

    cost = statistics.median(measure(True) - measure(False) for _ in range(5))
    world._core.record(False)
    return max(cost, 0.0)  # less than the noise


def make_polyreme(settings: dict[str, Any]) -> Contender:
    """The native trainer; leaves its initial weights in the folder `weights` for the others."""
    import polyreme as pr

    world = pr.init(num_threads=settings["threads"], isa=settings["isa"], timeout_s=DAY_S)
    axes: dict[str, Any] = {settings["axis"]: world.size}
    trainer = pr.Trainer(
        pr.models.GPT(**settings["model"]),
        pr.Mesh(world, **axes),
        optimizer=pr.AdamW(lr=LR, eps=EPS, weight_decay=WEIGHT_DECAY),
        clip_norm=CLIP_NORM,
        global_batch=settings["batch"] * world.size,
        micro_batch=settings["micro_batch"],
        zero=settings["zero"],
        precision=settings["precision"],
        split=settings["split"],
    )
    for name in trainer.parameter_names():
        values = trainer.parameter(name)
        if settings["save_weights"] and world.rank == 0:
            np.save(os.path.join(settings["weights"], name + ".npy"), values)

    def step(tokens: Any, targets: Any) -> float:
        world._core.clear_spans()
        world._core.record(settings["record"])
        loss = trainer.step(tokens, targets).loss
        world._core.record(False)
        return loss

    def finish() -> dict[str, Any]:
        breakdown: dict[str, float] = {}  # of the last step
        for span in filterfalse(is_of_stage, world._core.spans()):
            breakdown[span["kind"]] = breakdown.get(span["kind"], 0.0) + 1e-9 * (
                span["end_ns"] - span["start_ns"]
            )
        return {
            "breakdown_s": breakdown,
            "spans": len(world._core.spans()),
            "span_cost_s": span_cost(world),
            "device": world.device,
            "num_parameters": trainer.num_parameters,
        }

    return step, finish


def make_finish() -> Callable[[], dict[str, Any]]:
    """What a rival says at the end."""
    import torch

    return lambda: {"device": f"torch {torch.__version__}, {torch.get_num_threads()} threads"}


def main() -> None:
    """Answers commands until "finish" or the end of the input."""
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    if settings["contender"] == "polyreme":
        step, finish = make_polyreme(settings)
    else:
        step, finish = RIVALS[settings["contender"]](settings), make_finish()
    print(json.dumps({"ready": True}), file=answers)
    for index, line in enumerate(sys.stdin):
        if json.loads(line)["do"] == "finish":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({"peak_rss_bytes": peak, **finish()}), file=answers)
            return
        tokens, targets = batch(settings, index)
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = step(tokens, targets)
        taken = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
        print(json.dumps({**taken, "loss": loss}), file=answers)


if __name__ == "__main__":
    main()
