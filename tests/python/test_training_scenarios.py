"""Reported faults of training over dp and pp, with their right values; each test is named after its case."""

from __future__ import annotations

import functools
import logging

import numpy as np
import polyreme as pr
import pytest
from helpers import batches, fingerprint, local_part, make_trainer, refused, token_file
from polyreme.checkpoint import complete_steps
from polyreme.testing import run_ranks

TINY_LM = dict(layers=4, hidden=16, heads=4, vocab=11, seq_len=8)
MODEL = pr.models.GPT(**TINY_LM)
UNTIED = pr.models.GPT(**TINY_LM, tied=False)
ADAMW = pr.AdamW(lr=1e-3, eps=1e-4, weight_decay=0.1)


def trainer_of(world, *, model=MODEL, pp=1, tp=1, **options):
    options = {"global_batch": 8, "lanes": pr.Lanes(dp=4), "optimizer": ADAMW, "clip_norm": 1.0, **options}
    return pr.Trainer(model, pr.Mesh(world, pp=pp, tp=tp), **options)


def step(trainer, batch):
    """One step on this rank's part of a global batch."""
    dp, place = trainer.mesh.size("dp"), trainer.mesh.coordinate("dp")
    count = len(batch[0]) // dp
    return trainer.step(*(part[place * count : (place + 1) * count] for part in batch))


def weights_of(trainer):
    return {name: trainer.parameter(name).tobytes() for name in trainer.parameter_names()}


def trained(ranks, steps, **options):
    """After every step: loss, norm and all weights. The same on all ranks."""
    data = batches(steps, 8, options.get("model", MODEL), ignored=0.2)

    def run(world):
        trainer = trainer_of(world, **options)
        history = []
        for batch in data:
            stats = step(trainer, batch)
            history.append((stats.loss.hex(), stats.grad_norm.hex(), weights_of(trainer)))
        return history

    results = run_ranks(ranks, run)
    assert all(result == results[0] for result in results), "ranks disagree"
    return results[0]


@functools.cache
def on_one_rank(steps, model=MODEL):
    return trained(1, steps, model=model)


def test_o_ga_07_a_pipeline_with_zero_and_four_micro_batches():
    options = dict(pp=2, zero=1, micro_batch=1, model=UNTIED)
    assert trained(4, 3, **options) == on_one_rank(3, UNTIED)


def test_rounded_gradients_and_offloaded_state_on_every_axis():
    options = dict(
        precision=pr.Precision(gradients="bf16"),
        lanes=pr.Lanes(dp=2, tp=2),
        zero=pr.Zero(stage=2, offload=True),
    )
    expected = trained(1, 2, **options)
    assert expected != trained(1, 2, **{**options, "precision": "fp32"}), "rounding must show"
    for ranks, axes in (
        (2, dict(tp=2)),
        (4, dict(tp=2)),
        (4, dict(pp=2, micro_batch=2)),
        (8, dict(pp=2, tp=2)),
    ):
        assert trained(ranks, 2, **options, **axes) == expected, (ranks, axes)


# ---- tied weights ----


@pytest.mark.parametrize("stage", [1, 2])
def test_o_tw_01_a_tied_scalar_of_two_stages(stage):
    """Contributions 1, 2 of the first stage and 10, 20 of the last, over two ranks of dp each."""

    def run(world):
        mesh = pr.Mesh(world, dp=2, pp=2)
        weight = np.zeros(1, np.float32)
        optimizer = pr.ShardedOptimizer({"tied": weight}, mesh["dp"], stage=stage, rule=pr.SGD(lr=1.0))
        grad = np.array([(1.0, 10.0)[mesh.coordinate("pp")] * (1 + mesh.coordinate("dp"))], np.float32)
        optimizer.step({"tied": mesh["pp"].all_reduce(grad)})
        return float(optimizer.gradient("tied")[0]), float(weight[0])

    assert run_ranks(4, run) == [(16.5, -16.5)] * 4


@pytest.mark.parametrize("zero", [1, 2])
def test_o_tw_01_a_tied_embedding_of_two_stages(zero):
    assert trained(4, 10, pp=2, zero=zero, micro_batch=1) == on_one_rank(10)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_o_tw_02_head_and_embedding_stay_one(tmp_path, pp, overlap):
    """The copies are compared by what they compute: logits of the head's stage, the embedding's gradient."""
    data = batches(20, 8, MODEL)

    def run(world, pp, folder):
        np.random.seed(world.rank)
        options = dict(pp=pp, zero=pr.Zero(overlap=overlap), micro_batch=2)
        trainer = trainer_of(world, **options)
        seen = [trainer.logits(data[0][0]).tobytes()]
        with pr.Checkpointer(folder) as checkpoints:
            for k, batch in enumerate(data):
                step(trainer, batch)
                seen.append(trainer.logits(data[0][0]).tobytes())
                if k == 9:
                    checkpoints.save(trainer)
                    trainer = trainer_of(world, **options)
                    trainer.resume(checkpoints, must_exist=True)
                    assert trainer.logits(data[0][0]).tobytes() == seen[-1]
        return seen, fingerprint(trainer)

    expected = run_ranks(1, lambda world: run(world, 1, tmp_path / "one"))[0]
    assert run_ranks(pp, lambda world: run(world, pp, tmp_path / "many")) == [expected] * pp


