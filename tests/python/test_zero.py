"""ZeRO: less memory, the same numbers. Equal bits over stages are in test_same_bits.py."""

from __future__ import annotations

import numpy as np
import polyreme as pr
import pytest
from helpers import batches, local_part, make_trainer
from polyreme.testing import run_ranks

MODEL = pr.models.GPT(layers=2, hidden=256, heads=4, vocab=512, seq_len=16)
DATA = batches(2, 4, MODEL)


def persistent_bytes(world, zero):
    """Device memory that stays between steps: weights, gradients, moments, the tied head's gradient."""
    before = world.memory()["in_use_bytes"]
    trainer = make_trainer(world, MODEL, global_batch=4, zero=zero)
    for tokens, targets in DATA:
        trainer.step(local_part(world, tokens), local_part(world, targets))
    return world.memory()["in_use_bytes"] - before, trainer.num_parameters


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 1])
def test_memory_is_the_formula(dp, zero):
    for measured, parameters in run_ranks(dp, lambda world: persistent_bytes(world, zero)):
        shards = dp if zero else 1
        tied = MODEL.vocab * MODEL.hidden
        formula = 4 * parameters + 4 * (parameters + tied) + 8 * parameters / shards
        assert measured == pytest.approx(formula, rel=0.02)


def test_state_of_all_shards_is_gathered():
    """What zero=1 reads back is the whole state, equal to the unsharded one, on every rank."""

    def state(world, zero):
        trainer = make_trainer(world, MODEL, global_batch=4, zero=zero)
        tokens, targets = DATA[0]
        trainer.step(local_part(world, tokens), local_part(world, targets))
        names = trainer.parameter_names()
        return [trainer.gradient(n) for n in names] + [
            trainer.optimizer_state(n, "exp_avg_sq") for n in names
        ]

    (whole,) = run_ranks(1, lambda world: state(world, 0))
    for gathered in run_ranks(1, lambda world: state(world, 1)):
        assert all(np.array_equal(a, b) for a, b in zip(whole, gathered, strict=True))
    for gathered in run_ranks(2, lambda world: state(world, 1)):
        assert all(
            a.shape == b.shape and np.allclose(a, b, rtol=1e-3, atol=1e-8)
            for a, b in zip(whole, gathered, strict=True)
        )


def test_a_bad_gradient_changes_nothing_and_is_named_on_every_rank():
    def run(world):
        trainer = make_trainer(world, MODEL, global_batch=4, zero=1)
        weight = trainer.parameter("h.1.mlp.fc.weight")
        weight[3, 5] = np.inf
        trainer.set_parameter("h.1.mlp.fc.weight", weight)
        before = [trainer.parameter(name) for name in trainer.parameter_names()]
        tokens, targets = DATA[0]
        with pytest.raises(pr.NumericError, match=r"h\.1\.mlp\.fc\.weight"):
            trainer.step(local_part(world, tokens), local_part(world, targets))
        after = [trainer.parameter(name) for name in trainer.parameter_names()]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        assert trainer.applied_steps == 0

    run_ranks(2, run)
