"""Layouts of data, tensor and pipeline parallelism together have the bits of one rank.

Every two choices occur together in some run; with POLYREME_TEST_FULL=1 every combination of the main ones does.
"""

from __future__ import annotations

import functools
import itertools
import os

import polyreme as pr
import pytest
from helpers import batches, fingerprint, polyreme
from pairs import all_pairs
from polyreme.testing import run_ranks

GPT = dict(layers=3, hidden=16, heads=4, mlp_hidden=24, vocab=31, seq_len=8, dropout=0.1)
LLAMA = dict(layers=3, hidden=16, heads=8, kv_heads=4, mlp_hidden=24, vocab=33, seq_len=8)
MODELS = {
    "gpt": lambda **more: pr.models.GPT(**GPT, **more),
    "untied_gpt": lambda **more: pr.models.GPT(**GPT, tied=False, **more),
    "llama": lambda **more: pr.models.Llama(**LLAMA, **more),
    "tied_llama": lambda **more: pr.models.Llama(**LLAMA, tied=True, **more),
}
KINDS = {
    "one_f_one_b": pr.schedule.one_f_one_b(),
    "gpipe": pr.schedule.gpipe(),
    "interleaved": pr.schedule.interleaved(2),
    "zb_h1": pr.schedule.zb_h1(),
    "zb_v": pr.schedule.zb_v(),
    "dual_pipe_v": pr.schedule.dual_pipe_v(),
}
OPTIONS = {
    # dp, tp, pp
    "layout": [
        (2, 2, 2),
        (1, 2, 1),
        (1, 4, 1),
        (2, 2, 1),
        (1, 2, 2),
        (4, 2, 1),
        (2, 4, 1),
        (1, 4, 2),
        (1, 2, 3),
        (2, 1, 2),
        (1, 2, 4),
    ],
    "schedule": list(KINDS),
    "stage": [0, 1, 2, 3],
    "recompute": [False, True, "attention"],
    "model": list(MODELS),
    "precision": ["fp32", "bf16", "fp16"],
    "order": ["lane_first", "round_first"],
    "executor": ["immediate", "deferred"],
    "overlap": [True, False],
}
# What the full product is over; the rest takes its first value.
MAIN = ["layout", "schedule", "stage", "recompute", "model"]
GLOBAL_BATCH = 8


def combinations():
    chosen = all_pairs(OPTIONS)
    assert len(chosen) >= 60
    if os.environ.get("POLYREME_TEST_FULL") != "1":
        return chosen
    firsts = {name: values[0] for name, values in OPTIONS.items()}
    product = itertools.product(*(OPTIONS[name] for name in MAIN))
    return chosen + [firsts | dict(zip(MAIN, values, strict=True)) for values in product]


def train(world, layout, model, *, schedule, stage, precision, order, overlap=True):
    """Losses and norms, a fingerprint of weights and state, and logits."""
    dp, tp, pp = layout
    mesh = pr.Mesh(world, dp=dp, pp=pp, tp=tp)
    kind = KINDS[schedule]
    if pp > 1 and kind.chunks * pp > model.layers + 2:  # the model has fewer parts
        kind = pr.schedule.one_f_one_b()
    trainer = pr.Trainer(
        model,
        mesh,
        optimizer=pr.AdamW(lr=1e-2, eps=1e-4, weight_decay=0.1),
        global_batch=GLOBAL_BATCH,
        # One of several in a lane, but for rounds, which they make, and schedules that need many.
        micro_batch=1 if order == "round_first" or schedule == "dual_pipe_v" else 2,
        lanes=pr.Lanes(dp=4, tp=4, order=order),
        clip_norm=0.5,
        zero=pr.Zero(stage=stage, overlap=overlap, bucket_bytes=4096),
        precision=pr.Precision(dtype=precision, loss_scale=pr.LossScale(initial=1024.0)),
        schedule=kind if pp > 1 else None,
    )
    history = []
    data = batches(2, GLOBAL_BATCH, model, ignored=0.1)
    for tokens, targets in data:
        count = GLOBAL_BATCH // dp
        part = slice(mesh.coordinate("dp") * count, (mesh.coordinate("dp") + 1) * count)
        stats = trainer.step(tokens[part], targets[part])
        history.append((stats.loss.hex(), stats.grad_norm.hex(), stats.valid_tokens))
    return history, fingerprint(trainer), trainer.logits(data[0][0][:2, :5]).tobytes()


def run(layout, model, recompute=False, executor="immediate", seed=0, **options):
    dp, tp, pp = layout
    results = run_ranks(
        dp * tp * pp,
        lambda world: train(world, layout, MODELS[model](recompute=recompute), **options),
        executor=executor,
        schedule_seed=seed,
    )
    assert all(result == results[0] for result in results), "ranks disagree"
    return results[0]


@functools.cache
def one_rank(model, precision="fp32", order="lane_first"):
    return run((1, 1, 1), model, schedule="one_f_one_b", stage=0, precision=precision, order=order)


@pytest.mark.parametrize("choice", combinations(), ids=lambda c: "-".join(str(v) for v in c.values()))
def test_same_bits(choice):
    expected = one_rank(choice["model"], choice["precision"], choice["order"])
    assert run(**choice) == expected


SCRIPT = """
import polyreme as pr
from test_layouts import MODELS, train

world = pr.init(init_timeout_s=60, timeout_s=60)
options = dict(schedule={schedule!r}, stage={stage}, precision={precision!r}, order="lane_first")
print("RESULT", repr(train(world, {layout}, MODELS[{model!r}](), **options)[:2]))
"""
PROCESSES = [
    dict(layout=(1, 2, 1), schedule="one_f_one_b", stage=0, precision="fp32", model="gpt"),
    dict(layout=(2, 2, 1), schedule="one_f_one_b", stage=3, precision="bf16", model="llama"),
    dict(layout=(1, 2, 2), schedule="zb_h1", stage=0, precision="fp32", model="tied_llama"),
    dict(layout=(2, 1, 2), schedule="zb_v", stage=1, precision="fp32", model="untied_gpt"),
    dict(layout=(1, 4, 1), schedule="one_f_one_b", stage=0, precision="fp16", model="gpt"),
    dict(layout=(2, 2, 2), schedule="interleaved", stage=2, precision="fp32", model="gpt"),
]


@pytest.mark.mp
@pytest.mark.parametrize("choice", PROCESSES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_processes_have_the_bits_of_one_rank(choice, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(**choice))
    dp, tp, pp = choice["layout"]
    done = polyreme("run", "-n", dp * tp * pp, path, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = one_rank(choice["model"], choice["precision"])[:2]
    assert done.stdout.count(f"RESULT {expected!r}") == dp * tp * pp
