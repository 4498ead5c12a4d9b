"""One contender of `bench step`, in a process of its own so that its peak memory is its own.

Reads one JSON command a line from standard input, writes one JSON answer a line to standard output:
{"do": "step"} -> {"seconds", "loss"}; {"do": "finish"} -> {"peak_rss_bytes", ...}.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

LR, EPS, WEIGHT_DECAY, CLIP_NORM = 1e-4, 1e-8, 0.1, 1.0

Contender = tuple[Callable[[int], float], Callable[[], dict[str, Any]]]  # step(i) -> loss, finish()


def batch(settings: dict[str, Any], index: int) -> tuple[Any, Any]:
    """Tokens and targets of step `index`, int32 [batch, seq_len]; the same for every contender."""
    shape = (settings["batch"], settings["model"]["seq_len"] + 1)
    tokens = np.random.default_rng(index).integers(0, settings["model"]["vocab"], shape, dtype=np.int32)
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
    from polyreme.environment import RankEnvironment

    world = pr.init(environment=RankEnvironment(), num_threads=settings["threads"], isa=settings["isa"])
    trainer = pr.Trainer(
        pr.models.GPT(**settings["model"]),
        pr.Mesh(world),
        optimizer=pr.AdamW(lr=LR, eps=EPS, weight_decay=WEIGHT_DECAY),
        clip_norm=CLIP_NORM,
        global_batch=settings["batch"],
        micro_batch=settings["micro_batch"],
    )
    for name in trainer.parameter_names():
        np.save(os.path.join(settings["weights"], name + ".npy"), trainer.parameter(name))

    def step(index: int) -> float:
        world._core.clear_spans()
        world._core.record(settings["record"])
        loss = trainer.step(*batch(settings, index)).loss
        world._core.record(False)
        return loss

    def finish() -> dict[str, Any]:
        breakdown: dict[str, float] = {}  # of the last step
        for span in world._core.spans():
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


def make_torch(settings: dict[str, Any]) -> Contender:
    """PyTorch eager, fused AdamW, gradients accumulated over the same micro-batches."""
    import torch

    from polyreme.bench.torch_gpt import TorchGPT, load_weights
    from polyreme.models import GPT

    torch.set_num_threads(settings["threads"])
    module = TorchGPT(GPT(**settings["model"]))
    load_weights(module, lambda name: np.load(os.path.join(settings["weights"], name + ".npy")))
    optimizer = torch.optim.AdamW(module.groups(WEIGHT_DECAY), lr=LR, eps=EPS, fused=True)

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        tokens, targets = (torch.from_numpy(x).long() for x in batch(settings, index))
        total = 0.0
        for begin in range(0, settings["batch"], settings["micro_batch"]):
            part = slice(begin, begin + settings["micro_batch"])
            share = len(tokens[part]) / settings["batch"]
            loss = module(tokens[part], targets[part]) * share
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        return total

    return step, lambda: {"device": f"torch {torch.__version__}, {torch.get_num_threads()} threads"}


CONTENDERS: dict[str, Callable[[dict[str, Any]], Contender]] = {
    "polyreme": make_polyreme,
    "torch": make_torch,
}


def main() -> None:
    """Answers commands until "finish" or the end of the input."""
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    step, finish = CONTENDERS[settings["contender"]](settings)
    print(json.dumps({"ready": True}), file=answers)
    for index, line in enumerate(sys.stdin):
        if json.loads(line)["do"] == "finish":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({"peak_rss_bytes": peak, **finish()}), file=answers)
            return
        start = time.perf_counter()
        loss = step(index)
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), file=answers)


if __name__ == "__main__":
    main()
