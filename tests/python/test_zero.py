"""ZeRO: less memory, the same numbers. Equal bits over stages are in test_same_bits.py."""

from __future__ import annotations

import numpy as np
import polyreme as pr
import pytest
from helpers import batches, local_part, make_trainer, refused
from polyreme.testing import run_ranks

MODEL = pr.models.GPT(layers=2, hidden=256, heads=4, vocab=512, seq_len=16)
DATA = batches(2, 4, MODEL)


def persistent_bytes(world, **options):
    """Device memory that stays between steps, what the shard map says it is, and the number of parameters."""
    before = world.memory()["in_use_bytes"]
    trainer = make_trainer(world, MODEL, global_batch=4, **options)
    for tokens, targets in DATA:
        trainer.step(local_part(world, tokens), local_part(world, targets))
    return world.memory()["in_use_bytes"] - before, trainer.memory(), trainer.num_parameters


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_is_the_formula(dp, zero, precision):
    def run(world):
        return persistent_bytes(world, zero=zero, precision=precision)

    for measured, terms, parameters in run_ranks(dp, run):
        divided = [parameters / dp if zero >= stage else parameters for stage in (1, 2, 3)]
        tied = MODEL.vocab * MODEL.hidden if zero < 2 or dp == 1 else 0
        weights = 4 * divided[2] if precision == "fp32" else 2 * divided[2] + 4 * divided[0]
        formula = weights + 4 * (divided[1] + tied) + 8 * divided[0]
        assert measured == pytest.approx(formula, rel=0.02)
        assert measured == pytest.approx(sum(terms.values()), rel=0.02)


@pytest.mark.parametrize(
    "dp, lanes, order, zero",
    [
        (1, 4, "lane_first", 0),
        (2, 4, "lane_first", 1),
        (2, 4, "lane_first", 2),
        (2, 4, "round_first", 1),
        (4, 4, "round_first", 2),
        (4, 4, "lane_first", pr.Zero(stage=1, shard_size=2)),
        (4, 4, "lane_first", pr.Zero(stage=3, shard_size=2)),
        (4, 4, "lane_first", pr.Zero(stage=3, persist_below=70_000)),
        (4, 4, "lane_first", pr.Zero(stage=3, bucket_bytes=1)),
    ],
)
def test_memory_terms(dp, lanes, order, zero):
    def run(world):
        return persistent_bytes(world, lanes=pr.Lanes(dp=lanes, order=order), zero=zero)

    for measured, terms, _ in run_ranks(dp, run):
        assert measured == pytest.approx(sum(terms.values()), rel=0.02)


@pytest.mark.parametrize("zero", [2, 3])
def test_what_a_step_adds(zero):
    """The most in use at once is what stays, the terms of a step, and activations."""
    model = pr.models.GPT(layers=8, hidden=128, heads=4, vocab=256, seq_len=8)

    def run(world):
        trainer = make_trainer(world, model, global_batch=4, zero=pr.Zero(stage=zero, bucket_bytes=1 << 18))
        tokens, targets = (local_part(world, part) for part in batches(1, 4, model)[0])
        trainer.step(tokens, targets)
        world._core.reset_peak_memory()
        trainer.step(tokens, targets)
        terms = trainer.memory(step=True)
        return world.memory()["peak_bytes"], sum(terms.values()), terms, trainer.num_parameters

    activations = 2 * model.seq_len * (model.layers * 20 * model.hidden + 3 * model.vocab) * 4
    for peak, expected, terms, parameters in run_ranks(4, run):
        assert 0.7 * expected < peak < 1.02 * expected + activations
        assert terms["buckets"] < 4 * parameters / 3


@pytest.mark.parametrize("dp, zero", [(1, 0), (2, 1), (2, 2)])
def test_offloaded_moments_are_not_in_device_memory(dp, zero):
    def run(world):
        before = world.memory()["in_use_bytes"]
        trainer = make_trainer(world, MODEL, global_batch=4, zero=pr.Zero(stage=zero, offload=True))
        trainer.step(*(local_part(world, part) for part in DATA[0]))
        measured = world.memory()["in_use_bytes"] - before
        return measured, trainer.memory(), trainer.memory(host=True), trainer.num_parameters

    for measured, device, host, parameters in run_ranks(dp, run):
        assert device["moments"] == 0
        assert host == {"moments": pytest.approx(8 * parameters / dp, rel=0.02)}
        assert measured == pytest.approx(sum(device.values()), rel=0.02)


def test_rules_that_need_their_state_on_the_device_are_not_offloaded():
    def run(world):
        for rule in (pr.LAMB(), pr.Muon()):
            options = dict(optimizer=rule, zero=pr.Zero(offload=True))
            refused(
                pr.NotAvailable, ["offload", "adamw"], lambda options=options: make_trainer(world, **options)
            )

    run_ranks(1, run)


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
