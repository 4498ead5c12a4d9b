"""Saves that are killed at every point and at random moments: a complete checkpoint is always there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import polyreme as pr
import pytest
from helpers import HERE, alone, clean_environment
from polyreme import _core
from polyreme.checkpoint import ArrayPart

pytestmark = pytest.mark.mp
FULL = os.environ.get("POLYREME_TEST_FULL") == "1"


def crash(*arguments):
    result = subprocess.run(
        [sys.executable, os.path.join(HERE, "checkpoint_crash.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=3000 if FULL else 300,
        env=clean_environment(),
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "scenario",
    [
        "new",
        pytest.param("replace", marks=pytest.mark.slow),
        pytest.param("replace_without_exchange", marks=pytest.mark.slow),
    ],
)
def test_o_ck_01_f66_killed_at_every_point(tmp_path, scenario):
    """Each write, fsync, rename and unlink of a save and of a deletion, of either rank."""
    seen = crash("points", tmp_path, scenario)
    of_rank_0 = [step for rank, _, step in seen if rank == 0]
    assert len(of_rank_0) >= 20
    assert len([1 for rank, _, _ in seen if rank == 1]) >= 8
    if scenario == "new":
        # Before the commit the old one is the newest, after it the new one; there is one border.
        assert of_rank_0 == sorted(of_rank_0)
        assert set(of_rank_0) == {2, 3}


@pytest.mark.slow
def test_f66_killed_at_random(tmp_path):
    count = 1000 if FULL else 100
    assert crash("random", tmp_path, count, 1)["deaths"] == count


def test_f67_nothing_is_visible_before_it_is_durable(tmp_path):
    """By the order of the calls: what is renamed into view was written, and its directory, synced before."""
    world = alone()
    with pr.Checkpointer(tmp_path, world=world, keep=1) as checkpoints:
        data = np.arange(100_000, dtype=np.float64)
        state = {"model/w": data, "optimizer/m": ArrayPart(data, (100_000,), 0)}
        checkpoints.save(state, step=1)
        checkpoints._files = files = _core.FileOps(keeps_trace=True)
        checkpoints.save(state, step=2)
    unsynced: set[str] = set()  # files with data, and directories with names, that may be lost
    visible = []
    for line in files.trace:
        operation, _, path = line.partition(" ")
        parent = os.path.dirname(path)
        if operation in ("create", "write"):
            unsynced |= {path, parent}
        elif operation == "fsync":
            unsynced.discard(path)
        elif operation == "rename":
            if not os.path.basename(path).startswith("."):
                # All but the directory in which the name itself is made.
                assert unsynced <= {str(tmp_path)}, f"{path} is made visible before {unsynced} is durable"
                visible.append(os.path.basename(path))
            unsynced.add(parent)
        elif operation == "unlink":
            assert str(tmp_path) not in unsynced, "deletes before the new checkpoint's name is durable"
    assert visible == ["step-0000000002", "latest"]
    assert str(tmp_path) not in unsynced
