"""Fixtures of several test files."""

from __future__ import annotations

import pytest
from helpers import alone, python_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A token file of real text."""
    return python_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def world():
    """One rank alone."""
    return alone()
