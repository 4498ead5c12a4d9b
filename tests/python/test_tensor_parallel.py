"""Tensor parallelism: any number of ranks has the bits of one rank with the same lanes."""

from __future__ import annotations

import functools
import math

import numpy as np
import polyreme as pr
import pytest
from helpers import batches, fingerprint, polyreme, refused, token_file
from polyreme.testing import run_ranks

GPT = pr.models.GPT(layers=2, hidden=16, heads=4, vocab=31, seq_len=12, dropout=0.1)
UNTIED = pr.models.GPT(layers=2, hidden=16, heads=4, vocab=30, seq_len=12, tied=False)
LLAMA = pr.models.Llama(layers=3, hidden=16, heads=8, kv_heads=4, mlp_hidden=24, vocab=33, seq_len=12)
MODELS = {"gpt": GPT, "untied": UNTIED, "llama": LLAMA}


def train(world, *, tp=1, pp=1, model=GPT, lanes=4, dp_lanes=4, steps=2, length=None, rule=None, **options):
    """Losses and norms, a fingerprint of weights and state, and logits."""
    mesh = pr.Mesh(world, pp=pp, tp=tp)
    options = {"global_batch": 8, "micro_batch": 2, "clip_norm": 0.5, **options}
    trainer = pr.Trainer(
        model,
        mesh,
        optimizer=rule or pr.AdamW(lr=1e-2, eps=1e-4, weight_decay=0.1),
        lanes=pr.Lanes(dp=dp_lanes, tp=lanes),
        **options,
    )
    data = batches(steps, options["global_batch"], model, ignored=0.1)
    dp, place = mesh.size("dp"), mesh.coordinate("dp")
    history = []
    for tokens, targets in data:
        count = len(tokens) // dp
        part = slice(place * count, (place + 1) * count), slice(0, length)
        stats = trainer.step(tokens[part], targets[part])
        history.append((stats.loss.hex(), stats.grad_norm.hex(), stats.valid_tokens))
    logits = trainer.logits(data[0][0][:2, :7])
    weights = [trainer.parameter(name).tobytes() for name in trainer.parameter_names()]
    return history, fingerprint(trainer) if rule is None else weights, logits.tobytes()


def many(ranks, *, executor="immediate", seed=0, **options):
    results = run_ranks(ranks, lambda world: train(world, **options), executor=executor, schedule_seed=seed)
    assert all(result == results[0] for result in results), "ranks disagree"
    return results[0]


