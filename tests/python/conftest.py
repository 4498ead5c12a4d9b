"""Fixtures of several test files."""

from __future__ import annotations

import signal

import polyreme as pr
import pytest
from helpers import TINY, alone, batches, make_trainer, python_corpus
from launcher_job import Job

# A shell ignores SIGINT for its background jobs, nohup ignores SIGHUP, and children inherit that. The launcher
# keeps what was ignored at its start, so its tests would wait for signals that nobody takes.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A token file of real text."""
    return python_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def world():
    """One rank alone."""
    return alone()


@pytest.fixture(scope="module")
def trainer(world):
    """A trainer of the TINY model that has made a step, for refusals that must not change it."""
    model = pr.models.GPT(**TINY)
    made = make_trainer(world, model, lanes=pr.Lanes(dp=2))
    made.step(*batches(1, 8, model)[0])
    return made


@pytest.fixture
def job(tmp_path):
    """A launch in a folder of its own; nothing of it may be left at the end."""
    made = Job(tmp_path)
    yield made
    made.end()
