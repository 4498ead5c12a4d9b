"""`pr.forecast`: the memory and the traffic of a step, said before any rank runs, are those of the run."""

from __future__ import annotations

import numpy as np
import polyreme as pr
import pytest
from helpers import refused
from polyreme.testing import run_ranks

SIZES = dict(layers=5, hidden=64, heads=4, vocab=256, seq_len=64)
KINDS = {
    "gpipe": pr.schedule.gpipe(),
    "one_f_one_b": pr.schedule.one_f_one_b(),
    "interleaved": pr.schedule.interleaved(2),
    "zb_h1": pr.schedule.zb_h1(),
    "zb_v": pr.schedule.zb_v(),
    "dual_pipe_v": pr.schedule.dual_pipe_v(),
}


def measured(axes, model, **options):
    """Peak and kept bytes of every rank of a real run of two steps, and what it sends in the second one."""
    size = int(np.prod(list(axes.values())))

    def body(world):
        mesh = pr.Mesh(world, **axes)
        trainer = pr.Trainer(model, mesh, **options)
        batch = np.zeros((options["global_batch"] // mesh.size("dp"), model.seq_len), dtype=np.int32)
        for _ in range(2):
            trainer.step(batch, batch)
        memory = world.memory()
        return memory["peak_bytes"], memory["in_use_bytes"]

    return run_ranks(size, body)


def check(axes, *, model=None, **options):
    model = model or pr.models.GPT(**SIZES, tied=False)
    options = {"optimizer": pr.AdamW(), "global_batch": 16, "micro_batch": 2, **options}
    forecasts = pr.forecast(model, axes, **options)
    for told, (peak, kept) in zip(forecasts, measured(axes, model, **options), strict=True):
        assert told.kept_bytes == pytest.approx(kept, rel=0.02)
        assert told.peak_bytes == pytest.approx(peak, rel=0.05)
    return forecasts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_schedules(kind, precision):
    check({"pp": 2}, schedule=KINDS[kind], precision=precision)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", [False, "attention", True])
def test_stages_of_zero_and_recomputation(zero, recompute):
    model = pr.models.GPT(**SIZES, tied=False, recompute=recompute)
    check({"dp": 2, "pp": 2}, model=model, zero=zero, schedule=pr.schedule.zb_h1())
    check({"dp": 2}, model=model, zero=zero, precision="bf16")


@pytest.mark.parametrize("gather", ["use", "step"])
def test_weights_of_stage_3(gather):
    check({"dp": 2, "pp": 2}, zero=pr.Zero(stage=3, gather=gather), micro_batch=1)


def test_other_models_and_layouts():
    check({"dp": 4}, zero=pr.Zero(stage=2, shard_size=2), lanes=pr.Lanes(dp=4))
    check({"pp": 3}, model=pr.models.Llama(**SIZES, kv_heads=2), lanes=pr.Lanes(dp=2))
    check({"pp": 2}, model=pr.models.GPT(**SIZES, dropout=0.1), zero=1)
    check({"dp": 2, "tp": 2}, model=pr.models.GPT(**SIZES), zero=1)


def test_traffic_of_stage_3_gathered_for_each_use_and_for_the_step():
    model = pr.models.GPT(**SIZES, tied=False)

    def sent(gather):
        options = dict(
            optimizer=pr.AdamW(), global_batch=16, micro_batch=1, zero=pr.Zero(stage=3, gather=gather)
        )
        return pr.forecast(model, {"dp": 2, "pp": 2}, **options)

    for use, step in zip(sent("use"), sent("step"), strict=True):
        weights = sum(spec["numel"] for spec in local_specs(model, use.coordinates["pp"]))
        # Once a step, as gradients are reduced, in units that are padded for an even cut.
        assert step.sent_bytes["dp: all_gather"] == step.sent_bytes["dp: reduce_scatter"]
        assert 4 * weights / 2 <= step.sent_bytes["dp: all_gather"] < 1.2 * 4 * weights / 2
        assert use.sent_bytes["dp: all_gather"] > 10 * step.sent_bytes["dp: all_gather"]  # of 8 micro-batches
        for name in ("dp: reduce_scatter", "pp: exchange"):
            assert use.sent_bytes[name] == step.sent_bytes[name]
        boundary = 8 * 64 * 64 * 4  # samples of a rank, tokens, features, fp32
        assert use.sent_bytes["pp: exchange"] == boundary


def local_specs(model, stage):
    """The parameters of a stage of two, by the blocks that the split by cost gives it."""
    specs = [{**spec, "numel": int(np.prod(spec["shape"]))} for spec in model.param_specs()]
    first = {f"h.{block}." for block in range(3)}

    def is_first(name):
        return name.startswith(("wte", "wpe")) or name[:4] in first

    return [spec for spec in specs if is_first(spec["name"]) == (stage == 0)]


def test_a_layout_far_larger_than_this_machine():
    model = pr.models.Llama(
        layers=80, hidden=8192, heads=64, kv_heads=8, vocab=128256, seq_len=4096, recompute=True
    )
    options = dict(optimizer=pr.AdamW(), global_batch=256, zero=1, precision="bf16")
    first, last = pr.forecast(model, {"dp": 16, "pp": 8, "tp": 8}, ranks=[0, 1023], **options)
    assert first.coordinates == {"dp": 0, "pp": 0, "tp": 0}
    assert last.coordinates == {"dp": 15, "pp": 7, "tp": 7}
    assert 2e9 < last.peak_bytes < 80e9
    assert set(last.sent_bytes) >= {"dp: reduce_scatter", "dp: all_gather", "pp: exchange"}


def test_refusals():
    model = pr.models.GPT(**SIZES)
    options = dict(optimizer=pr.AdamW(), global_batch=16)
    refused(pr.InvalidArgument, ["rank 2 of 2"], lambda: pr.forecast(model, {"dp": 2}, ranks=[2], **options))
    refused(pr.InvalidArgument, ["dp=0"], lambda: pr.forecast(model, {"dp": 0}, **options))
    refused(pr.InvalidArgument, ["global_batch=16", "dp=3"], lambda: pr.forecast(model, {"dp": 3}, **options))
    refused(pr.InvalidArgument, ["layers"], lambda: pr.forecast(model, {"pp": 9}, **options))
