"""Training in bf16 and fp16: fp32 masters, the scale of the loss, and the same bits on every layout."""

from __future__ import annotations

import functools
import json

import numpy as np
import polyreme as pr
import pytest
from helpers import (
    TINY,
    alone,
    batches,
    fingerprint,
    local_part,
    make_trainer,
    polyreme,
    python_corpus,
    refused,
    train,
)
from polyreme.testing import run_ranks

MODEL = pr.models.GPT(**TINY, dropout=0.1)
UNTIED = pr.models.GPT(**TINY, tied=False, dropout=0.1)
DATA = batches(3, 8, MODEL, ignored=0.1)
# A scale at which a step of the small model does not overflow.
FP16 = pr.Precision(dtype="fp16", loss_scale=pr.LossScale(initial=1024.0))
PRECISIONS = {
    "bf16": pr.Precision(dtype="bf16"),
    "fp16": FP16,
    "bf16-norms-logits-fp32": pr.Precision(dtype="bf16", norms="fp32", logits="fp32"),
}


def run(dp, name, *, model=MODEL, data=DATA, **options):
    options.setdefault("lanes", pr.Lanes(dp=4))
    results = run_ranks(
        dp, lambda world: train(world, data, model, precision=PRECISIONS[name], clip_norm=0.5, **options)
    )
    assert all(result == results[0] for result in results), "ranks disagree"
    return results[0]


@functools.cache
def one_rank(name):
    return run(1, name)


# ---- the same bits ----


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize(
    "dp, stage, micro_batch", [(1, 0, 2), (2, 0, 1), (2, 1, 2), (2, 2, 1), (2, 3, 2), (4, 1, 1), (4, 3, 2)]
)
def test_same_bits(name, dp, stage, micro_batch):
    """O-GA-05, O-MP-05: a 16-bit accumulator would show in the size of the micro-batches."""
    assert run(dp, name, zero=stage, micro_batch=micro_batch) == one_rank(name)


@pytest.mark.parametrize("name", PRECISIONS)
def test_o_rn_01_recompute_and_buckets_change_nothing(name):
    model = pr.models.GPT(**TINY, dropout=0.1, recompute=True)
    zero = pr.Zero(stage=2, bucket_bytes=1, overlap=False)
    assert run(2, name, model=model, zero=zero) == one_rank(name)


LLAMA = pr.models.Llama(layers=2, hidden=32, heads=4, kv_heads=2, mlp_hidden=48, vocab=61, seq_len=24)


