"""Which samples a run sees after a stop, and loaders that end early or fail."""

from __future__ import annotations

import os

import numpy as np
import polyreme as pr
import pytest
from helpers import Ranks, batches, make_trainer, refused, token_file
from polyreme import _core
from polyreme.testing import run_ranks

MODEL = pr.models.GPT(layers=1, hidden=8, heads=1, vocab=401, seq_len=8)


def dataset(folder, num_samples):
    """Sample i begins with token 8 * i."""
    path = token_file(folder, np.arange(8 * num_samples + 1) % 401, 401)
    return pr.data.TokenDataset(path, seq_len=8)


def run(data, folder, ranks, *pieces, global_batch, every=None):
    """Losses of a training that is stopped and started again for each of `pieces`: steps up to which it goes."""
    found = []
    for steps in pieces:

        def body(world, steps=steps):
            trainer = make_trainer(world, MODEL, global_batch=global_batch, lanes=pr.Lanes(dp=2), seed=3)
            with pr.Checkpointer(folder, every=every) as checkpoints:
                trainer.resume(checkpoints)
                return [stats.loss for stats in trainer.fit(data, steps=steps, checkpoints=checkpoints)]

        found += run_ranks(ranks, body)[0]
    return found


def losses_of_ids(data, steps, global_batch):
    """The same, fed by the order of samples; and the ids of each step."""
    order = _core.SampleOrder(len(data), 3, True)
    ids = [[order(step * global_batch + i) for i in range(global_batch)] for step in range(steps)]

    def body(world):
        trainer = make_trainer(world, MODEL, global_batch=global_batch, lanes=pr.Lanes(dp=2), seed=3)
        return [
            trainer.step(*(np.stack(a) for a in zip(*(data[i] for i in own), strict=True))).loss
            for own in ids
        ]

    return run_ranks(1, body)[0], ids


def test_o_dl_01_epochs_after_a_resume_are_whole(tmp_path):
    """12 samples in epochs of 6 steps; stopped after 4, on to the end of epoch 2."""
    data = dataset(tmp_path, 12)
    expected, ids = losses_of_ids(data, 18, 2)
    for epoch in range(3):
        assert sorted(i for step in ids[6 * epoch : 6 * epoch + 6] for i in step) == list(range(12))
    assert run(data, tmp_path / "runs", 2, 4, 18, global_batch=2) == expected


def test_o_dl_02_the_next_sample_is_the_one_after_the_last(tmp_path):
    """Stopped after 3 batches of 40 samples, and after every one of the next: each sample once in an epoch."""
    data = dataset(tmp_path, 40)
    expected, ids = losses_of_ids(data, 10, 4)
    assert sorted(i for step in ids for i in step) == list(range(40))
    assert run(data, tmp_path / "runs", 2, 3, 4, 5, 10, global_batch=4) == expected


def test_o_dl_01_a_skipped_batch_is_not_taken_again(tmp_path):
    data = dataset(tmp_path, 40)
    _, ids = losses_of_ids(data, 3, 4)

    def trainer_of(world):
        return make_trainer(world, MODEL, global_batch=4, seed=3, on_nonfinite=2)

    def fitted(world):
        trainer = trainer_of(world)
        name = "h.0.ln_1.weight"
        weight = trainer.parameter(name)
        trainer.set_parameter(name, np.full_like(weight, np.nan))
        found = []
        for stats in trainer.fit(data, steps=2):
            if stats.skipped:
                trainer.set_parameter(name, weight)
            found.append((stats.skipped, stats.loss))
        return found

    def fed(world):
        trainer = trainer_of(world)
        parts = [[np.stack(a) for a in zip(*(data[i] for i in step), strict=True)] for step in ids[1:]]
        return [(False, trainer.step(*part).loss) for part in parts]

    skipped, *rest = run_ranks(1, fitted)[0]
    assert skipped[0]
    assert rest == run_ranks(1, fed)[0]


