"""Parameters that do not learn: no gradient, no state, no update, and the same bits on every layout."""

from __future__ import annotations

import numpy as np
import polyreme as pr
import pytest
from helpers import TINY, batches, local_part, make_trainer, refused
from polyreme.testing import run_ranks

MODEL = pr.models.GPT(**TINY)
DATA = batches(3, 8, MODEL)


def run(size, frozen, *, model=MODEL, **options):
    """Norms, all weights, and the gradients of what learns, after three steps; the same on every rank."""

    def body(world):
        trainer = make_trainer(world, model, lanes=pr.Lanes(dp=4), clip_norm=0.5, frozen=frozen, **options)
        start = {name: trainer.parameter(name) for name in trainer.parameter_names()}
        norms = [
            trainer.step(local_part(world, tokens), local_part(world, targets)).grad_norm
            for tokens, targets in DATA
        ]
        end = {name: trainer.parameter(name) for name in start}
        moved = {name for name in start if not np.array_equal(start[name], end[name])}
        assert moved == set(start) - trainer.frozen
        gradients = {name: trainer.gradient(name) for name in sorted(moved)}
        return norms, {n: v.tobytes() for n, v in end.items()}, {n: v.tobytes() for n, v in gradients.items()}

    results = run_ranks(size, body)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize(
    "frozen",
    [["wte.*"], ["wte.*", "wpe.*", "h.0.*"], ["*.bias"], ["ln_f.*", "h.1.*"], ["h.?.attn.qkv.weight"]],
)
def test_same_bits(frozen):
    one = run(1, frozen)
    for size, zero in ((2, 0), (2, 1), (4, 2), (2, 3), (4, pr.Zero(stage=3, shard_size=2, bucket_bytes=1))):
        assert run(size, frozen, zero=zero) == one
    recompute = pr.models.GPT(**TINY, recompute=True)
    assert run(2, frozen, model=recompute, zero=2, micro_batch=2) == one


def test_gradients_of_the_others_are_those_of_a_run_without():
    """Freezing cuts nothing out of the backward pass of what learns."""

    def gradients(world, frozen):
        trainer = make_trainer(world, MODEL, frozen=frozen)
        trainer.step(*DATA[0])
        return {
            n: trainer.gradient(n).tobytes() for n in trainer.parameter_names() if n not in trainer.frozen
        }

    (every,) = run_ranks(1, lambda world: gradients(world, []))
    (some,) = run_ranks(1, lambda world: gradients(world, ["h.0.*", "wpe.*"]))
    assert some.items() <= every.items()
    assert len(some) == len(every) - 12 - 1


def test_no_memory_for_frozen_parameters():
    def terms(world, frozen):
        before = world.memory()["in_use_bytes"]
        trainer = make_trainer(world, MODEL, frozen=frozen)
        trainer.step(*DATA[0])
        return world.memory()["in_use_bytes"] - before, trainer.memory()

    ((measured, memory),) = run_ranks(1, lambda world: terms(world, ["h.*"]))
    assert measured == pytest.approx(sum(memory.values()), rel=0.02, abs=3000)
    ((_, every),) = run_ranks(1, lambda world: terms(world, []))
    assert memory["moments"] < 0.5 * every["moments"]
    assert memory["gradients"] < 0.5 * every["gradients"]
    assert memory["weights"] == pytest.approx(every["weights"], rel=0.1)


def test_refusals():
    def body(world):
        refused(pr.InvalidArgument, ["'wtf.*'", "wte.weight"], lambda: make_trainer(world, frozen=["wtf.*"]))
        refused(pr.InvalidArgument, ["'wte.*'", "list"], lambda: make_trainer(world, frozen="wte.*"))
        refused(pr.InvalidArgument, ["nothing to train"], lambda: make_trainer(world, frozen=["*"]))
        trainer = make_trainer(world, MODEL, frozen=["wpe.*"])
        trainer.step(*DATA[0])
        refused(pr.InvalidArgument, ["frozen"], lambda: trainer.gradient("wpe.weight"))
        refused(pr.InvalidArgument, ["exp_avg"], lambda: trainer.optimizer_state("wpe.weight", "exp_avg"))

    run_ranks(1, body)


def test_o_uf_04_counts_of_updates_are_each_parameters_own(tmp_path):
    """Frozen, saved, resumed without freezing: bias correction begins where a parameter's updates begin."""
    name = "h.0.attn.qkv.weight"

    def run(world, whole):
        rule = pr.AdamW(lr=1e-3, eps=1e-12)
        trainer = make_trainer(world, MODEL, optimizer=rule, frozen=[] if whole else [name])
        weights = trainer.parameter(name)
        with pr.Checkpointer(tmp_path / str(whole)) as checkpoints:
            trainer.step(*DATA[0])
            checkpoints.save(trainer, step=1)
            again = make_trainer(world, MODEL, optimizer=rule)
            checkpoints.load(again, strict=whole)
        counts = dict(zip(again.parameter_names(), again._engine.updates, strict=True))
        assert counts.pop(name) == int(whole)
        assert set(counts.values()) == {1}
        again.step(*DATA[1])
        return weights, again.parameter(name), again.gradient(name)

    weights, updated, gradient = run_ranks(1, lambda world: run(world, False))[0]
    # Adam's first update of an element is lr against the sign of its gradient, whatever its size.
    np.testing.assert_allclose(weights - updated, 1e-3 * np.sign(gradient), rtol=1e-2)
    run_ranks(1, lambda world: run(world, True))
