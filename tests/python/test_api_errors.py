"""What users get wrong: the class of the error, its text with values and remedy, and that nothing has changed."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import polyreme as pr
import pytest
from helpers import TINY, alone, batches, fingerprint, local_part, make_trainer, refused, refused_unchanged
from polyreme import _core
from polyreme.environment import RankEnvironment
from polyreme.testing import run_ranks

MODEL = pr.models.GPT(**TINY)
TOKENS, TARGETS = batches(1, 8, MODEL)[0]
VOCAB, SEQ = MODEL.vocab, MODEL.seq_len


# ---- the classes ----


@pytest.mark.parametrize(
    "error, bases",
    [
        (pr.InvalidArgument, [pr.Error, ValueError]),
        (pr.NotAvailable, [pr.Error]),
        (pr.DeviceError, [pr.Error]),
        (pr.OutOfMemory, [pr.Error, MemoryError]),
        (pr.NumericError, [pr.Error, ArithmeticError]),
        (pr.CommError, [pr.Error]),
        (pr.PeerLost, [pr.CommError]),
        (pr.Timeout, [pr.CommError, TimeoutError]),
        (pr.CollectiveMismatch, [pr.CommError]),
    ],
)
def test_errors_are_also_those_of_python(error, bases):
    assert all(issubclass(error, base) for base in bases)
    assert error("text").args == ("text",)


# ---- init, lanes ----


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"device": "gpu"}, pr.InvalidArgument, ["device='gpu'", "'cpu'", "'cuda'"]),
        ({"device": "cuda:"}, pr.InvalidArgument, ["device='cuda:'", "'cuda:INDEX'"]),
        ({"isa": "sse4"}, pr.InvalidArgument, ["sse4", "avx2"]),
        ({"executor": "lazy"}, pr.InvalidArgument, ["lazy", "immediate", "deferred"]),
    ],
)
def test_init(options, error, words):
    refused(error, words, lambda: alone(**options))


def test_init_on_a_gpu_where_there_is_none():
    if any(not gpu["problem"] for gpu in _core.probe_cuda()["devices"]):
        pytest.skip("this machine has a GPU")
    refused(pr.NotAvailable, ["device='cuda'", "polyreme doctor"], lambda: alone(device="cuda"))


@pytest.mark.parametrize("num_threads", [0, -1, 1 << 20])
def test_init_with_an_impossible_number_of_threads(num_threads):
    refused(
        pr.InvalidArgument,
        ["thread", str(num_threads)],
        lambda: pr.init(environment=RankEnvironment(), num_threads=num_threads),
    )


@pytest.mark.parametrize("dp", [0, -2, 2.0, "2"])
def test_lanes_are_positive_integers(dp):
    refused(pr.InvalidArgument, [f"dp={dp!r}", "integer"], lambda: pr.Lanes(dp=dp))


@pytest.mark.parametrize(
    "size, lanes, global_batch, words",
    [
        (1, 3, 9, ["3", "power of two"]),
        (2, 1, 8, ["1", "2"]),
        (4, 2, 8, ["2", "4"]),
        (3, 4, 12, ["4", "3"]),
        (1, 16, 8, ["global_batch=8", "lanes.dp=16"]),
        (1, 4, 6, ["global_batch=6", "lanes.dp=4", "same number of samples"]),
        (2, None, 3, ["global_batch=3", "2"]),
    ],
)
def test_lanes_that_do_not_fit(size, lanes, global_batch, words):
    def make(world):
        make_trainer(world, MODEL, lanes=pr.Lanes(dp=lanes), global_batch=global_batch)

    refused(pr.InvalidArgument, words, lambda: run_ranks(size, make))


def test_lanes_equal_to_ranks_need_no_power_of_two():
    run_ranks(3, lambda world: make_trainer(world, MODEL, lanes=pr.Lanes(dp=3), global_batch=3))


def test_more_ranks_than_samples():
    refused(
        pr.InvalidArgument,
        ["global_batch=2", "dp=4", "at least one sample per rank"],
        lambda: run_ranks(4, lambda world: make_trainer(world, MODEL, global_batch=2)),
    )


# ---- model and trainer ----


@pytest.mark.parametrize(
    "options, words",
    [
        ({"layers": 0}, ["layers=0", "at least 1"]),
        ({"hidden": -8}, ["hidden=-8"]),
        ({"heads": 0}, ["heads=0"]),
        ({"vocab": 0}, ["vocab=0"]),
        ({"seq_len": 0}, ["seq_len=0"]),
        ({"layers": 1.5}, ["layers=1.5", "integer"]),
        ({"hidden": "768"}, ["hidden='768'", "integer"]),
        ({"hidden": 30, "heads": 4}, ["hidden=30", "heads=4", "divide"]),
        ({"mlp_hidden": 0}, ["mlp_hidden=0", "None"]),
        ({"mlp_hidden": 64.0}, ["mlp_hidden=64.0", "integer"]),
        ({"dropout": 1.0}, ["dropout=1.0", "dropout < 1"]),
        ({"dropout": -0.1}, ["dropout=-0.1"]),
        ({"dropout": math.nan}, ["dropout=nan"]),
        ({"layer_norm_eps": 0.0}, ["layer_norm_eps=0.0"]),
        ({"init_std": -1.0}, ["init_std=-1.0"]),
        ({"init_std": math.nan}, ["init_std=nan"]),
    ],
)
def test_gpt(options, words):
    refused(pr.InvalidArgument, ["GPT", *words], lambda: pr.models.GPT(**{**TINY, **options}))


def test_configurations_are_frozen_and_have_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MODEL.layers = 3
    with pytest.raises(TypeError):
        pr.models.GPT(12)
    with pytest.raises(TypeError):
        pr.Lanes(2)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"zero": 4}, pr.InvalidArgument, ["zero=4", "from 0 to 3"]),
        ({"zero": "3"}, pr.InvalidArgument, ["zero='3'", "str", "polyreme.Zero"]),
        ({"precision": "fp8"}, pr.InvalidArgument, ["precision='fp8'", "'bf16'"]),
        ({"global_batch": 0}, pr.InvalidArgument, ["global_batch=0", "at least 1"]),
        ({"global_batch": 8.0}, pr.InvalidArgument, ["global_batch=8.0", "integer"]),
        ({"micro_batch": 0}, pr.InvalidArgument, ["micro_batch=0", "at least 1"]),
        ({"micro_batch": -4}, pr.InvalidArgument, ["micro_batch=-4"]),
        ({"clip_norm": 0.0}, pr.InvalidArgument, ["clip_norm=0.0", "None"]),
        ({"clip_norm": -1.0}, pr.InvalidArgument, ["clip_norm=-1.0"]),
        ({"clip_norm": math.nan}, pr.InvalidArgument, ["clip_norm=nan"]),
        ({"seed": -1}, pr.InvalidArgument, ["seed=-1", "2^64"]),
        ({"seed": 1 << 64}, pr.InvalidArgument, [f"seed={1 << 64}"]),
        ({"seed": True}, pr.InvalidArgument, ["seed=True", "bool", "integer"]),
        ({"zero": -1}, pr.InvalidArgument, ["zero=-1"]),
        ({"zero": True}, pr.InvalidArgument, ["zero=True", "bool"]),
        ({"clip_norm": "1"}, pr.InvalidArgument, ["clip_norm='1'", "str", "finite number"]),
        ({"lanes": 4}, pr.InvalidArgument, ["lanes=4", "int", "polyreme.Lanes"]),
        ({"optimizer": 3}, pr.InvalidArgument, ["optimizer=3", "int", "polyreme.AdamW"]),
    ],
)
def test_trainer(world, options, error, words):
    refused(error, words, lambda: make_trainer(world, MODEL, **options))


def test_other_types_for_model_mesh_and_data(world, trainer):
    optimizer = pr.AdamW()
    words = ["of type int", "expected"]
    make = [
        lambda: pr.Trainer(3, pr.Mesh(world), optimizer=optimizer, global_batch=8),
        lambda: pr.Trainer(MODEL, 3, optimizer=optimizer, global_batch=8),
        lambda: pr.Mesh(3),
        lambda: trainer.fit(3, steps=1),
        lambda: trainer.evaluate(3),
        lambda: pr.generate(3, [1], num_tokens=1),
    ]
    for each, name in zip(make, ["model", "mesh", "world", "data", "data", "trainer"], strict=True):
        refused(pr.InvalidArgument, [f"{name}=3", *words], each)


def test_numbers_of_numpy_are_numbers(world):
    model = pr.models.GPT(**{name: np.int64(value) for name, value in TINY.items()}, dropout=np.float32(0.5))
    assert type(model.hidden) is int
    assert type(model.dropout) is float
    assert model == pr.models.GPT(**TINY, dropout=0.5)
    lanes = pr.Lanes(dp=np.int64(2))
    assert type(lanes.dp) is int
    made = make_trainer(
        world,
        model,
        lanes=lanes,
        global_batch=np.int64(4),
        micro_batch=np.int32(2),
        seed=np.uint64(5),
        zero=np.int8(1),
    )
    assert (type(made.global_batch), type(made.seed)) == (int, int)
    optimizer = pr.AdamW(
        lr=np.float32(0.5), betas=[np.float64(0.5), 0], weight_decay_rules={"w*": np.float32(0.5)}
    )
    assert optimizer == pr.AdamW(lr=0.5, betas=(0.5, 0.0), weight_decay_rules={"w*": 0.5})
    assert type(pr.lr.constant(np.float32(0.5), warmup=np.int64(2)).warmup) is int


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: pr.models.GPT(layers=True), ["layers=True", "bool"]),
        (lambda: pr.models.GPT(layers=np.bool_(True)), ["layers=", "bool"]),
        (lambda: pr.models.GPT(layers=1 << 80), [f"layers={1 << 80}", "2^63 - 1"]),
        (lambda: pr.models.GPT(dropout="0.1"), ["dropout='0.1'", "str", "number"]),
        (lambda: pr.models.GPT(init_std=10**400), ["finite"]),
        (lambda: pr.models.GPT(tied=1), ["tied=1", "True or False"]),
        (lambda: pr.Lanes(dp=True), ["dp=True"]),
        (lambda: pr.Lanes(order="rounds"), ["order='rounds'", "lane_first", "round_first"]),
        (lambda: pr.Zero(stage=4), ["Zero: stage=4", "from 0 to 3"]),
        (lambda: pr.Zero(stage=1, shard_size=0), ["shard_size=0", "None"]),
        (lambda: pr.Zero(bucket_bytes=0), ["bucket_bytes=0", "at least 1"]),
        (lambda: pr.Zero(overlap=1), ["overlap=1", "True or False"]),
        (lambda: pr.Zero(prefetch=-1), ["prefetch=-1"]),
        (lambda: pr.Zero(persist_below=0.5), ["persist_below=0.5", "float"]),
        (lambda: pr.AdamW(betas=0.9), ["betas=0.9", "two numbers"]),
        (lambda: pr.AdamW(betas=(0.9, "x")), ["'x'", "str"]),
        (lambda: pr.AdamW(eps=None), ["eps=None", "NoneType"]),
        (lambda: pr.AdamW(lr=True), ["lr=True", "schedule"]),
        (lambda: pr.AdamW(lr=lambda step: math.nan).lr_at(3), ["update 3", "lr=nan"]),
        (lambda: pr.SGD(momentum="0.9"), ["momentum='0.9'", "0 <= momentum < 1"]),
        (lambda: pr.SGD(weight_decay="0"), ["weight_decay='0'"]),
        (lambda: pr.SGD(weight_decay_rules=[1]), ["weight_decay_rules=[1]", "list"]),
        (lambda: pr.lr.constant(0.1, warmup=1.5), ["warmup=1.5", "float", "integer"]),
        (lambda: pr.lr.wsd(peak=0.1, warmup=1, total=9, decay="2"), ["decay='2'", "str"]),
        (lambda: pr.lr.warmup_cosine(peak="1", warmup=1, total=9), ["peak='1'"]),
    ],
)  # fmt: skip
def test_types_of_configurations(make, words):
    refused(pr.InvalidArgument, ["expected", *words], make)


@pytest.mark.parametrize("name", ["timeout_s", "init_timeout_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0, "5", True])
def test_init_with_an_impossible_timeout(name, value):
    refused(pr.InvalidArgument, [f"{name}={value!r}", "expected"], lambda: alone(**{name: value}))


def test_init_and_mesh_take_integers_only(world):
    words = ["num_threads=1.0", "float", "1 to 1024"]
    refused(pr.InvalidArgument, words, lambda: pr.init(environment=RankEnvironment(), num_threads=1.0))
    for axis in pr.Mesh.AXES:
        refused(
            pr.InvalidArgument, [f"{axis}=1.0", "integer"], lambda axis=axis: pr.Mesh(world, **{axis: 1.0})
        )
    refused(pr.InvalidArgument, ["timeout_s=nan"], lambda: world.barrier(timeout_s=math.nan))


# ---- batches ----


def changed(array, value, at=(5, 7)):
    result = array.copy()
    result[at] = value
    return result


BATCHES = {
    "too_few_samples": (TOKENS[:4], TARGETS[:4], ["4 samples", "8", "global_batch=8"]),
    "too_many_samples": (np.tile(TOKENS, (2, 1)), np.tile(TARGETS, (2, 1)), ["16 samples", "8"]),
    "too_long": (np.tile(TOKENS, 2), np.tile(TARGETS, 2), [f"seq_len={2 * SEQ}", str(SEQ)]),
    "no_tokens": (TOKENS[:, :0], TARGETS[:, :0], ["seq_len=0"]),
    "one_dim": (TOKENS[0], TARGETS[0], ["int32", f"[{SEQ}]", "[num_samples, seq_len]"]),
    "three_dims": (TOKENS[None], TARGETS[None], [f"[1, 8, {SEQ}]", "[num_samples, seq_len]"]),
    "other_targets": (TOKENS, TARGETS[:, :-1], ["targets", f"[8, {SEQ}]"]),
    "float_tokens": (TOKENS.astype(np.float32), TARGETS, ["tokens", "float32", "integers"]),
    "float_targets": (TOKENS, TARGETS.astype(np.float64), ["targets", "float64", "integers"]),
    "bool_tokens": (TOKENS > 3, TARGETS, ["tokens", "bool", "integers"]),
    "token_at_vocab": (changed(TOKENS, VOCAB), TARGETS, [f"token {VOCAB}", "sample 5, position 7", f"of {VOCAB}"]),
    "negative_token": (changed(TOKENS, -1), TARGETS, ["token -1", "sample 5, position 7"]),
    "ignored_token": (changed(TOKENS, -100), TARGETS, ["token -100", "sample 5, position 7"]),
    "target_at_vocab": (TOKENS, changed(TARGETS, VOCAB), [f"target {VOCAB}", "sample 5, position 7", "-100"]),
    "negative_target": (TOKENS, changed(TARGETS, -1), ["target -1", "sample 5, position 7", "ignored"]),
    "wide_token": (changed(TOKENS.astype(np.int64), 1 << 40), TARGETS, ["tokens", "32 bits", str(1 << 40)]),
    "wraps_to_a_token": (changed(TOKENS.astype(np.uint64), (1 << 32) + 5), TARGETS, ["32 bits", str((1 << 32) + 5)]),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_batches(trainer, name):
    tokens, targets, words = BATCHES[name]
    refused_unchanged(trainer, pr.InvalidArgument, words, lambda: trainer.step(tokens, targets))


def test_a_shorter_sequence_and_any_integer_type_are_fine(world):
    losses = {
        dtype: make_trainer(world, MODEL).step(TOKENS[:, :5].astype(dtype), TARGETS[:, :5].tolist()).loss
        for dtype in (np.uint8, np.int16, np.int64, np.uint64)
    }
    assert len(set(losses.values())) == 1


def test_refusals_leave_no_trace(world, trainer):
    """Steps after refused ones are those of a trainer that never saw a wrong batch."""
    fresh = make_trainer(world, MODEL, lanes=pr.Lanes(dp=2))
    fresh.step(TOKENS, TARGETS)
    assert fingerprint(fresh) == fingerprint(trainer)


# ---- parameters ----


def test_unknown_parameters_and_states(trainer):
    refused(pr.InvalidArgument, ["wte.wight"], lambda: trainer.parameter("wte.wight"))
    refused(pr.InvalidArgument, ["wte.wight"], lambda: trainer.set_parameter("wte.wight", np.zeros(3)))
    words = ["momentum", "exp_avg", "exp_avg_sq"]
    refused(pr.InvalidArgument, words, lambda: trainer.optimizer_state("wte.weight", "momentum"))


def test_gradient_before_the_first_step(world):
    fresh = make_trainer(world, MODEL)
    refused(pr.InvalidArgument, ["no gradient", "first step"], lambda: fresh.gradient("wte.weight"))


def test_values_of_another_shape(trainer):
    shape = trainer.parameter("wte.weight").shape
    for values in (np.zeros(shape[0]), np.zeros(shape[::-1]), np.zeros((*shape, 1))):
        refused_unchanged(
            trainer,
            pr.InvalidArgument,
            ["'wte.weight'", str(shape), str(values.shape)],
            lambda values=values: trainer.set_parameter("wte.weight", values),
        )


# ---- numbers that are not finite ----


@pytest.mark.parametrize("optimizer", [pr.AdamW(lr=1e-2, weight_decay=0.1), pr.SGD(lr=1e-2, momentum=0.9)])
@pytest.mark.parametrize("size, zero", [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_f57_a_step_that_is_not_finite_changes_nothing(size, zero, optimizer, bad):
    states = ("exp_avg", "exp_avg_sq") if isinstance(optimizer, pr.AdamW) else ("momentum",)
    name = "h.1.mlp.fc.weight"

    def snapshot(trainer):
        found = {other: trainer.parameter(other) for other in trainer.parameter_names() if other != name}
        found |= {
            (n, kind): trainer.optimizer_state(n, kind) for n in trainer.parameter_names() for kind in states
        }
        return {key: value.tobytes() for key, value in found.items()}

    def run(world):
        options = dict(optimizer=optimizer, lanes=pr.Lanes(dp=2), clip_norm=1.0, zero=zero)
        trainer, other = (make_trainer(world, MODEL, **options) for _ in range(2))
        batch = local_part(world, TOKENS), local_part(world, TARGETS)
        trainer.step(*batch), other.step(*batch)
        good, before = trainer.parameter(name), snapshot(trainer)
        trainer.set_parameter(name, changed(good, bad, at=(1, 2)))
        text = refused(
            pr.NumericError,
            ["step 2", "not finite", "Nothing was updated", "learning rate"],
            lambda: trainer.step(*batch),
        )
        assert any(f"'{each}'" in text for each in trainer.parameter_names())
        assert snapshot(trainer) == before
        assert trainer.applied_steps == 1
        assert np.array_equal(trainer.parameter(name), changed(good, bad, at=(1, 2)), equal_nan=True)
        # Repaired, training goes on as if nothing had been.
        trainer.set_parameter(name, good)
        stats = trainer.step(*batch)
        assert stats.step == 2
        assert (stats.loss, stats.grad_norm) == (other.step(*batch).loss, stats.grad_norm)
        assert all(
            trainer.parameter(n).tobytes() == other.parameter(n).tobytes() for n in trainer.parameter_names()
        )
        return text

    texts = run_ranks(size, run)
    assert len(set(texts)) == 1


def test_a_loss_that_is_not_finite_with_a_gradient_that_is(world):
    """Logits of +-3e38: the loss overflows, its gradient does not."""
    model = pr.models.GPT(layers=1, hidden=4, heads=1, vocab=2, seq_len=1, tied=False)
    trainer = make_trainer(world, model, optimizer=pr.SGD(lr=1.0), global_batch=1)
    trainer.set_parameter("ln_f.weight", [0, 0, 0, 0])
    trainer.set_parameter("ln_f.bias", [3e38, 0, 0, 0])
    trainer.set_parameter("lm_head.weight", [[1, 0, 0, 0], [-1, 0, 0, 0]])
    before = {name: trainer.parameter(name).tobytes() for name in trainer.parameter_names()}
    refused(pr.NumericError, ["step 1", "loss inf"], lambda: trainer.step([[0]], [[1]]))
    assert {name: trainer.parameter(name).tobytes() for name in trainer.parameter_names()} == before


# ---- groups ----


def test_wrong_types_in_calls_of_groups(world):
    group = pr.Mesh(world)["dp"]
    one = np.ones(2, np.float32)
    cases = [
        (["all_reduce: op", "3"], lambda: group.all_reduce(one, 3)),
        (["reduce_scatter: op", "None"], lambda: group.reduce_scatter(one, None)),
        (["all_gather: rows", "2", "each member"], lambda: group.all_gather(one, rows=2)),
        (["exchange", "sends=[(array, 1)]"], lambda: group.exchange(sends=[np.ones(3)])),
        (["exchange", "receives=[(array, 1)]"], lambda: group.exchange(receives=3)),
        (["label", "7"], lambda: group.label(7).__enter__()),
    ]
    for words, call in cases:
        refused(pr.InvalidArgument, words, call)
    assert group.all_reduce(one)[0] == 1  # still usable


def test_all_reduce(world):
    group = pr.Mesh(world)["dp"]
    refused(
        pr.InvalidArgument,
        ["'avg'", "sum, product, max, min or average"],
        lambda: group.all_reduce([1.0], op="avg"),
    )
    for array in (np.zeros(2, complex), np.zeros(2, np.uint16), np.array(["a"])):
        words = ["all_reduce: array", "float32", array.dtype.name]
        refused(pr.InvalidArgument, words, lambda array=array: group.all_reduce(array))


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("reduction", [None, 3])
def test_a_reduction_that_is_no_text_is_a_type_error(world, operation, reduction):
    """It was a crash where the binding kept alive what a failed conversion had returned."""
    arrays = [np.ones(4)] * (1 if operation == "all_reduce" else 2)
    with pytest.raises(TypeError):
        getattr(pr.Mesh(world)["dp"]._core, operation)(*arrays, reduction)


@pytest.mark.parametrize("option", ["isa", "executor", "transport", "interface"])
def test_init_with_a_wrong_type_does_not_show_the_secret(option):
    environment = RankEnvironment(
        size=2, rank=1, secret="not for logs", master_port=1, job_id="job", local_size=2
    )
    words = [f"init: {option}", "3"]
    text = refused(
        pr.InvalidArgument, words, lambda: pr.init(environment=environment, init_timeout_s=1, **{option: 3})
    )
    assert "not for logs" not in text


def test_ranks_that_disagree_about_a_collective():
    def run(world):
        group = pr.Mesh(world)["dp"]
        refused(
            pr.CollectiveMismatch, ["0", "1", "3", "4"], lambda: group.all_reduce(np.zeros(3 + world.rank))
        )

    run_ranks(2, run)


def test_barrier_names_the_rank_that_does_not_come():
    def run(world):
        if world.rank == 0:
            start = time.monotonic()
            refused(pr.Timeout, ["barrier", "1"], lambda: world.barrier(timeout_s=0.3))
            assert time.monotonic() - start < 30
        else:
            time.sleep(0.5)

    run_ranks(2, run)
