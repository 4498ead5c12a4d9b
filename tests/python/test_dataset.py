"""Samples of a token file, and their order in training: a pure function of (seed, position)."""

from __future__ import annotations

import numpy as np
import polyreme as pr
import pytest
from helpers import make_trainer, token_file
from polyreme import _core
from polyreme.testing import run_ranks

SEQ = 4


def counting(folder, num_tokens, vocab_size=None):
    """Token i is i."""
    return token_file(folder, np.arange(num_tokens), vocab_size or num_tokens)


@pytest.mark.parametrize("vocab_size", [1000, 1 << 20])
def test_samples_are_consecutive_and_targets_are_one_ahead(tmp_path, vocab_size):
    data = pr.data.TokenDataset(counting(tmp_path, 43, vocab_size), seq_len=SEQ)
    assert (len(data), data.num_samples, data.num_tokens, data.vocab_size) == (10, 10, 43, vocab_size)
    assert data.path.endswith("tokens.bin")
    for index, (tokens, targets) in enumerate(data):
        assert tokens.dtype == targets.dtype == np.int32
        assert tokens.tolist() == list(range(SEQ * index, SEQ * index + SEQ))
        assert targets.tolist() == (tokens + 1).tolist()
    assert index == 9


@pytest.mark.parametrize("num_tokens, num_samples", [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_a_rest_that_is_no_sample_is_left_out(tmp_path, num_tokens, num_samples):
    assert len(pr.data.TokenDataset(counting(tmp_path, num_tokens), seq_len=SEQ)) == num_samples


def test_indexing_is_that_of_a_sequence(tmp_path):
    data = pr.data.TokenDataset(counting(tmp_path, 13), seq_len=SEQ)
    np.testing.assert_array_equal(data[-1], data[2])
    np.testing.assert_array_equal(data[-3], data[0])
    for index in (3, -4, 100):
        with pytest.raises(IndexError, match=f"sample {index} of 3"):
            data[index]


def test_arrays_are_the_callers_own(tmp_path):
    data = pr.data.TokenDataset(counting(tmp_path, 13), seq_len=SEQ)
    data[0][0][:] = -1
    assert data[0][0].tolist() == [0, 1, 2, 3]


def test_split_holds_the_end_out(tmp_path):
    data = pr.data.TokenDataset(counting(tmp_path, 100), seq_len=SEQ)
    train, validation = data.split(validation=0.25)
    assert (train.num_tokens, validation.num_tokens) == (75, 25)
    assert (train.seq_len, train.vocab_size, train.path) == (SEQ, 100, data.path)
    assert train[-1][1].tolist() == [69, 70, 71, 72]
    assert validation[0][0].tolist() == [75, 76, 77, 78]
    again, rest = validation.split(validation=0.4)
    assert (again[0][0][0], rest[0][0][0]) == (75, 90)


def test_the_mapping_outlives_its_dataset_and_its_file(tmp_path):
    path = counting(tmp_path, 100)
    validation = pr.data.TokenDataset(path, seq_len=SEQ).split(validation=0.25)[1]
    path.unlink()
    assert validation[0][0].tolist() == [75, 76, 77, 78]


# ---- order ----


@pytest.mark.parametrize("num_samples", [1, 2, 3, 50, 257, 1024])
def test_every_epoch_is_a_permutation(num_samples):
    order = _core.SampleOrder(num_samples, seed=7, shuffle=True)
    for epoch in range(3):
        first = epoch * num_samples
        assert sorted(order(first + i) for i in range(num_samples)) == list(range(num_samples))


def test_epochs_and_seeds_differ():
    epochs = [
        [_core.SampleOrder(50, seed, True)(50 * epoch + i) for i in range(50)]
        for seed in (0, 1)
        for epoch in range(3)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_without_shuffling_the_order_is_that_of_the_file():
    order = _core.SampleOrder(5, 0, False)
    assert [order(i) for i in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


MODEL = pr.models.GPT(layers=1, hidden=8, heads=1, vocab=401, seq_len=8)


@pytest.fixture
def fifty(tmp_path):
    """50 samples."""
    return pr.data.TokenDataset(counting(tmp_path, 401), seq_len=8)


def losses(world, data, *, steps, stop=None, seed=3):
    """Exact losses of training, in two pieces if `stop` is given."""
    trainer = make_trainer(world, MODEL, global_batch=4, lanes=pr.Lanes(dp=4), seed=seed)
    found = [stats.loss for stats in trainer.fit(data, steps=stop or 0)]
    return found + [stats.loss for stats in trainer.fit(data, steps=steps)]


def losses_by_hand(world, data, *, steps, seed=3):
    """The same, fed sample by sample in the order that a user computes."""
    trainer = make_trainer(world, MODEL, global_batch=4, lanes=pr.Lanes(dp=4), seed=seed)
    order = _core.SampleOrder(len(data), seed, True)
    found = []
    for step in range(steps):
        batch = [data[order(4 * step + i)] for i in range(4)]
        found.append(trainer.step(*(np.stack(arrays) for arrays in zip(*batch, strict=True))).loss)
    return found


def test_o_dl_05_ranks_share_one_order_over_three_epochs(world, fifty):
    """50 samples in 38 steps of 4: the batches cross the borders of the epochs."""
    expected = losses_by_hand(world, fifty, steps=38)
    assert losses(world, fifty, steps=38) == expected
    for dp in (2, 4):
        for _ in range(2):
            assert run_ranks(dp, lambda each: losses(each, fifty, steps=38)) == [expected] * dp


def test_another_seed_is_another_order(world, fifty):
    assert losses(world, fifty, steps=2, seed=3) != losses(world, fifty, steps=2, seed=4)


@pytest.mark.parametrize("stop", [1, 5])
def test_fit_goes_on_at_its_position(world, fifty, stop):
    assert losses(world, fifty, steps=8, stop=stop) == losses(world, fifty, steps=8)


def test_fit_left_early_goes_on_after_the_last_step(world, fifty):
    trainer = make_trainer(world, MODEL, global_batch=4, lanes=pr.Lanes(dp=4), seed=3)
    found = []
    for stats in trainer.fit(fifty, steps=8):
        found.append(stats.loss)
        if stats.step == 3:
            break
    found += [stats.loss for stats in trainer.fit(fifty, steps=8)]
    assert found == losses(world, fifty, steps=8)
    assert list(trainer.fit(fifty, steps=8)) == []