def test_o_dl_04_nobody_who_loads_is_part_of_the_state(tmp_path, monkeypatch):
    """There are no workers to count: samples come from the file itself. Ranks and threads may change."""
    data = dataset(tmp_path, 24)
    expected, _ = losses_of_ids(data, 6, 4)
    for number, (first, second) in enumerate([(2, 1), (1, 2)]):
        folder = tmp_path / str(number)
        found = run(data, folder, first, 3, global_batch=4)
        assert found + run(data, folder, second, 6, global_batch=4) == expected


@pytest.mark.parametrize("zero", [0, 3])
def test_o_dl_06_loaders_of_different_lengths(zero):
    """5 batches and 3: all ranks stop after 3; or the shorter one gives batches without targets."""
    own = batches(5, 4, MODEL)

    def body(world, lengths, pads):
        trainer = make_trainer(world, MODEL, global_batch=4, zero=zero)
        mine = slice(2 * world.rank, 2 * world.rank + 2)

        def loader():
            for step, (tokens, targets) in enumerate(own):
                if step < lengths[world.rank]:
                    yield tokens[mine], targets[mine]
                elif pads:
                    yield tokens[mine], np.full_like(targets[mine], -100)

        return [trainer.step(*batch).loss for batch in pr.data.together(loader(), world)]

    full = run_ranks(2, lambda world: body(world, (5, 5), False))
    for lengths in ((5, 3), (3, 5)):
        assert run_ranks(2, lambda world, lengths=lengths: body(world, lengths, False)) == [full[0][:3]] * 2
    padded = run_ranks(2, lambda world: body(world, (5, 3), True))

    def alone(world):
        """Steps 4 and 5 on the samples of rank 0."""
        trainer = make_trainer(world, MODEL, global_batch=4, lanes=pr.Lanes(dp=2), zero=zero)
        losses = []
        for step, (tokens, targets) in enumerate(own):
            part = targets.copy()
            part[2:] = part[2:] if step < 3 else -100
            losses.append(trainer.step(tokens, part).loss)
        return losses

    assert padded == [run_ranks(1, alone)[0]] * 2
    assert run_ranks(2, lambda world: list(pr.data.together([], world))) == [[], []]


def test_together_wants_a_world():
    refused(pr.InvalidArgument, ["world", "polyreme.init"], lambda: next(pr.data.together([1], None)))


LOADER = """
import polyreme as pr
import numpy as np
world = pr.init(num_threads=1, timeout_s=30, heartbeat_s=0.5, peer_timeout_s=3)
model = pr.models.GPT(layers=1, hidden=8, heads=1, vocab=11, seq_len=8)
trainer = pr.Trainer(model, pr.Mesh(world), optimizer=pr.SGD(lr=0.1), global_batch=2)
def loader():
    for step in range(100):
        if step == 3 and world.rank == 1:
            {end}
        yield np.zeros((1, 8), np.int32), np.zeros((1, 8), np.int32)
for step, batch in enumerate({batches}):
    if step == 3:
        import time; print('{{"step": 3, "at": %f}}' % time.monotonic(), flush=True)
    trainer.step(*batch)
"""


@pytest.mark.mp
@pytest.mark.parametrize("batches", ["loader()", "pr.data.together(loader(), world)"])
def test_f82_a_loader_that_fails_on_one_rank(batches):
    """The others learn its text at once, instead of waiting for the collective."""
    end = "raise RuntimeError('DataLoader worker (pid 123) is killed by signal: Killed')"
    with Ranks([LOADER.format(end=end, batches=batches)] * 2) as ranks:
        code, _, errors = ranks.end(1)
        assert code == 1
        code, _, errors = ranks.end(0)
    assert code == 1
    assert "PeerLost" in errors, errors
    assert "rank 1" in errors
    assert "RuntimeError: DataLoader worker (pid 123) is killed by signal: Killed" in errors
    assert "timed out" not in errors


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    data = dataset(tmp_path, 40)

    def body(world):
        trainer = make_trainer(world, MODEL, global_batch=4)
        steps = trainer.fit(data, steps=12)
        next(steps)
        os.truncate(data.path, 100)
        with pytest.raises(pr.InvalidArgument) as caught:
            list(steps)
        return str(caught.value)

    for text in run_ranks(2, body):
        assert "was cut since it was opened" in text or "refused this call" in text
