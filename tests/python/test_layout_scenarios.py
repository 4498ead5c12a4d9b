"""Scenarios that users of other systems have reported, along tp and together with other axes; named by their ids."""

from __future__ import annotations

import math

import numpy as np
import polyreme as pr
import pytest
from helpers import batches, refused
from polyreme.testing import run_ranks

TINY = pr.models.GPT(layers=4, hidden=16, heads=4, vocab=11, seq_len=8)
# dp, tp, pp
LAYOUTS = [(1, 2, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 1), (1, 1, 2)]


def of_layout(layout, function):
    """function(trainer's maker, part of a global batch) on every rank of a layout; what all of them return."""
    dp, tp, pp = layout

    def body(world):
        mesh = pr.Mesh(world, dp=dp, tp=tp, pp=pp)

        def part(array):
            count = len(array) // dp
            return array[mesh.coordinate("dp") * count : (mesh.coordinate("dp") + 1) * count]

        return function(lambda model, **options: pr.Trainer(model, mesh, **options), part)

    results = run_ranks(math.prod(layout), body)
    assert all(result == results[0] for result in results), "ranks disagree"
    return results[0]


def weights_of(trainer):
    return {name: trainer.parameter(name).tobytes() for name in trainer.parameter_names()}


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_o_tp_06_o_tp_07_what_is_not_offered_is_refused_by_name(axis):
    run_ranks(
        2, lambda world: refused(pr.NotAvailable, [f"{axis}=2", "dp=2"], lambda: pr.Mesh(world, **{axis: 2}))
    )


def test_o_rn_04_initial_weights_do_not_depend_on_the_layout():
    """Nor on the lanes: an element's place in the whole parameter is what it is drawn by."""

    def run(make, part, **options):
        trainer = make(TINY, optimizer=pr.AdamW(), global_batch=4, **options)
        return weights_of(trainer)

    expected = of_layout((1, 1, 1), run)
    assert len(set(expected.values())) > 10
    for layout in LAYOUTS:
        assert of_layout(layout, run) == expected, layout
    assert of_layout((2, 2, 1), lambda make, part: run(make, part, zero=3)) == expected
    assert of_layout((1, 1, 1), lambda make, part: run(make, part, lanes=pr.Lanes(tp=4))) == expected


def test_o_dt_01_every_layout_repeats_its_bits_and_has_the_numbers_of_the_others():
    def run(make, part):
        rule = pr.AdamW(lr=1e-2, eps=1e-4)
        trainer = make(TINY, optimizer=rule, global_batch=2, micro_batch=2, clip_norm=1.0)
        losses = [trainer.step(*map(part, batch)).loss for batch in batches(20, 2, TINY)]
        return losses, weights_of(trainer)

    expected, _ = of_layout((1, 1, 1), run)
    for layout in [(1, 2, 1), (2, 2, 1)]:
        first, again = of_layout(layout, run), of_layout(layout, run)
        assert first == again
        assert first[0][-1] == pytest.approx(expected[-1], rel=1e-5)


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 2, 2), (2, 2, 1)])
def test_o_mp_01_an_overflow_of_one_lane_alone_is_skipped_by_all(layout):
    scale = pr.LossScale(initial=2.0, backoff=0.5, interval=1000)
    options = dict(
        global_batch=4, precision=pr.Precision(dtype="fp16", loss_scale=scale), lanes=pr.Lanes(dp=2, tp=2)
    )
    name, batch = "h.3.mlp.fc.weight", batches(1, 4, TINY)[0]

    def run(make, part):
        trainer = make(TINY, optimizer=pr.AdamW(lr=1e-2, eps=1e-4), **options)
        right = trainer.master_parameter(name)
        wrong = right.copy()
        wrong[-1, ::2], wrong[-1, 1::2] = 6e4, -6e4  # the last neuron, which only the last lane has
        trainer.set_parameter(name, wrong)
        before = weights_of(trainer)
        skipped = trainer.step(*map(part, batch))
        assert skipped.skipped
        assert (trainer.loss_scale, trainer.applied_steps) == (1.0, 0)
        assert weights_of(trainer) == before
        trainer.set_parameter(name, right)
        stats = trainer.step(*map(part, batch))
        return stats.loss.hex(), stats.grad_norm.hex(), weights_of(trainer)

    def reference(make, part):
        one = pr.Precision(dtype="fp16", loss_scale=pr.LossScale(initial=1.0, interval=1000))
        trainer = make(TINY, optimizer=pr.AdamW(lr=1e-2, eps=1e-4), **{**options, "precision": one})
        stats = trainer.step(*batch)
        return stats.loss.hex(), stats.grad_norm.hex(), weights_of(trainer)

    assert of_layout(layout, run) == of_layout((1, 1, 1), reference)


def test_o_rs_07_a_vocabulary_that_other_layouts_pad_otherwise(tmp_path):
    model = pr.models.GPT(layers=1, hidden=12, heads=12, mlp_hidden=12, vocab=10, seq_len=12)
    tokens = batches(1, 2, model)[0][0]

    def run(make, part, step):
        trainer = make(model, optimizer=pr.AdamW(lr=0.0), global_batch=2)
        with pr.Checkpointer(tmp_path) as checkpoints:
            if step > 1:
                checkpoints.load(trainer)
            trainer.step(*(part(values) for values in batches(1, 2, model)[0]))
            checkpoints.save(trainer, step=step)
        logits = trainer.logits(tokens)
        assert logits.shape == (2, 12, 10)
        assert trainer.parameter("wte.weight").shape == (10, 12)
        return trainer.parameter("wte.weight").tobytes(), logits.tolist()

    results = [
        of_layout((1, tp, 1), lambda make, part, step=step: run(make, part, step))
        for step, tp in enumerate([1, 4, 3, 1], start=1)
    ]
    for rows, logits in results:
        assert rows == results[0][0]
        assert np.allclose(logits, results[0][1], rtol=1e-5, atol=1e-6)
