"""Fixtures of several test files."""

from __future__ import annotations

import signal

import pytest
from helpers import alone, python_corpus

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
