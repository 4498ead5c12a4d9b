"""Learning-rate schedules: exact values, counted from update 1."""

from __future__ import annotations

import itertools
import math

import polyreme as pr
import pytest
from helpers import make_trainer, refused

WARM = dict(peak=2.0, warmup=4, total=12)
SCHEDULES = {
    "constant": pr.lr.constant(2.0, warmup=4),
    "warmup_cosine": pr.lr.warmup_cosine(**WARM),
    "warmup_linear": pr.lr.warmup_linear(**WARM),
    "wsd": pr.lr.wsd(**WARM, decay=4),
}


def values(schedule, steps):
    return [schedule(step) for step in steps]


def test_o_op_05_linear_decay():
    schedule = pr.lr.warmup_linear(peak=1e-5, warmup=0, total=10)
    expected = [1e-5 * (1 - (k - 1) / 10) for k in range(1, 11)]
    assert values(schedule, range(1, 11)) == pytest.approx(expected, rel=1e-12, abs=0)
    assert values(schedule, range(6, 11)) == pytest.approx([5e-6, 4e-6, 3e-6, 2e-6, 1e-6], rel=1e-12)
    assert schedule(11) == 0.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_is_linear_up_to_the_peak(name):
    assert values(SCHEDULES[name], range(1, 5)) == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_update_after_the_warmup_has_the_peak(name):
    assert SCHEDULES[name](5) == 2.0


@pytest.mark.parametrize("name", ["warmup_cosine", "warmup_linear", "wsd"])
def test_the_rate_never_rises_after_the_warmup(name):
    rates = values(SCHEDULES[name], range(4, 40))
    assert all(earlier >= later >= 0 for earlier, later in itertools.pairwise(rates))


def test_constant_stays():
    assert values(pr.lr.constant(3.0), [1, 2, 10**6]) == [3.0] * 3


def test_cosine_ends_at_final_and_stays_there():
    schedule = pr.lr.warmup_cosine(**WARM, final=0.25)
    exact = [2.0 * (0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi * i / 7))) for i in range(8)]
    assert values(schedule, range(5, 13)) == pytest.approx(exact, rel=1e-15)
    assert schedule(12) == pytest.approx(0.5, rel=1e-15)
    assert schedule(13) == schedule(1000) == schedule(12)


def test_cosine_of_one_update_has_the_peak_once():
    schedule = pr.lr.warmup_cosine(peak=1.0, warmup=2, total=3, final=0.5)
    assert values(schedule, range(1, 6)) == [0.5, 1.0, 1.0, 0.5, 0.5]


def test_linear_ends_at_final():
    schedule = pr.lr.warmup_linear(**WARM, final=0.5)
    assert values(schedule, [5, 9, 13, 100]) == [2.0, 1.5, 1.0, 1.0]


def test_wsd_is_stable_and_then_falls_to_final():
    schedule = pr.lr.wsd(**WARM, decay=4, final=0.5)
    assert values(schedule, range(5, 14)) == [2.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]


def test_wsd_without_decay_is_constant():
    assert values(pr.lr.wsd(**WARM, decay=0), [5, 12]) == [2.0, 2.0]
    assert pr.lr.wsd(**WARM, decay=0)(13) == 0.0


def test_the_text_of_a_schedule_has_its_numbers():
    assert repr(pr.lr.wsd(**WARM, decay=4)) == "wsd(peak=2.0, warmup=4, total=12, decay=4, final=0.0)"


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: pr.lr.constant(-1.0), ["peak=-1.0", "finite"]),
        (lambda: pr.lr.constant(math.nan), ["peak=nan"]),
        (lambda: pr.lr.warmup_linear(peak=math.inf, warmup=0, total=1), ["peak=inf"]),
        (
            lambda: pr.lr.warmup_cosine(peak=1.0, warmup=3, total=2),
            ["warmup=3", "total=2", "warmup <= total"],
        ),
        (lambda: pr.lr.warmup_cosine(peak=1.0, warmup=-1, total=2), ["warmup=-1"]),
        (lambda: pr.lr.warmup_cosine(peak=1.0, warmup=0, total=2, final=math.nan), ["final=nan"]),
        (lambda: pr.lr.warmup_linear(peak=1.0, warmup=0, total=2, final=-0.5), ["final=-0.5"]),
        (lambda: pr.lr.wsd(peak=1.0, warmup=2, total=5, decay=4), ["decay=4", "total - warmup"]),
        (lambda: pr.lr.wsd(peak=1.0, warmup=2, total=5, decay=-1), ["decay=-1"]),
        (lambda: pr.lr.constant(1.0)(0), ["step=0", "counted from 1"]),
    ],
)
def test_bad_arguments_are_refused(make, words):
    refused(pr.InvalidArgument, words, make)


def test_steps_report_the_rate_that_was_applied(world, corpus):
    schedule = pr.lr.warmup_linear(peak=1e-2, warmup=2, total=6)
    model = pr.models.GPT(layers=1, hidden=8, heads=1, vocab=257, seq_len=8)
    trainer = make_trainer(world, model, optimizer=pr.SGD(lr=schedule))
    data = pr.data.TokenDataset(corpus, seq_len=8)
    rates = [stats.lr for stats in trainer.fit(data, steps=3)]
    rates += [stats.lr for stats in trainer.fit(data, steps=6)]  # goes on where it was
    assert rates == values(schedule, range(1, 7))