@pytest.mark.parametrize("model", [UNTIED, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_stages_of_a_pipeline(name, model):
    """Activations cross in 16 bits; the scale, the norm and skipped steps are those of all stages."""

    def body(world):
        options = dict(lanes=pr.Lanes(dp=4), global_batch=8, micro_batch=1, clip_norm=0.5)
        mesh = pr.Mesh(world, pp=2) if world.size == 2 else pr.Mesh(world)
        optimizer = pr.AdamW(lr=1e-3, eps=1e-4, weight_decay=0.1)
        trainer = pr.Trainer(model, mesh, precision=PRECISIONS[name], optimizer=optimizer, **options)
        stats = [trainer.step(*data) for data in DATA]
        logits = trainer.logits(DATA[0][0][:2]).tobytes()
        return [(each.loss, each.grad_norm) for each in stats], fingerprint(trainer), logits

    one = run_ranks(1, body)[0]
    assert all(result == one for result in run_ranks(2, body))


@pytest.mark.parametrize("name", PRECISIONS)
def test_deferred_device(name):
    """What passes here waits for every cast and gather."""
    results = run_ranks(
        2,
        lambda world: train(
            world, DATA[:1], precision=PRECISIONS[name], lanes=pr.Lanes(dp=4), zero=3, clip_norm=0.5
        ),
        executor="deferred",
        schedule_seed=3,
    )
    assert results[0] == results[1]
    assert results[0] == run(1, name, model=pr.models.GPT(**TINY), data=DATA[:1])


@pytest.mark.parametrize("hidden, heads", [(4, 1), (35, 5)])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_o_mp_09_stages_agree_at_odd_sizes(hidden, heads, name):
    model = pr.models.GPT(layers=1, hidden=hidden, heads=heads, vocab=29, seq_len=5)
    data = batches(3, 4, model)
    runs = [
        run(2, name, model=model, data=data, zero=stage, global_batch=4, micro_batch=micro_batch)
        for stage, micro_batch in ((0, 1), (1, 1), (2, 2), (3, 2))
    ]
    assert all(each == runs[0] for each in runs)
    assert runs[0] == run(1, name, model=model, data=data, global_batch=4)


# ---- what is computed ----


@pytest.mark.parametrize("name", PRECISIONS)
def test_weights_are_rounded_masters(name):
    """And the optimizer updates masters: steps too small for the weights still add up."""

    def body(world):
        trainer = make_trainer(world, precision=PRECISIONS[name], optimizer=pr.SGD(lr=1e-6), zero=2)
        first = {n: trainer.master_parameter(n) for n in trainer.parameter_names()}
        for tokens, targets in DATA:
            trainer.step(local_part(world, tokens), local_part(world, targets))
        dtype = PRECISIONS[name].dtype
        for n in trainer.parameter_names():
            master, weight = trainer.master_parameter(n), trainer.parameter(n)
            narrow = PRECISIONS[name].norms != "fp32" or "ln_" not in n
            np.testing.assert_array_equal(weight, _rounded(master, dtype) if narrow else master)
        moved = trainer.master_parameter("wte.weight") != first["wte.weight"]
        assert moved.mean() > 0.9
        return True

    assert all(run_ranks(2, body))


def _rounded(values, dtype):
    if dtype == "fp16":
        return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("name", PRECISIONS)
def test_losses_follow_fp32(name):
    world = alone()
    losses = []
    for precision in ("fp32", PRECISIONS[name]):
        trainer = make_trainer(world, pr.models.GPT(**TINY), precision=precision)
        losses.append([trainer.step(*DATA[i % 3]).loss for i in range(12)])
    # Losses are means over 190 tokens of numbers near 4, each off by a few roundings of 2^-8 at most.
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-3)
    assert losses[1] != losses[0]


def test_saved_activations_and_parameters_take_half():
    wide, narrow = MODEL.cost(4), MODEL.cost(4, precision="bf16")
    assert narrow["parameter_bytes"] * 2 == wide["parameter_bytes"]
    assert 0.5 <= narrow["saved_bytes"] / wide["saved_bytes"] < 0.53  # statistics stay fp32
    assert narrow["forward_flops"] == wide["forward_flops"]
    dtypes = {spec["dtype"] for spec in MODEL.param_specs(pr.Precision(dtype="fp16", norms="fp32"))}
    assert dtypes == {"float16", "float32"}


# ---- the scale of the loss ----

# In the model that is not tied: a head with such a row would overflow on every rank.
POISON = 60  # a token whose embedding overflows fp16 in the first sum


def poisoned(world, trainer, tokens):
    """The rank's part of a batch in which the last rank alone meets the poisoned token."""
    for name, value in (("wte.weight", 65504.0), ("wpe.weight", 40.0)):
        table = trainer.parameter(name)
        table[POISON if name == "wte.weight" else 0] = value
        trainer.set_parameter(name, table)
    part = local_part(world, tokens).copy()
    if world.rank == world.size - 1:
        part[0, 0] = POISON
    return part


def clean(array):
    return np.where(array == POISON, 1, array)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_o_mp_01_overflow_on_one_rank_only(dp, stage):
    scale = pr.LossScale(initial=1024.0)
    tokens, targets = (clean(array) for array in DATA[0])

    def body(world):
        options = dict(
            precision=pr.Precision(dtype="fp16", loss_scale=scale), zero=stage, lanes=pr.Lanes(dp=2)
        )
        trainer = make_trainer(world, UNTIED, **options)
        bad = poisoned(world, trainer, tokens)
        before = fingerprint(trainer)
        stats = trainer.step(bad, local_part(world, targets))
        assert stats.skipped
        assert (stats.step, trainer.applied_steps, trainer.skipped_steps) == (0, 0, 1)
        assert stats.loss_scale == 1024
        assert trainer.loss_scale == 512
        assert fingerprint(trainer) == before
        assert f"dp rank {world.size - 1} is the first of 1" in stats.not_finite
        after = trainer.step(local_part(world, tokens), local_part(world, targets))
        assert not after.skipped
        assert after.loss_scale == 512

        half = pr.Precision(dtype="fp16", loss_scale=pr.LossScale(initial=512.0))
        reference = make_trainer(world, UNTIED, **{**options, "precision": half})
        poisoned(world, reference, tokens)
        first = reference.step(local_part(world, tokens), local_part(world, targets))
        assert (after.loss, after.grad_norm, after.lr) == (first.loss, first.grad_norm, first.lr)
        assert fingerprint(trainer) == fingerprint(reference)
        return True

    assert all(run_ranks(dp, body))


@pytest.mark.parametrize("dp, stage", [(1, 0), (2, 1), (2, 3)])
def test_o_op_02_o_mp_03_a_skipped_step_counts_nowhere(dp, stage):
    """Good, overflow, good is good, good: counters, moments, learning rates. The scale stays by hysteresis."""
    scale = pr.LossScale(initial=1024.0, hysteresis=2)
    first, second = ([clean(array) for array in data] for data in DATA[:2])

    def body(world):
        def trainer():
            return make_trainer(
                world,
                UNTIED,
                precision=pr.Precision(dtype="fp16", loss_scale=scale),
                zero=stage,
                lanes=pr.Lanes(dp=2),
                optimizer=pr.AdamW(lr=pr.lr.warmup_cosine(peak=1e-3, warmup=3, total=9), eps=1e-4),
            )

        def step(each, batch, tokens=None):
            tokens = local_part(world, batch[0]) if tokens is None else tokens
            return each.step(tokens, local_part(world, batch[1]))

        left, right = trainer(), trainer()
        for each in (left, right):
            step(each, first)
            bad = poisoned(world, each, first[0])
        assert step(left, first, bad).skipped
        assert left.loss_scale == 1024
        ours, theirs = step(left, second), step(right, second)
        assert not ours.skipped
        assert (ours.step, ours.lr, ours.loss) == (theirs.step, theirs.lr, theirs.loss)
        assert fingerprint(left) == fingerprint(right)
        return True

    assert all(run_ranks(dp, body))


def test_o_mp_04_growth_after_an_interval():
    world = alone()
    scale = pr.LossScale(initial=4.0, interval=3)
    trainer = make_trainer(world, UNTIED, precision=pr.Precision(dtype="fp16", loss_scale=scale))
    tokens, targets = (clean(array) for array in DATA[0])
    seen = []
    for call in range(7):
        used = poisoned(world, trainer, tokens) if call == 2 else tokens
        trainer.step(used, targets)
        seen.append(trainer.loss_scale)
    assert seen == [4, 4, 2, 2, 2, 4, 4]


@pytest.mark.parametrize("first, second", [((1, 0), (2, 3)), ((2, 1), (1, 0)), ((2, 3), (2, 1))])
def test_o_mp_02_masters_and_scale_survive_a_restart(tmp_path, first, second):
    """Stopped after five of ten steps and resumed on another layout: the bits and scales of the whole run."""
    scale = pr.LossScale(initial=1024.0, interval=8)
    corpus = pr.data.TokenDataset(str(python_corpus(tmp_path)), seq_len=TINY["seq_len"])
    model = pr.models.GPT(**{**TINY, "vocab": corpus.vocab_size})

    def body(world, stage, steps, folder):
        precision = pr.Precision(dtype="fp16", loss_scale=scale)
        trainer = make_trainer(world, model, precision=precision, zero=stage, lanes=pr.Lanes(dp=2))
        with pr.Checkpointer(str(folder)) as checkpoints:
            trainer.resume(checkpoints)
            resumed = trainer._engine.loss_scaler_state
            stats = list(trainer.fit(corpus, steps=steps, checkpoints=checkpoints))
        masters = [trainer.master_parameter(name).tobytes() for name in trainer.parameter_names()]
        return resumed[:2], [(s.loss, s.loss_scale) for s in stats], fingerprint(trainer), masters

    def run(layout, steps, folder):
        return run_ranks(layout[0], lambda world: body(world, layout[1], steps, folder))[0]

    whole = run((1, 0), 10, tmp_path / "whole")
    head = run(first, 5, tmp_path / "stopped")
    tail = run(second, 10, tmp_path / "stopped")
    assert tail[0] == (1024, 5)
    assert [scale for _, scale in tail[1]] == [1024, 1024, 1024, 2048, 2048]
    assert (head[1] + tail[1], tail[2:]) == (whole[1], whole[2:])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("policy", ["raise", "skip", 2])
def test_policies_name_the_culprit(precision, policy):
    """A weight that is NaN, which no scale can help; fp16 at its minimum scale is no better than the others."""
    scale = pr.LossScale(initial=1.0) if precision == "fp16" else None

    def body(world):
        trainer = make_trainer(
            world, precision=pr.Precision(dtype=precision, loss_scale=scale), on_nonfinite=policy, zero=1
        )
        bias = trainer.parameter("h.1.mlp.fc.bias")
        bias[3] = np.nan
        trainer.set_parameter("h.1.mlp.fc.bias", bias)
        tokens, targets = (local_part(world, array) for array in DATA[0])
        allowed = {"raise": 0, "skip": 3}.get(policy, policy)
        for _ in range(allowed):
            stats = trainer.step(tokens, targets)
            assert stats.skipped
            assert "the weight 'h.1.mlp.fc.bias' was not finite before the step" in stats.not_finite
        if policy != "skip":
            words = ["step 1", "'h.1.mlp.fc.bias'", "Nothing was updated"]
            refused(pr.NumericError, words, lambda: trainer.step(tokens, targets))
        assert (trainer.applied_steps, trainer.skipped_steps) == (0, allowed)
        return True

    assert all(run_ranks(2, body))


def test_a_fixed_scale_stays_and_changes_no_bit_of_bf16():
    """bf16 has the exponents of fp32: a power of two scales gradients exactly, and the norm is without it."""
    runs = []
    world = alone()
    for scale in (None, 4096):
        trainer = make_trainer(world, precision=pr.Precision(dtype="bf16", loss_scale=scale), clip_norm=0.5)
        stats = [trainer.step(*data) for data in DATA]
        assert {each.loss_scale for each in stats} == {float(scale or 1)}
        runs.append(([(each.loss, each.grad_norm) for each in stats], fingerprint(trainer)))
    assert runs[0] == runs[1]


# ---- what is refused ----


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: pr.Precision(dtype="fp8"), ["Precision: dtype", "'fp8'", "'bf16'"]),
        (
            lambda: pr.Precision(dtype="bf16", norms="fp16"),
            ["Precision: norms", "'fp16'", "'bf16' or 'fp32'"],
        ),
        (lambda: pr.Precision(logits="bf16"), ["Precision: logits", "'bf16'", "'fp32'"]),
        (lambda: pr.Precision(loss_scale=0), ["Precision: loss_scale=0", "LossScale"]),
        (lambda: pr.LossScale(initial=0.5), ["LossScale: initial=0.5", "minimum=1"]),
        (lambda: pr.LossScale(interval=0), ["LossScale: interval=0"]),
        (lambda: pr.LossScale(backoff=1.5), ["LossScale: backoff=1.5"]),
    ],
)
def test_settings_that_do_not_exist(make, words):
    refused(pr.InvalidArgument, words, make)


