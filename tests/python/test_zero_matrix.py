"""Whole training runs have the same bits in every stage of ZeRO and however its work is cut and overlapped.

Every two choices occur together in some run; with POLYREME_TEST_FULL=1 every combination does.
"""

from __future__ import annotations

import functools
import itertools
import os

import polyreme as pr
import pytest
from helpers import TINY, batches, train
from pairs import all_pairs
from polyreme.testing import run_ranks

LANES = 8
DATA = batches(2, 2 * LANES, pr.models.GPT(**TINY), ignored=0.1)
OPTIONS = {
    "dp": [1, 2, 4, 8],
    "stage": [0, 1, 2, 3],
    "shard_size": [None, 2],
    "bucket_bytes": [1, 20_000, 25 << 20],
    "overlap": [True, False],
    "micro_batch": [1, 2],
    "order": ["lane_first", "round_first"],
    "recompute": [False, True],
    "tied": [True, False],
    "prefetch": [1, 0, 3],
    "persist_below": [0, 100],
    "offload": [False, True],
    "precision": ["fp32", "bf16", "fp16"],
    "gradients": ["fp32", "bf16", "fp16"],
}
# What the full product is over; the rest takes its first value.
MAIN = ["dp", "stage", "bucket_bytes", "overlap", "micro_batch", "order", "recompute", "tied", "precision"]


def combinations():
    if os.environ.get("POLYREME_TEST_FULL") != "1":
        return all_pairs(OPTIONS)
    firsts = {name: values[0] for name, values in OPTIONS.items()}
    product = itertools.product(*(OPTIONS[name] for name in MAIN))
    return all_pairs(OPTIONS) + [firsts | dict(zip(MAIN, values, strict=True)) for values in product]


def run(dp, *, stage, tied, recompute=False, order, micro_batch, precision="fp32", gradients="fp32", **zero):
    model = pr.models.GPT(**TINY, tied=tied, recompute=recompute, dropout=0.1)
    options = dict(
        lanes=pr.Lanes(dp=LANES, order=order),
        micro_batch=micro_batch,
        zero=pr.Zero(stage=stage, **zero),
        global_batch=2 * LANES,
        clip_norm=0.5,
        # fp16 at a scale at which nothing overflows.
        precision=pr.Precision(dtype=precision, gradients=gradients, loss_scale=pr.LossScale(initial=1024.0)),
    )
    results = run_ranks(dp, lambda world: train(world, DATA, model, **options))
    assert all(result == results[0] for result in results), "ranks disagree"
    return results[0]


@functools.cache
def one_rank(tied, order, micro_batch, precision="fp32", gradients="fp32"):
    options = dict(order=order, micro_batch=micro_batch, precision=precision, gradients=gradients)
    return run(1, stage=0, tied=tied, **options)


@pytest.mark.parametrize("choice", combinations(), ids=lambda c: "-".join(str(v) for v in c.values()))
def test_same_bits(choice):
    zero = dict(choice)
    dp = zero.pop("dp")
    if zero["shard_size"] is not None:
        zero["shard_size"] = min(zero["shard_size"], dp)
    # Under lane_first the size of micro-batches changes nothing; the round is what it cuts.
    micro_batch = choice["micro_batch"] if choice["order"] == "round_first" else 2
    formats = choice["precision"], choice["gradients"]
    assert run(dp, **zero) == one_rank(choice["tied"], choice["order"], micro_batch, *formats)


def test_the_orders_differ():
    """Else the matrix would not see which one runs."""
    lane_first, round_first = (one_rank(True, order, 1) for order in ("lane_first", "round_first"))
    assert lane_first != round_first
    assert one_rank(True, "round_first", 2) == one_rank(True, "lane_first", 2), "one round is one lane"


def test_the_formats_of_gradients_differ():
    assert (
        len({repr(one_rank(True, "lane_first", 2, "fp32", each)) for each in ("fp32", "bf16", "fp16")}) == 3
    )


def test_pairs():
    choices = all_pairs({"a": [1, 2, 3], "b": "xyz", "c": [True, False]})
    seen = {(choice["a"], choice["b"]) for choice in choices} | {
        (choice["a"], choice["c"]) for choice in choices
    }
    assert len(seen) == 9 + 6
    assert len(choices) <= 12