# ---- frozen parameters ----


@pytest.mark.parametrize(
    "frozen", [["h.0.*", "h.1.*", "wte.*", "wpe.*"], ["h.2.*", "h.3.*", "ln_f.*", "lm_head.*"]]
)
def test_o_uf_03_a_stage_without_trainable_parameters(tmp_path, frozen):
    data = batches(4, 8, UNTIED)

    def run(world, pp, folder, **options):
        options = dict(pp=pp, model=UNTIED, frozen=frozen, **options)
        trainer = trainer_of(world, **options)
        before = weights_of(trainer)
        norms = [step(trainer, batch).grad_norm.hex() for batch in data[:3]]
        after = weights_of(trainer)
        assert {name for name in before if before[name] != after[name]} == set(before) - trainer.frozen
        assert trainer.gradient(next(iter(set(before) - trainer.frozen))).any()
        refused(pr.InvalidArgument, ["frozen"], lambda: trainer.gradient(next(iter(trainer.frozen))))
        with pr.Checkpointer(folder) as checkpoints:
            checkpoints.save(trainer)
            trainer = trainer_of(world, **options)
            trainer.resume(checkpoints, must_exist=True)
        assert weights_of(trainer) == after
        norms.append(step(trainer, data[3]).grad_norm.hex())
        return norms, weights_of(trainer)

    expected = run_ranks(1, lambda world: run(world, 1, tmp_path / "one"))[0]
    for zero in (1, 3):
        many = run_ranks(4, lambda world, z=zero: run(world, 2, tmp_path / f"many{z}", zero=z, split=[2, 2]))
        assert many == [expected] * 4


@pytest.mark.parametrize("schedule", [pr.schedule.one_f_one_b(), pr.schedule.zb_v()])
def test_frozen_and_tied_over_two_stages(schedule):
    frozen = ["wte.*", "h.1.ln_1.*"]
    expected = trained(1, 2, frozen=frozen)
    assert trained(4, 2, frozen=frozen, pp=2, schedule=schedule, micro_batch=1, zero=2) == expected


# ---- random numbers ----


@pytest.mark.parametrize("loader_first", [True, False])
def test_o_rn_05_what_is_made_around_a_load_changes_no_mask(tmp_path, loader_first):
    model = pr.models.GPT(**TINY_LM, dropout=0.2)
    random = np.random.default_rng(0)
    path = token_file(tmp_path, random.integers(0, model.vocab, 60 * model.seq_len + 1), model.vocab)

    def stats_of(trainer, steps, **options):
        data = pr.data.TokenDataset(path, seq_len=model.seq_len)
        return [(s.loss.hex(), s.grad_norm.hex()) for s in trainer.fit(data, steps=steps, **options)]

    def run(world):
        whole = trainer_of(world, model=model)
        expected = stats_of(whole, 6)
        with pr.Checkpointer(tmp_path / "saved") as checkpoints:
            first = trainer_of(world, model=model)
            assert stats_of(first, 3, checkpoints=checkpoints) == expected[:3]
            trainer = trainer_of(world, model=model)
            data = pr.data.TokenDataset(path, seq_len=model.seq_len)
            if loader_first:
                rest = trainer.fit(data, steps=6)
                trainer.evaluate(data, num_samples=3)
                trainer.resume(checkpoints, must_exist=True)
            else:
                trainer.resume(checkpoints, must_exist=True)
                trainer.evaluate(data, num_samples=3)
                rest = trainer.fit(data, steps=6)
            assert [(s.loss.hex(), s.grad_norm.hex()) for s in rest] == expected[3:]
        assert fingerprint(trainer) == fingerprint(whole)

    run_ranks(2, run)


# ---- numbers that are not finite, ranks that differ ----