def test_ranks_must_agree_on_the_precision():
    def body(world):
        precision = ["bf16", "fp16"][world.rank]
        return refused(
            pr.InvalidArgument, ["disagree", "model"], lambda: make_trainer(world, precision=precision)
        )

    run_ranks(2, body)


# ---- polyreme verify --precision ----

SCRIPT = """
import sys
import numpy as np
import polyreme as pr
model = pr.models.GPT(layers=1, hidden=16, heads=2, vocab=31, seq_len=8)
trainer = pr.Trainer(model, pr.Mesh(pr.init()), optimizer=pr.AdamW(lr=1e-2), global_batch=4)
if "worse" in sys.argv and trainer.precision.dtype != "fp32":
    trainer.optimizer = pr.AdamW(lr=0.0)
random = np.random.default_rng(0)
while True:
    start = random.integers(0, 31, (4, 1))
    tokens = (start + np.arange(9)) % 31
    trainer.step(tokens[:, :-1], tokens[:, 1:])
"""


@pytest.mark.mp
@pytest.mark.parametrize("case, code", [("same", 0), ("worse", 1)])
def test_verify_precision(tmp_path, case, code):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = polyreme("verify", "--json", "--precision", "bf16", "--steps", 40, script, case)
    assert done.returncode == code, done.stderr
    result = json.loads(done.stdout)
    assert result["passed"] == (code == 0)
    assert result["steps"] == 40
    assert (result["drop"] > 0.01) == (code == 1)
    assert result["final"] != result["twin_final"]
