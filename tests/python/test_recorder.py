"""The flight recorder: spans around every operation and collective, off by default."""

from __future__ import annotations

import itertools

import polyreme as pr
import pytest
from helpers import TINY, alone, batches, local_part, make_trainer, train
from polyreme.testing import run_ranks

MODEL = pr.models.GPT(**TINY, dropout=0.1)
DATA = batches(2, 4, MODEL)
KINDS = {"gemm", "attention", "norm", "elementwise", "embedding", "loss", "optimizer", "copy"}
FIELDS = {"name", "kind", "stream", "sequence", "start_ns", "end_ns", "flops", "bytes"}


def spans_of_steps(world, *, record=True, steps=1):
    trainer = make_trainer(world, MODEL, global_batch=4, lanes=pr.Lanes(dp=2))
    world._core.record(record)
    for tokens, targets in DATA[:steps]:
        trainer.step(local_part(world, tokens), local_part(world, targets))
    world._core.record(False)
    return world._core.spans()


def test_off_by_default_nothing_is_recorded():
    world = alone()
    train(world, DATA, MODEL, global_batch=4)
    assert world._core.spans() == []


def test_switched_off_nothing_is_recorded():
    assert spans_of_steps(alone(), record=False) == []


@pytest.mark.parametrize("executor", ["immediate", "deferred"])
def test_a_step_has_spans_of_every_kind(executor):
    spans = spans_of_steps(alone(executor=executor))
    assert {span["kind"] for span in spans} >= KINDS
    for span in spans:
        assert set(span) == FIELDS
        assert span["name"]
        assert 0 < span["start_ns"] <= span["end_ns"]
        assert span["flops"] >= 0
    assert [span["sequence"] for span in spans] == list(range(len(spans)))


def test_spans_of_one_stream_do_not_overlap():
    spans = spans_of_steps(alone())
    for stream in {span["stream"] for span in spans}:
        own = [span for span in spans if span["stream"] == stream]
        assert all(a["end_ns"] <= b["start_ns"] for a, b in itertools.pairwise(own))


def test_the_arithmetic_of_the_gemms_is_that_of_the_cost():
    """Nothing but products and attention has model FLOPs, and `cost` has all of them."""
    spans = spans_of_steps(alone())
    cost = MODEL.cost(4)
    expected = sum(cost[f"{part}_flops"] for part in ("forward", "backward_input", "backward_weight"))
    counted = sum(span["flops"] for span in spans if span["kind"] in ("gemm", "attention"))
    assert counted == pytest.approx(expected, rel=0.01)


def test_collectives_of_two_ranks_have_their_bytes():
    found = run_ranks(2, spans_of_steps)
    for spans in found:
        collectives = [span for span in spans if span["kind"] == "collective"]
        assert collectives
        assert sum(span["bytes"] for span in collectives) >= 4 * sum(_sizes())
        assert {span["kind"] for span in spans} >= KINDS
    names = [[span["name"] for span in spans if span["kind"] == "collective"] for spans in found]
    assert names[0] == names[1]


def test_clearing_and_switching_off():
    world = alone()
    assert spans_of_steps(world)
    world._core.clear_spans()
    assert world._core.spans() == []
    assert spans_of_steps(world, record=False) == []


def test_the_ring_keeps_the_last_spans():
    world = alone()
    trainer = make_trainer(world, MODEL, global_batch=4)
    world._core.record(True)
    sequences = []
    while not sequences or sequences[0] == 0:
        for _ in range(20):
            trainer.step(*DATA[0])
        sequences = [span["sequence"] for span in world._core.spans()]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    assert len(sequences) <= 1 << 14


def test_recording_does_not_change_the_bits():
    def run(record):
        world = alone()
        world._core.record(record)
        return train(world, DATA, MODEL, global_batch=4)

    assert run(True) == run(False)


def _sizes():
    for spec in MODEL.param_specs():
        size = 1
        for dim in spec["shape"]:
            size *= dim
        yield size
