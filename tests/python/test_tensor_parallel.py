"""Tensor parallelism: any number of ranks has the bits of one rank with the same lanes."""

from __future__ import annotations

import functools

import polyreme as pr
import pytest
from helpers import batches, fingerprint
from polyreme.testing import run_ranks

GPT = pr.models.GPT(layers=2, hidden=16, heads=4, vocab=31, seq_len=12, dropout=0.1)
UNTIED = pr.models.GPT(layers=2, hidden=16, heads=4, vocab=30, seq_len=12, tied=False)
LLAMA = pr.models.Llama(layers=3, hidden=16, heads=8, kv_heads=4, mlp_hidden=24, vocab=33, seq_len=12)
MODELS = {"gpt": GPT, "untied": UNTIED, "llama": LLAMA}


def train(world, *, tp=1, pp=1, model=GPT, lanes=4, dp_lanes=4, steps=2, length=None, **options):
    """Losses and norms, a fingerprint of weights and state, and logits."""
    mesh = pr.Mesh(world, pp=pp, tp=tp)
    options = {"global_batch": 8, "micro_batch": 2, "clip_norm": 0.5, **options}
    trainer = pr.Trainer(
        model,
        mesh,
        optimizer=pr.AdamW(lr=1e-2, eps=1e-4, weight_decay=0.1),
        lanes=pr.Lanes(dp=dp_lanes, tp=lanes),
        **options,
    )
    data = batches(steps, options["global_batch"], model, ignored=0.1)
    dp, place = mesh.size("dp"), mesh.coordinate("dp")
    history = []
    for tokens, targets in data:
        count = len(tokens) // dp
        part = slice(place * count, (place + 1) * count), slice(0, length)
        stats = trainer.step(tokens[part], targets[part])
        history.append((stats.loss.hex(), stats.grad_norm.hex(), stats.valid_tokens))
    logits = trainer.logits(data[0][0][:2, :7])
    return history, fingerprint(trainer), logits.tobytes()


def many(ranks, *, executor="immediate", seed=0, **options):
    results = run_ranks(ranks, lambda world: train(world, **options), executor=executor, schedule_seed=seed)
    assert all(result == results[0] for result in results), "ranks disagree"
    return results[0]


@functools.cache
def one_rank(**options):
    return many(1, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
def test_every_size_has_the_bits_of_one_rank(name, tp):
    assert many(tp, tp=tp, model=MODELS[name]) == one_rank(model=MODELS[name])


@pytest.mark.parametrize("seed", range(2))
def test_on_the_deferred_device(seed):
    for name, model in MODELS.items():
        options = dict(model=model, executor="deferred", seed=seed)
        assert many(2, tp=2, **options) == one_rank(model=model), name
