"""Small models and batches for the tests."""

from __future__ import annotations

import hashlib

import numpy as np
import polyreme as pr

TINY = dict(layers=2, hidden=32, heads=4, vocab=61, seq_len=24)


def batches(steps, samples, model, *, seed=0, ignored=0.0):
    """`steps` random (tokens, targets) of the global batch; a share of targets is ignored."""
    random = np.random.default_rng(seed)
    result = []
    for _ in range(steps):
        tokens = random.integers(0, model.vocab, (samples, model.seq_len + 1))
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        targets[random.random(targets.shape) < ignored] = -100
        result.append((inputs.astype(np.int32), targets.astype(np.int32)))
    return result


def make_trainer(world, model=None, **options):
    model = model or pr.models.GPT(**TINY)
    options.setdefault("optimizer", pr.AdamW(lr=1e-3, eps=1e-4, weight_decay=0.1))
    options.setdefault("global_batch", 8)
    return pr.Trainer(model, pr.Mesh(world), **options)


def local_part(world, array):
    """This rank's samples of a global batch."""
    count = len(array) // world.size
    return array[world.rank * count : (world.rank + 1) * count]


def fingerprint(trainer):
    """A hash of all weights and optimizer state."""
    digest = hashlib.sha256()
    for name in trainer.parameter_names():
        digest.update(trainer.parameter(name).tobytes())
        for kind in ("exp_avg", "exp_avg_sq"):
            digest.update(trainer.optimizer_state(name, kind).tobytes())
    return digest.hexdigest()


def train(world, data, model=None, **options):
    """Trains on global batches; returns the exact losses, norms and the final fingerprint."""
    trainer = make_trainer(world, model, **options)
    history = []
    for tokens, targets in data:
        stats = trainer.step(local_part(world, tokens), local_part(world, targets))
        history.append((stats.loss.hex(), stats.grad_norm.hex()))
    return history, fingerprint(trainer)