@functools.cache
def one_rank(**options):
    return many(1, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
def test_every_size_has_the_bits_of_one_rank(name, tp):
    assert many(tp, tp=tp, model=MODELS[name]) == one_rank(model=MODELS[name])


@pytest.mark.parametrize("seed", range(2))
def test_on_the_deferred_device(seed):
    for name, model in MODELS.items():
        options = dict(model=model, executor="deferred", seed=seed)
        assert many(2, tp=2, **options) == one_rank(model=model), name


def test_lengths_that_the_lanes_do_not_divide():
    """Sequences are padded by ignored tokens; what a shorter one gives does not depend on that."""
    for length in (1, 7):
        options = dict(model=UNTIED, length=length)
        expected = one_rank(**options)
        assert many(2, tp=2, **options) == many(4, tp=4, **options) == expected
        [(loss, *_), *_], *_ = expected
        [(other, *_), *_], *_ = one_rank(lanes=1, **options)
        assert float.fromhex(loss) == pytest.approx(float.fromhex(other), rel=1e-5)


def test_eight_lanes():
    options = dict(model=pr.models.GPT(layers=1, hidden=16, heads=8, vocab=29, seq_len=8), lanes=8)
    expected = many(1, **options)
    assert many(8, tp=8, **options) == many(2, tp=2, zero=1, **options) == expected


def test_lanes_are_a_power_of_two_or_the_size():
    model = pr.models.GPT(layers=1, hidden=12, heads=3, mlp_hidden=18, vocab=20, seq_len=6)
    assert many(3, tp=3, lanes=3, model=model)[0]
    words = ["lanes.tp=6", "tp=3", "power of two"]
    run_ranks(
        3, lambda world: refused(pr.InvalidArgument, words, lambda: train(world, tp=3, lanes=6, model=model))
    )


def gradients(world, model, tp, **options):
    """One step: loss, norm, all gradients, and those of them that the tp ranks hold alike."""
    trainer = pr.Trainer(
        model, pr.Mesh(world, tp=tp), optimizer=pr.SGD(lr=0.1), global_batch=4, micro_batch=2, **options
    )
    stats = trainer.step(*batches(1, 4, model)[0])
    return stats, {name: trainer.gradient(name) for name in trainer.parameter_names()}


def compared(model, tp, **options):
    """The largest difference of a gradient to the model without lanes, relative to its largest element."""
    stats, own = run_ranks(tp, lambda world: gradients(world, model, tp, **options))[0]
    other_stats, other = run_ranks(1, lambda world: gradients(world, model, 1))[0]
    assert stats.loss == pytest.approx(other_stats.loss, rel=1e-6)
    assert stats.grad_norm == pytest.approx(other_stats.grad_norm, rel=1e-5)
    for name, gradient in other.items():
        scale = np.abs(gradient).max()
        assert np.abs(own[name] - gradient).max() <= 1e-5 * scale, name
    return own


@pytest.mark.parametrize("tp", [2, 4])
def test_o_tp_01_bias_of_a_row_parallel_layer(tp):
    """Neither a share of the right gradient nor that of a rank's tokens alone."""
    own = compared(UNTIED, tp)
    assert np.abs(own["h.1.mlp.proj.bias"]).max() > 1e-4


@pytest.mark.parametrize("tp", [2, 4])
def test_o_tp_02_norms_are_alike_on_all_ranks_and_count_once(tp):
    def run(world):
        trainer = pr.Trainer(LLAMA, pr.Mesh(world, tp=tp), optimizer=pr.SGD(lr=0.1), global_batch=4)
        for tokens, targets in batches(5, 4, LLAMA):
            stats = trainer.step(tokens, targets)
        trainer.check_replicas()
        squares = sum(
            float((trainer.gradient(n).astype(np.float64) ** 2).sum()) for n in trainer.parameter_names()
        )
        assert stats.grad_norm == pytest.approx(squares**0.5, rel=1e-6)
        return trainer.parameter("h.0.ln_1.weight").tobytes()

    assert len(set(run_ranks(tp, run))) == 1
    compared(LLAMA, tp)


@pytest.mark.parametrize(
    "heads, kv_heads, tp, words",
    [
        (4, 1, 2, ["kv_heads=1", "lanes.tp=2"]),
        (4, 2, 4, ["kv_heads=2", "lanes.tp=4", "1, 2"]),
        (6, 2, 4, ["heads=6", "lanes.tp=4"]),
        (3, 3, 2, ["heads=3", "lanes.tp=2"]),
        (4, 4, 8, ["heads=4", "lanes.tp=8"]),
    ],
)
def test_o_tp_03_o_tp_04_heads_that_do_not_divide(heads, kv_heads, tp, words):
    model = pr.models.Llama(layers=1, hidden=24, heads=heads, kv_heads=kv_heads, vocab=11, seq_len=8)

    def run(world):
        refused(pr.InvalidArgument, words, lambda: train(world, tp=tp, lanes=tp, model=model))

    run_ranks(tp, run)


def test_o_tp_04_query_heads_that_kv_heads_do_not_divide():
    refused(
        pr.InvalidArgument,
        ["heads=4", "kv_heads=3"],
        lambda: pr.models.Llama(layers=1, hidden=16, heads=4, kv_heads=3, vocab=11, seq_len=8),
    )


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_o_tp_05_vocabulary_that_does_not_divide(tp):
    model = pr.models.GPT(layers=1, hidden=12, heads=12, mlp_hidden=12, vocab=11, seq_len=12, tied=False)
    own = compared(model, tp)
    assert own["lm_head.weight"].shape == own["wte.weight"].shape == (11, 12)

    def with_zeros(world):
        trainer = pr.Trainer(model, pr.Mesh(world, tp=tp), optimizer=pr.AdamW(lr=0.0), global_batch=4)
        trainer.set_parameter("lm_head.weight", np.zeros((11, 12), dtype=np.float32))
        tokens, targets = batches(1, 4, model)[0]
        targets[:, 0] = 10
        assert trainer.num_parameters == sum(trainer.parameter(n).size for n in trainer.parameter_names())
        return trainer.step(tokens, targets).loss

    assert run_ranks(tp, with_zeros) == [pytest.approx(np.log(11), rel=1e-6)] * tp


RULES = [pr.LAMB(lr=0.1, weight_decay=0.1), pr.SGD(lr=0.1, momentum=0.9), pr.Muon(lr=0.01, weight_decay=0.1)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_other_optimizers(rule):
    """LAMB takes norms of whole parameters, of which tp has parts, and Muon orthogonalizes whole ones."""
    expected = many(1, rule=rule)
    [(loss, *_), *_], *_ = expected
    [(other, *_), *_], *_ = many(1, rule=rule, lanes=1)
    assert float.fromhex(loss) == pytest.approx(float.fromhex(other), rel=1e-5)
    for ranks, options in (
        (2, dict(tp=2)),
        (4, dict(tp=4)),
        (8, dict(tp=2, pp=2, zero=pr.Zero(stage=1, bucket_bytes=4096))),
        (4, dict(tp=2, zero=3)),
    ):
        assert many(ranks, rule=rule, **options) == expected
    assert many(2, tp=2, rule=rule, executor="deferred") == expected


def test_gradients_communicated_in_16_bits_and_state_in_host_memory():
    precision = pr.Precision(dtype="bf16", gradients="bf16")
    expected = one_rank(precision=precision)
    for ranks, options in (
        (4, dict(tp=2)),
        (4, dict(tp=2, pp=2)),
        (8, dict(tp=2, zero=pr.Zero(stage=2, offload=True))),
        (8, dict(tp=2, pp=2, zero=pr.Zero(stage=3, gather="step"))),
        (8, dict(tp=4, zero=pr.Zero(stage=3, persist_below=20))),
    ):
        assert many(ranks, precision=precision, **options) == expected


@pytest.mark.parametrize("tp, pp", [(2, 1), (2, 2)])
def test_a_number_that_is_not_finite_names_its_parameter_on_all_ranks(tp, pp):
    def run(world):
        trainer = pr.Trainer(GPT, pr.Mesh(world, tp=tp, pp=pp), optimizer=pr.SGD(lr=0.1), global_batch=4)
        weight = trainer.parameter("h.1.mlp.proj.weight")
        weight[0, -1] = np.nan  # of the last lane
        trainer.set_parameter("h.1.mlp.proj.weight", weight)
        refused(pr.NumericError, ["'h.1.mlp.proj.weight'"], lambda: trainer.step(*batches(1, 4, GPT)[0]))

    run_ranks(tp * pp, run)


def test_ranks_that_see_other_samples_are_told():
    def run(world):
        trainer = pr.Trainer(GPT, pr.Mesh(world, tp=2), optimizer=pr.SGD(lr=0.1), global_batch=4)
        refused(
            pr.InvalidArgument,
            ["tp rank", "another batch"],
            lambda: trainer.step(*batches(2, 4, GPT)[world.rank]),
        )

    run_ranks(2, run)


def test_evaluation_and_frozen_parameters(tmp_path):
    random = np.random.default_rng(3)
    path = token_file(tmp_path, random.integers(0, GPT.vocab, 9 * GPT.seq_len + 1), GPT.vocab)

    def run(world, tp, pp=1, **options):
        data = pr.data.TokenDataset(path, seq_len=GPT.seq_len)
        mesh = pr.Mesh(world, tp=tp, pp=pp)
        options.update(lanes=pr.Lanes(dp=2, tp=4), frozen=["wpe.*", "h.0.*"])
        trainer = pr.Trainer(GPT, mesh, optimizer=pr.Lion(lr=1e-2), global_batch=4, **options)
        count = 4 // mesh.size("dp")
        part = slice(mesh.coordinate("dp") * count, (mesh.coordinate("dp") + 1) * count)
        tokens, targets = batches(1, 4, GPT)[0]
        losses = [trainer.step(tokens[part], targets[part]).loss, trainer.evaluate(data, num_samples=5)]
        return losses, [trainer.parameter(name).tobytes() for name in trainer.parameter_names()]

    expected = run_ranks(1, lambda world: run(world, 1))[0]
    for ranks, *layout in ((2, 2), (4, 2), (4, 2, 2), (4, 4)):
        assert run_ranks(ranks, lambda world, layout=layout: run(world, *layout)) == [expected] * ranks


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_checkpoints_go_from_any_layout_to_any(name, tmp_path):
    model = MODELS[name]
    data = batches(2, 8, model)

    def run(world, folder, dp, tp, pp, zero, steps):
        mesh = pr.Mesh(world, dp=dp, tp=tp, pp=pp)
        options = dict(global_batch=8, micro_batch=2, lanes=pr.Lanes(dp=2, tp=4), zero=zero)
        trainer = pr.Trainer(model, mesh, optimizer=pr.AdamW(lr=1e-2, eps=1e-4), **options)
        with pr.Checkpointer(folder) as checkpoints:
            trainer.resume(checkpoints)
            count = 8 // dp
            part = slice(mesh.coordinate("dp") * count, (mesh.coordinate("dp") + 1) * count)
            for tokens, targets in data[trainer.applied_steps : steps]:
                trainer.step(tokens[part], targets[part])
            if steps == 1:
                checkpoints.save(trainer, step=1)
        return fingerprint(trainer)

    expected = run_ranks(1, lambda world: run(world, tmp_path / "none", 1, 1, 1, 0, 2))[0]
    layouts = [(1, 1, 1, 0), (2, 2, 1, 3), (1, 2, 2, 0), (1, 4, 1, 0)][: 4 if name == "gpt" else 2]
    for index, first in enumerate(layouts):
        folder = tmp_path / str(index)
        run_ranks(math.prod(first[:3]), lambda world, first=first, to=folder: run(world, to, *first, 1))
        for second in layouts[index:] if index else layouts:
            results = run_ranks(
                math.prod(second[:3]), lambda world, second=second, to=folder: run(world, to, *second, 2)
            )
            assert results == [expected] * len(results), (first, second)


SCRIPT = """
import os, signal, threading
import polyreme as pr
from helpers import batches

world = pr.init(init_timeout_s=20, timeout_s=20)
model = pr.models.GPT(layers=4, hidden=64, heads=4, vocab=64, seq_len=64)
trainer = pr.Trainer(model, pr.Mesh(world, tp=2, pp=2), optimizer=pr.SGD(lr=0.1), global_batch=4)
data = batches(1, 4, model)[0]
trainer.step(*data)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which ends the others: let them speak first
if world.rank == 1:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
try:
    while True:
        trainer.step(*data)
except pr.errors.PeerLost as error:
    print("SAW", world.rank, error, flush=True)
    raise
"""


@pytest.mark.mp
def test_a_rank_that_is_killed_is_named_by_all_others(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = polyreme("run", "-n", 4, path)
    assert done.returncode != 0
    seen = [line for line in done.stdout.splitlines() if "SAW" in line]
    assert len(seen) == 3, done.stdout + done.stderr
    assert all("rank 1" in line for line in seen), seen