def test_f58_three_overflows_then_growth():
    """A scale that is too high for three steps backs off, and grows again; no update was lost but those."""
    scale = pr.LossScale(initial=2.0**24, interval=2, backoff=2.0**-4)
    data = batches(8, 8, MODEL)

    def run(world, size):
        options = dict(precision=pr.Precision(dtype="fp16", loss_scale=scale), zero=min(size, 2))
        trainer = trainer_of(world, **options)
        seen = []
        # As if the loss were as large as it takes for three overflows.
        weight = trainer.parameter("ln_f.weight")
        for k, batch in enumerate(data):
            if k < 3:
                trainer.set_parameter("ln_f.weight", np.full_like(weight, 6e4))
            before = weights_of(trainer)
            stats = step(trainer, batch)
            seen.append((stats.skipped, stats.loss_scale, stats.step))
            assert (weights_of(trainer) == before) == stats.skipped
            if k == 2:
                trainer.set_parameter("ln_f.weight", weight)
        return seen, fingerprint(trainer)

    expected = run_ranks(1, lambda world: run(world, 1))[0]
    skipped, scales, steps = zip(*expected[0], strict=True)
    assert skipped == (True,) * 3 + (False,) * 5
    assert scales == (2.0**24, 2.0**20, 2.0**16, 2.0**12, 2.0**12, 2.0**13, 2.0**13, 2.0**14)
    assert steps == (0, 0, 0, 1, 2, 3, 4, 5)
    assert run_ranks(2, lambda world: run(world, 2)) == [expected] * 2


def test_f58_so_many_in_a_row_are_an_error():
    def run(world):
        trainer = trainer_of(world, on_nonfinite=2)
        trainer.set_parameter("h.0.ln_1.weight", np.full(16, np.inf, np.float32))
        data = batches(3, 8, MODEL)
        assert [step(trainer, batch).skipped for batch in data[:2]] == [True, True]
        refused(
            pr.NumericError, ["2 skipped steps in a row", "h.0.ln_1.weight"], lambda: step(trainer, data[2])
        )

    run_ranks(2, run)


def test_f58_a_restart_goes_on_counting(tmp_path):
    def run(world):
        data = batches(4, 8, MODEL)
        for k, batch in enumerate(data):
            with pr.Checkpointer(tmp_path / "run") as checkpoints:
                trainer = trainer_of(world, on_nonfinite=2)
                if k == 0:
                    trainer.set_parameter("h.0.ln_1.weight", np.full(16, np.inf, np.float32))
                trainer.resume(checkpoints)
                if k == 2:
                    refused(pr.NumericError, ["2 skipped steps in a row"], lambda: step(trainer, batch))  # noqa: B023
                    return trainer.skipped_steps
                assert step(trainer, batch).skipped
                checkpoints.save(trainer, step=k)
        return None

    assert run_ranks(2, run) == [2, 2]


def test_f59_a_rank_with_another_loss_scale_is_named():
    def run(world):
        trainer = trainer_of(world, precision="fp16")
        step(trainer, batches(1, 8, MODEL)[0])
        if world.rank == 1:
            trainer._engine.loss_scaler_state = (64.0, 0, 1)
        refused(
            pr.InvalidArgument,
            ["dp rank", "another loss scale"],
            lambda: step(trainer, batches(1, 8, MODEL)[0]),
        )

    run_ranks(2, run)


def test_f60_what_differs_between_replicas_is_not_committed(tmp_path):
    def run(world):
        trainer = trainer_of(world)
        with pr.Checkpointer(tmp_path / "saved") as checkpoints:
            checkpoints.save(trainer)
            step(trainer, batches(1, 8, MODEL)[0])
            good = trainer.parameter("h.1.mlp.fc.weight")
            if world.rank == 1:
                bad = good.copy()
                bad.view(np.uint32)[0, 0] ^= 1
                trainer.set_parameter("h.1.mlp.fc.weight", bad)
            words = ["dp rank 1 has another", "'h.1.mlp.fc.weight'"]
            refused(pr.NumericError, words, lambda: checkpoints.save_async(trainer))
            checkpoints.wait()
            trainer.set_parameter("h.1.mlp.fc.weight", good)
            world.barrier()
            assert complete_steps(tmp_path / "saved") == [0]
            world.barrier()
            checkpoints.save(trainer)
        assert complete_steps(tmp_path / "saved") == [0, 1]

    run_ranks(2, run)


def test_f62_the_same_batch_on_two_ranks_is_told(caplog):
    data = batches(1, 8, MODEL)[0]

    def run(world, equal):
        trainer = make_trainer(world, MODEL)
        tokens, targets = (local_part(world, part) for part in data)
        if equal and world.rank == 2:
            tokens, targets = (part[2:4] for part in data)  # rank 1's
        for _ in range(2):
            trainer.step(tokens, targets)

    with caplog.at_level(logging.WARNING, "polyreme"):
        run_ranks(4, lambda world: run(world, False))
        assert not caplog.records
        run_ranks(4, lambda world: run(world, True))
    (record,) = caplog.records
    assert "same on dp ranks 1, 2:" in record.getMessage()
