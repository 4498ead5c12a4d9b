#!/usr/bin/env python3
"""Training of GPT models on a GPU from Python: bits, checkpoints from device memory, speed. One JSON object a line.

Run by scripts/gpu_check.sh, with the package on PYTHONPATH. With --tiny nothing takes long, so that it can be tried
over the emulated GPUs of the tests (POLYREME_BACKENDS); its speeds mean nothing there.

Exit status: 0 all is well, 1 not, 77 no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import polyreme as pr
from polyreme.environment import RankEnvironment
from polyreme.testing import run_ranks

SMALL = dict(layers=2, hidden=8, heads=2, vocab=13, seq_len=6)
# Both as in the papers of GPT-2 and GPT-3.
MODELS = {
    "GPT-2 124M": (dict(layers=12, hidden=768, heads=12, vocab=50304, seq_len=1024), 8),
    "GPT 1.3B": (dict(layers=24, hidden=2048, heads=16, vocab=50304, seq_len=1024), 2),
}


def alone(device: str) -> pr.World:
    return pr.init(device=device, isa="avx2", environment=RankEnvironment())


def batch(model: Any, samples: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(7).integers(0, model.vocab, (samples, model.seq_len + 1), np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def make_trainer(world: pr.World, model: Any, **options: Any) -> pr.Trainer:
    options = {"global_batch": 4, "lanes": pr.Lanes(dp=2, tp=2), **options}
    return pr.Trainer(model, pr.Mesh(world), optimizer=pr.AdamW(lr=1e-3, weight_decay=0.1), **options)


def weights(trainer: pr.Trainer) -> dict[str, np.ndarray]:
    return {name: trainer.parameter(name) for name in trainer.parameter_names()}


def differing(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> list[str]:
    return [name for name, values in wanted.items() if got[name].tobytes() != values.tobytes()]


def trained(world: pr.World, **options: Any) -> dict[str, np.ndarray]:
    model = pr.models.GPT(**SMALL)
    trainer = make_trainer(world, model, **options)
    tokens, targets = batch(model, 4)
    part = slice(4 // world.size * world.rank, 4 // world.size * (world.rank + 1))
    for _ in range(2):
        trainer.step(tokens[part], targets[part])
    return weights(trainer)


def check_bits(precision: str) -> None:
    wrong = differing(trained(alone("cuda"), precision=precision), trained(alone("cpu"), precision=precision))
    assert not wrong, f"not the CPU's bits: {wrong}"


def check_shared_gpu() -> None:
    wanted = trained(alone("cuda"))
    for zero in (0, 3):
        for rank in run_ranks(2, lambda world, zero=zero: trained(world, zero=zero), device="cuda:0"):
            wrong = differing(rank, wanted)
            assert not wrong, f"zero={zero}: two ranks have other bits than one: {wrong}"


def check_checkpoint() -> None:
    model = pr.models.GPT(**SMALL)
    saved = make_trainer(alone("cuda"), model)
    saved.step(*batch(model, 4))
    with tempfile.TemporaryDirectory() as folder:
        with pr.Checkpointer(folder) as checkpoints:
            checkpoints.save(saved)
        loaded = make_trainer(alone("cpu"), model)
        with pr.Checkpointer(folder) as checkpoints:
            loaded.resume(checkpoints)
    wrong = differing(weights(loaded), weights(saved))
    assert not wrong, f"a CPU loads other weights than the GPU saved: {wrong}"


def measure(sizes: dict[str, int], samples: int, steps: int, peak_tflops: float) -> dict[str, Any]:
    """Steps in bf16 with random tokens, and a checkpoint of their state."""
    model = pr.models.GPT(**sizes)
    world = alone("cuda")
    trainer = make_trainer(
        world, model, global_batch=samples, micro_batch=samples, lanes=None, precision="bf16"
    )
    tokens, targets = batch(model, samples)
    first = trainer.step(tokens, targets)
    seconds = [trainer.step(tokens, targets).seconds for _ in range(steps)]
    median = statistics.median(seconds)
    rate = samples * model.seq_len / median
    memory = world.memory()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with pr.Checkpointer(folder) as checkpoints:
            checkpoints.save_async(trainer)
            stall = time.perf_counter() - start
        saved = time.perf_counter() - start
    return {
        "parameters": trainer.num_parameters,
        "tokens": samples * model.seq_len,
        "first_loss": first.loss,
        "seconds": [round(s, 4) for s in seconds],
        "tokens_per_s": round(rate, 1),
        "mfu": round(rate * model.flops_per_token() / (peak_tflops * 1e12), 4),
        "peak_memory_gib": round(memory["peak_bytes"] / 2**30, 2),
        "checkpoint_stall_s": round(stall, 3),
        "checkpoint_s": round(saved, 3),
    }


def report(facts: dict[str, Any], body: Callable[[], dict[str, Any] | None]) -> bool:
    try:
        print(json.dumps({**facts, "outcome": "ok", **(body() or {})}), flush=True)
        return True
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({**facts, "outcome": f"{type(error).__name__}: {error}"}), flush=True)
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a few thousand parameters for the speeds"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each model")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of MFU; default: an H200's in bf16")
    options = parser.parse_args()
    try:
        alone("cuda")
    except pr.NotAvailable as reason:
        print(json.dumps({"python_training": "cuda", "outcome": f"no GPU: {reason}"}))
        return 77
    outcomes = [
        report({"python_training": f"bits of the CPU, {precision}"}, lambda p=precision: check_bits(p))
        for precision in ("fp32", "bf16", "fp16")
    ]
    outcomes.append(report({"python_training": "two ranks on one GPU"}, check_shared_gpu))
    outcomes.append(report({"python_training": "GPU's checkpoint on a CPU"}, check_checkpoint))
    models = {"tiny": (SMALL, 4)} if options.tiny else MODELS
    for name, (sizes, samples) in models.items():
        facts = {"model_step": name, "precision": "bf16"}
        outcomes.append(
            report(facts, lambda s=sizes, n=samples: measure(s, n, options.steps, options.peak_tflops))
        )
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
