"""Training as a user sees it: the loss falls, counts are right, seeds and delays do what they should."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import numpy as np
import polyreme as pr
import pytest
from helpers import TINY, alone, batches, fingerprint, local_part, make_trainer, token_file, train
from polyreme import _core
from polyreme.data.token_file import write_tokens
from polyreme.testing import run_ranks

MODEL = pr.models.GPT(**TINY)
IGNORED = -100

# ---- real text ----


@pytest.fixture(scope="module")
def text(corpus):
    """(training, validation) samples of real text."""
    return pr.data.TokenDataset(corpus, seq_len=32).split(validation=0.1)


def text_trainer(world, **options):
    model = pr.models.GPT(layers=2, hidden=32, heads=4, vocab=257, seq_len=32)
    schedule = pr.lr.warmup_cosine(peak=1e-2, warmup=5, total=40)
    options = dict(global_batch=16, micro_batch=4, clip_norm=1.0, seed=1, lanes=pr.Lanes(dp=4), **options)
    return make_trainer(world, model, optimizer=pr.AdamW(lr=schedule, weight_decay=0.1), **options)


@pytest.fixture(scope="module")
def text_run(world, text):
    """The stats of 40 steps of one rank on real text, and its trainer."""
    trainer = text_trainer(world)
    train_data, validation = text
    options = dict(steps=40, validation=validation, validate_every=15, validation_samples=24)
    return list(trainer.fit(train_data, **options)), trainer


def test_the_loss_falls_on_real_text(text_run):
    losses = [stats.loss for stats in text_run[0]]
    assert losses[0] == pytest.approx(np.log(257), abs=0.2)
    assert np.mean(losses[-5:]) < losses[0] - 1.5


def test_fit_reports_every_step(text_run):
    history, trainer = text_run
    assert [stats.step for stats in history] == list(range(1, 41))
    for stats in history:
        assert stats.tokens == stats.valid_tokens == 16 * 32
        assert 0 < stats.grad_norm < 100
        assert stats.seconds > 0
        assert stats.tokens_per_s == stats.tokens / stats.seconds
        assert stats.mfu is None
        assert stats.lr == trainer.optimizer.lr_at(stats.step)


def test_fit_validates_where_asked_and_at_the_end(world, text_run, text):
    history, trainer = text_run
    assert [stats.step for stats in history if stats.validation_loss is not None] == [15, 30, 40]
    assert history[-1].validation_loss == trainer.evaluate(text[1], num_samples=24)
    assert history[-1].validation_loss < text_trainer(world).evaluate(text[1], num_samples=24) - 1.5


@pytest.mark.parametrize("validate_every, expected", [(0, [3]), (2, [2, 3]), (3, [3])])
def test_validation_after_the_last_step(world, text, validate_every, expected):
    trainer = text_trainer(world)
    options = dict(steps=3, validation=text[1], validate_every=validate_every, validation_samples=4)
    history = trainer.fit(text[0], **options)
    assert [stats.step for stats in history if stats.validation_loss is not None] == expected


def test_validation_is_the_same_on_two_ranks(text_run, text):
    def curve(history):
        return [(stats.loss, stats.validation_loss) for stats in history]

    def run(world):
        options = dict(steps=15, validation=text[1], validation_samples=24)
        return curve(text_trainer(world).fit(text[0], **options))

    assert run_ranks(2, run) == [curve(text_run[0][:15])] * 2


@pytest.mark.parametrize("size, num_samples", [(2, 5), (4, 3)])
def test_evaluation_with_an_uneven_number_of_samples(world, text, size, num_samples):
    expected = text_trainer(world).evaluate(text[1], num_samples=num_samples)
    found = run_ranks(size, lambda each: text_trainer(each).evaluate(text[1], num_samples=num_samples))
    assert found == [expected] * size


def test_mfu_is_measured_against_the_peak(world):
    trainer = make_trainer(world)
    trainer.peak_flops = 1e12
    stats = trainer.step(*batches(1, 8, MODEL)[0])
    assert stats.mfu == pytest.approx(MODEL.flops_per_token() * stats.tokens_per_s / 1e12, rel=1e-12)


def test_the_peak_is_the_sum_over_ranks():
    def run(world):
        return pr.measure_peak_flops(pr.Mesh(world), MODEL, micro_batch=2)

    first, second = run_ranks(2, run)
    assert first == second > 0


# ---- the token mean over the whole global batch ----


def token_losses(trainer, tokens, targets):
    """-log p of every target in float64, 0 where it is ignored."""
    scores = trainer.logits(tokens).astype(np.float64)
    top = scores.max(axis=-1, keepdims=True)
    log_sum = top[..., 0] + np.log(np.exp(scores - top).sum(axis=-1))
    chosen = np.take_along_axis(scores, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return np.where(targets == IGNORED, 0.0, log_sum - chosen)


def keep(targets, counts):
    """Only the first counts[i] targets of sample i count."""
    result = targets.copy()
    for sample, count in enumerate(counts):
        result[sample, count:] = IGNORED
    return result


def one_step(size, tokens, targets, *, optimizer=None, model=MODEL, **options):
    """One step on `size` ranks: loss, norm, gradients and weights of rank 0; all ranks must agree."""

    def run(world):
        trainer = make_trainer(
            world, model, optimizer=optimizer or pr.SGD(lr=0.1), global_batch=len(tokens), **options
        )
        stats = trainer.step(local_part(world, tokens), local_part(world, targets))
        names = trainer.parameter_names()
        gradients = {name: trainer.gradient(name) for name in names}
        return stats, gradients, {name: trainer.parameter(name) for name in names}

    results = run_ranks(size, run)
    for stats, gradients, weights in results[1:]:
        assert (stats.loss, stats.grad_norm) == (results[0][0].loss, results[0][0].grad_norm)
        assert equal(gradients, results[0][1])
        assert equal(weights, results[0][2])
    return results[0]


def equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def token_mean_gradient(tokens, targets, counts):
    """What the definition says: the gradients of single samples, weighted by their valid tokens."""
    total = {}
    for sample, count in enumerate(counts):
        if count:
            part = slice(sample, sample + 1)
            for name, gradient in one_step(1, tokens[part], targets[part])[1].items():
                total[name] = total.get(name, 0) + gradient.astype(np.float64) * count
    return {name: value / sum(counts) for name, value in total.items()}


# O-GA-01: three tokens and one. O-GA-02: 5 and 1 on rank 0, 2 and none on rank 1; and swapped.
COUNTS = {
    "o_ga_01": (3, 1),
    "o_ga_02": (5, 1, 2, 0),
    "o_ga_02_swapped": (2, 0, 5, 1),
    "o_ga_04": (24, 1, 7, 3, 0, 24, 2, 11),
}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", COUNTS)
def test_o_ga_01_02_loss_and_gradient_are_the_token_mean_on_every_layout(world, name, zero):
    counts = COUNTS[name]
    tokens, targets = batches(1, len(counts), MODEL, seed=8)[0]
    targets = keep(targets, counts)
    losses = token_losses(make_trainer(world, global_batch=len(counts)), tokens, targets)
    expected_loss = losses.sum() / sum(counts)
    mean_of_means = np.mean([row.sum() / count for row, count in zip(losses, counts, strict=True) if count])
    assert abs(mean_of_means - expected_loss) > 1e-3
    expected_gradient = token_mean_gradient(tokens, targets, counts)
    seen = set()
    for dp in (1, 2, 4):
        if len(counts) % dp:
            continue
        for micro_batch in (1, 2, len(counts)):
            options = dict(micro_batch=micro_batch, lanes=pr.Lanes(dp=min(4, len(counts))), zero=zero)
            stats, gradients, _ = one_step(dp, tokens, targets, **options)
            assert stats.loss == pytest.approx(expected_loss, rel=1e-6)
            assert stats.tokens == tokens.size
            assert stats.valid_tokens == sum(counts)
            for parameter, gradient in gradients.items():
                error = np.linalg.norm(gradient - expected_gradient[parameter])
                assert error <= 2e-6 * np.linalg.norm(expected_gradient[parameter]) + 1e-9, parameter
            seen.add((stats.loss, stats.grad_norm))
    assert len(seen) == 1  # the same bits, too


def test_o_ga_01_lanes_change_the_mean_by_rounding_only():
    counts = COUNTS["o_ga_04"]
    tokens, targets = batches(1, len(counts), MODEL, seed=8)[0]
    norms = [
        one_step(1, tokens, keep(targets, counts), lanes=pr.Lanes(dp=lanes))[0].grad_norm
        for lanes in (1, 2, 8)
    ]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("zero", [0, 1])
def test_o_ga_03_a_rank_whose_targets_are_all_ignored(zero):
    tokens, targets = batches(1, 8, MODEL, seed=4)[0]
    masked = keep(targets, [24] * 4 + [0] * 4)
    stats, gradients, weights = one_step(2, tokens, masked, lanes=pr.Lanes(dp=2), zero=zero)
    alone_stats, alone_gradients, alone_weights = one_step(1, tokens[:4], targets[:4])
    assert (stats.loss, stats.grad_norm) == (alone_stats.loss, alone_stats.grad_norm)
    assert equal(gradients, alone_gradients)
    assert equal(weights, alone_weights)


@pytest.mark.parametrize("optimizer", [pr.SGD(lr=0.1), pr.AdamW(lr=0.1, weight_decay=0.1)])
@pytest.mark.parametrize("size, zero", [(1, 0), (2, 0), (2, 1)])
def test_o_ga_03_a_step_without_a_valid_token_changes_nothing(size, zero, optimizer):
    data = batches(3, 8, MODEL, seed=4)

    def run(world):
        options = dict(optimizer=optimizer, lanes=pr.Lanes(dp=2), zero=zero)
        trainer, other = make_trainer(world, **options), make_trainer(world, **options)
        first, second, third = ([local_part(world, array) for array in batch] for batch in data)
        trainer.step(*first)
        before = {name: trainer.parameter(name) for name in trainer.parameter_names()}
        stats = trainer.step(second[0], np.full_like(second[1], IGNORED))
        assert (stats.loss, stats.grad_norm, stats.valid_tokens, stats.step) == (0.0, 0.0, 0, 1)
        assert (stats.skipped, stats.not_finite, trainer.skipped_steps) == (True, "", 1)
        assert not any([trainer.gradient(name).any() for name in before])  # a list: reading is collective
        assert equal(before, {name: trainer.parameter(name) for name in before})
        other.step(*first)
        assert trainer.step(*third).loss == other.step(*third).loss
        assert equal(*({name: each.parameter(name) for name in before} for each in (trainer, other)))
        return trainer.applied_steps

    assert run_ranks(size, run) == [2] * size


# ---- random numbers ----


def test_o_rn_01_recomputation_has_the_same_masks():
    data = batches(5, 8, MODEL)
    runs = []
    for recompute in (False, True):
        model = pr.models.GPT(**TINY, dropout=0.5, recompute=recompute)
        runs.append(run_ranks(2, lambda world, model=model: train(world, data, model, lanes=pr.Lanes(dp=2))))
    assert runs[0] == runs[1]
    assert runs[0] != run_ranks(2, lambda world: train(world, data, MODEL, lanes=pr.Lanes(dp=2)))


def test_o_rn_02_samples_of_different_ranks_have_different_masks():
    """Eight equal samples: under dropout each has a loss of its own, whatever rank it is on."""
    tokens, targets = (np.repeat(array[:1], 8, axis=0) for array in batches(1, 8, MODEL)[0])
    for dropout, different in ((0.0, 1), (0.5, 8)):
        model = pr.models.GPT(**TINY, dropout=dropout)
        losses = {dp: [] for dp in (1, 4)}
        for sample in range(8):
            masked = keep(targets, [24 * (i == sample) for i in range(8)])
            for dp, found in losses.items():
                found.append(one_step(dp, tokens, masked, model=model, lanes=pr.Lanes(dp=4))[0].loss)
        assert losses[1] == losses[4]
        assert len(set(losses[1])) == different


def test_o_rn_02_every_step_has_its_own_masks(world):
    model = pr.models.GPT(**TINY, dropout=0.5)
    trainer = make_trainer(world, model, optimizer=pr.SGD(lr=0.0))
    batch = batches(1, 8, MODEL)[0]
    assert len({trainer.step(*batch).loss for _ in range(3)}) == 3


@pytest.mark.parametrize("tied", [True, False])
def test_o_rn_03_04_initial_weights_do_not_depend_on_ranks_nor_on_other_generators(tied):
    model = pr.models.GPT(**TINY, tied=tied)

    def run(world):
        np.random.seed(world.rank)
        random.seed(world.rank)
        return fingerprint(make_trainer(world, model, seed=5))

    expected = fingerprint(make_trainer(alone(), model, seed=5))
    for size in (1, 2, 4):
        assert run_ranks(size, run) == [expected] * size
    assert fingerprint(make_trainer(alone(), model, seed=6)) != expected


# ---- delays and threads ----


def delayed_run(size, seed):
    """20 steps with clipping; every rank comes a little late at some of them."""
    data = batches(20, 8, MODEL, ignored=0.1)

    def run(world):
        pause = random.Random(100 * seed + world.rank)
        trainer = make_trainer(world, clip_norm=0.5, lanes=pr.Lanes(dp=4), micro_batch=2)
        history = []
        for tokens, targets in data:
            time.sleep(pause.choice([0, 0, 0.005]))
            stats = trainer.step(local_part(world, tokens), local_part(world, targets))
            history.append((stats.loss.hex(), stats.grad_norm.hex()))
        return history, fingerprint(trainer)

    results = run_ranks(size, run)
    assert all(result == results[0] for result in results)
    return results[0]


def test_o_dt_01_delays_and_layouts_do_not_change_the_bits():
    expected = delayed_run(1, 0)
    assert len(expected[0]) == 20
    for size in (1, 2, 4):
        for seed in (1, 2):
            assert delayed_run(size, seed) == expected


@pytest.mark.torch
def test_o_dt_01_twenty_steps_are_those_of_float64():
    import reference
    from reference import torch

    data = batches(20, 8, MODEL, ignored=0.1)
    trainer = make_trainer(alone(), clip_norm=0.5)
    params = reference.parameters(trainer, torch.float64)
    decayed = {spec["name"] for spec in MODEL.param_specs() if spec["weight_decay"]}
    groups = [
        {"params": [p for n, p in params.items() if (n in decayed) == chosen], "weight_decay": 0.1 * chosen}
        for chosen in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)
    for tokens, targets in data:
        stats = trainer.step(tokens, targets)
        optimizer.zero_grad()
        loss = reference.loss(params, MODEL, tokens, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        optimizer.step()
        assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)


def wait_in_step(world, trainer):
    trainer.step(*(local_part(world, array) for array in batches(1, 8, MODEL)[0]))


def wait_in_barrier(world, trainer):
    world.barrier()


def wait_in_all_reduce(world, trainer):
    trainer.mesh["dp"].all_reduce(np.ones(1000, np.float32))


def wait_in_mesh(world, trainer):
    pr.Mesh(world)


@pytest.mark.parametrize("wait", [wait_in_step, wait_in_barrier, wait_in_all_reduce, wait_in_mesh])
def test_o_fl_06_waiting_releases_the_gil(wait):
    """Rank 1 comes 1 s late; meanwhile a thread that counts every 20 ms must be able to run."""
    counts = []

    def run(world):
        trainer = make_trainer(world)
        world.barrier()
        if world.rank == 1:
            time.sleep(1)
            wait(world, trainer)
            return
        done = threading.Event()

        def count():
            while not done.wait(0.02):
                counts.append(time.monotonic())

        counter = threading.Thread(target=count)
        counter.start()
        wait(world, trainer)
        done.set()
        counter.join()

    run_ranks(2, run)
    assert len(counts) >= 10


def test_objects_may_go_in_any_order():
    """A trainer keeps its mesh and world alive."""
    trainer = make_trainer(alone())
    assert trainer.step(*batches(1, 8, MODEL)[0]).step == 1
    core = _core.Mesh(alone()._core, _core.MeshLayout([("dp", 1)], ["localhost"], "launch"), [])
    assert core.members(["dp"]) == [0]


@pytest.mark.parametrize(
    "bad",
    ["a token outside the vocabulary", "another length", "targets of another shape", "ragged", "no memory"],
)
def test_a_bad_batch_on_one_rank_is_refused_on_all_and_training_goes_on(bad):
    model = pr.models.GPT(**TINY)
    tokens, targets = batches(1, 4, model)[0]

    def run(world):
        trainer = make_trainer(world, model, global_batch=4)
        before = fingerprint(trainer)
        mine, wanted = local_part(world, tokens).copy(), local_part(world, targets)
        if world.rank == 1 and bad == "another length":
            mine, wanted = mine[:, :5], wanted[:, :5]
        elif world.rank == 1 and bad == "targets of another shape":
            wanted = wanted[:, :5]
        elif world.rank == 1 and bad == "ragged":
            mine = [[1, 2], [3]]
        elif world.rank == 1 and bad == "no memory":
            mine = pytest.importorskip("torch").ones(mine.shape, dtype=int, device="meta")
        elif world.rank == 1:
            mine[0, 0] = model.vocab
        with pytest.raises(pr.InvalidArgument) as caught:
            trainer.step(mine, wanted)
        assert fingerprint(trainer) == before
        return str(caught.value), trainer.step(local_part(world, tokens), local_part(world, targets)).loss

    texts, losses = zip(*run_ranks(2, run), strict=True)
    assert losses[0] == losses[1]
    if bad == "another length":
        assert all("seq_len" in text for text in texts)
    elif bad != "a token outside the vocabulary":
        assert "rank 1 refused this call" in texts[0]
        assert any(part in texts[1] for part in ("they must be equal", "cannot be read as an array"))
    else:
        assert "rank 1 refused this call" in texts[0]
        assert f"token {model.vocab}" in texts[1]


def test_a_call_beside_a_step_is_refused_and_does_not_disturb_it():
    model = pr.models.GPT(**TINY)
    batch = batches(1, 4, model)[0]
    expected = run_ranks(
        1, lambda world: [t.step(*batch).loss for t in [make_trainer(world, model, global_batch=4)] * 30]
    )[0]

    def run(world):
        trainer, ended, refusals = make_trainer(world, model, global_batch=4), threading.Event(), []

        def look():
            while not ended.is_set():
                try:
                    trainer.logits(batch[0][:1])
                except pr.InvalidArgument as error:
                    refusals.append(str(error))
                time.sleep(1e-4)  # or the steps would hardly ever find it outside

        thread = threading.Thread(target=look)
        thread.start()
        losses = []
        try:
            while len(losses) < 30 or not refusals:
                with contextlib.suppress(pr.InvalidArgument):
                    losses.append(trainer.step(*batch).loss)
        finally:
            ended.set()
            thread.join()
        return losses[:30], refusals[0]

    losses, refusal = run_ranks(1, run)[0]
    assert losses == expected
    assert "inside of step" in refusal
    assert "from one thread" in refusal


def test_a_layer_cannot_call_its_trainer():
    refusals = []

    class Identity(pr.layers.Layer):
        def forward(self, call):
            with pytest.raises(pr.InvalidArgument) as caught:
                trainer.step(*batch)
            refusals.append(str(caught.value))
            return call.x

        def backward_input(self, call):
            return call.dy

    model = pr.models.GPT(**TINY, replace={"h.0.mlp.gelu": Identity()})
    batch = batches(1, 4, model)[0]
    trainer = make_trainer(alone(), model, global_batch=4)
    assert trainer.step(*batch).step == 1
    assert "inside of step" in refusals[0]
    assert "around this call" in refusals[0]


@pytest.mark.parametrize("fits", [False, True])
def test_a_learning_rate_that_fails_on_one_rank_is_told(tmp_path, fits):
    model = pr.models.GPT(**TINY)
    tokens, targets = batches(1, 4, model)[0]
    data = pr.data.TokenDataset(
        token_file(tmp_path, np.arange(300) % model.vocab, model.vocab), seq_len=model.seq_len
    )

    def run(world):
        def rate(step):
            if world.rank == 1 and step == 2:
                raise ZeroDivisionError("mine")
            return 1e-3

        trainer = make_trainer(world, model, global_batch=4, optimizer=pr.AdamW(lr=rate))
        steps = trainer.fit(data, steps=3)
        if not fits:
            steps = (trainer.step(local_part(world, tokens), local_part(world, targets)) for _ in range(3))
        with pytest.raises((pr.InvalidArgument, ZeroDivisionError)) as caught:
            list(steps)
        assert trainer.applied_steps == 1
        return str(caught.value)

    first, second = run_ranks(2, run)
    assert "rank 1 refused this call" in first
    assert second == "mine"


# ---- ranks that do not mean the same ----


@pytest.mark.parametrize(
    "name, options",
    [
        ("seed", lambda rank: {"seed": rank}),
        ("clip_norm", lambda rank: {"clip_norm": 1.0 + rank}),
        ("lanes.dp", lambda rank: {"lanes": pr.Lanes(dp=2 + 2 * rank)}),
        ("zero", lambda rank: {"zero": rank}),
        ("optimizer", lambda rank: {"optimizer": pr.SGD(lr=0.1) if rank else pr.AdamW(lr=0.1)}),
        ("model", lambda rank: {"model": pr.models.GPT(**TINY, dropout=0.1 * rank)}),
    ],
)
def test_settings_that_differ_between_ranks_are_refused(name, options):
    def run(world):
        with pytest.raises(pr.InvalidArgument, match=f"rank {1 - world.rank} has another {name}"):
            make_trainer(world, **options(world.rank))

    run_ranks(2, run, timeout_s=10)


def test_a_learning_rate_that_differs_is_refused_and_nothing_moves():
    tokens, targets = batches(1, 8, MODEL)[0]

    def run(world):
        trainer = make_trainer(world, optimizer=pr.SGD(lr=0.1 * (1 + world.rank)))
        before = trainer.parameter("wte.weight")
        with pytest.raises(pr.InvalidArgument, match="another learning rate"):
            trainer.step(local_part(world, tokens), local_part(world, targets))
        assert np.array_equal(trainer.parameter("wte.weight"), before)

    run_ranks(2, run, timeout_s=10)


def test_data_that_differ_are_refused_also_by_evaluate(tmp_path):
    def run(world):
        path = tmp_path / f"{world.rank}.bin"
        write_tokens(path, [np.arange(2000 + 100 * world.rank) % MODEL.vocab], MODEL.vocab)
        data = pr.data.TokenDataset(path, seq_len=MODEL.seq_len)
        trainer = make_trainer(world)
        for call in (lambda: next(trainer.fit(data, steps=1)), lambda: trainer.evaluate(data, num_samples=4)):
            with pytest.raises(pr.InvalidArgument, match="another source of samples"):
                call()

    run_ranks(2, run, timeout_s=10)
