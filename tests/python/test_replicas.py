"""Ranks that should hold the same bits and do not are found, and named on every rank."""

from __future__ import annotations

import numpy as np
import polyreme as pr
import pytest
from helpers import TINY, batches, local_part, make_trainer, refused
from polyreme.testing import run_ranks

MODEL = pr.models.GPT(**TINY)
DATA = batches(3, 8, MODEL)


def flip(trainer, name, place, bit=1):
    """Flips one bit of a weight, on this rank alone."""
    values = trainer.parameter(name)
    values.view(np.uint32)[place] ^= 1 << bit
    trainer.set_parameter(name, values)


def step(trainer, world, k):
    return trainer.step(*(local_part(world, part) for part in DATA[k]))


@pytest.mark.parametrize("dp, culprit", [(2, 1), (4, 2)])
def test_f60_a_flipped_bit_is_found_within_the_interval(dp, culprit):
    name = "h.1.attn.qkv.weight"

    def run(world):
        trainer = make_trainer(world, MODEL, lanes=pr.Lanes(dp=dp), check_every=2)
        step(trainer, world, 0)
        if world.rank == culprit:
            flip(trainer, name, (3, 5))
        words = ["after step 2", f"dp rank {culprit} has another", f"'{name}'", "checkpoint"]
        refused(pr.NumericError, words, lambda: step(trainer, world, 1))

    run_ranks(dp, run)


def test_f60_in_shards_that_are_held_twice():
    """Stage 3 over pairs: the ranks that do not hold the bit stop as well."""
    name = "wte.weight"

    def run(world):
        trainer = make_trainer(world, MODEL, zero=pr.Zero(stage=3, shard_size=2))
        step(trainer, world, 0)
        trainer.check_replicas()
        values = trainer.parameter(name)
        if world.rank == 2:  # the first shard of the second group
            values.view(np.uint32)[0, 0] ^= 4
        trainer.set_parameter(name, values)
        words = ["dp rank 2", f"'{name}'"] if world.rank % 2 == 0 else ["dp rank 0 and its replicas differ"]
        refused(pr.NumericError, words, trainer.check_replicas)

    run_ranks(4, run)


@pytest.mark.parametrize("zero", [0, 1, 2, 3, pr.Zero(stage=2, shard_size=2)])
def test_a_good_run_passes(zero):
    def run(world):
        trainer = make_trainer(world, MODEL, zero=zero, check_every=1)
        return [step(trainer, world, k).step for k in range(3)]

    assert run_ranks(4, run) == [[1, 2, 3]] * 4


def test_f59_a_rank_with_another_step_count_is_named():
    def run(world):
        trainer = make_trainer(world, MODEL)
        step(trainer, world, 0)
        if world.rank == 1:
            trainer._engine.set_progress(5, 0, 0, trainer._engine.updates)
        # The learning rate is of the step, so name that alone.
        refused(pr.InvalidArgument, ["dp rank", "number of steps so far"], lambda: step(trainer, world, 1))

    run_ranks(2, run)
