"""Checkpoints of ranks that are processes: calls that do not match, deaths, two nodes on one directory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import polyreme as pr
import pytest
from helpers import alone, clean_environment
from polyreme.checkpoint import complete_steps, read_manifest

pytestmark = pytest.mark.mp

HEAD = """
import os, signal, sys, time
import numpy as np
import polyreme as pr
from polyreme import _core
from polyreme.checkpoint import ArrayPart
folder = sys.argv[1]
world = pr.init(num_threads=1, timeout_s=5, heartbeat_s=0.5, peer_timeout_s=3)
def state(step):
    size = 1000
    begin, end = size * world.rank // world.size, size * (world.rank + 1) // world.size
    return {"model/w": np.full(50, step, np.float32), "optimizer/m": ArrayPart(np.arange(begin, end) + step, (size,), begin)}
checkpoints = pr.Checkpointer(folder, world=world)
checkpoints.save(state(1), step=1)
"""


def run(tmp_path, body, *, ranks=2, environment=None):
    script = tmp_path / "script.py"
    script.write_text(HEAD + body)
    command = [sys.executable, "-m", "polyreme", "run", "-n", str(ranks), str(script), str(tmp_path / "runs")]
    return subprocess.run(
        command,
        env=clean_environment(**(environment or {})),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def require_complete(folder, step):
    """The newest is of `step`, and has its values."""
    with pr.Checkpointer(folder, world=alone()) as checkpoints:
        target = {"model/w": np.zeros(50, np.float32), "optimizer/m": np.zeros(1000, np.int64)}
        assert checkpoints.load(target).step == step
    assert (target["model/w"] == step).all()
    np.testing.assert_array_equal(target["optimizer/m"], np.arange(1000) + step)


@pytest.mark.parametrize("other", ["time.sleep(30)", "mesh['dp'].all_reduce(np.ones(3))"])
def test_o_ck_06_save_on_some_of_the_ranks(tmp_path, other):
    body = f"""
mesh = pr.Mesh(world)
if world.rank == 0:
    checkpoints.save(state(2), step=2)
else:
    {other}
"""
    result = run(tmp_path, body)
    assert result.returncode != 0
    assert "Timeout" in result.stderr
    assert "rank 1" in result.stderr
    assert "checkpoint save of step 2" in result.stderr, result.stderr
    require_complete(tmp_path / "runs", 1)


def test_f66_one_rank_dies_while_it_writes(tmp_path):
    """The launcher says who and ends the others; nothing is committed."""
    body = """
if world.rank == 1:
    checkpoints._files = _core.FileOps(at=3, kind="kill")
checkpoints.save(state(2), step=2)
"""
    result = run(tmp_path, body)
    assert result.returncode != 0
    assert "rank 1" in result.stderr
    assert "SIGKILL" in result.stderr
    assert complete_steps(tmp_path / "runs") == [1]
    require_complete(tmp_path / "runs", 1)


def test_f73_a_slow_rank_is_named_and_training_goes_on(tmp_path):
    body = """
import logging
from polyreme.checkpoint import saver
logging.basicConfig(level=logging.WARNING)
saver._WARN_S = 0.2
if world.rank == 1:
    checkpoints._files = _core.FileOps(at=1, kind="delay", delay_s=0.15)
mesh = pr.Mesh(world)
assert checkpoints.save_async(state(2), step=2)
steps = 0
while checkpoints._thread.is_alive() and world.rank == 0 or steps < 20:
    mesh["dp"].all_reduce(np.ones(3)) if steps < 20 else time.sleep(0.01)  # 20 steps on both ranks
    steps += 1
in_flight = checkpoints._thread.is_alive()
checkpoints.close()
if world.rank == 0:
    print("steps", steps)
"""
    result = run(tmp_path, body)
    assert result.returncode == 0, result.stderr
    assert "the files of rank 1 did not come yet" in result.stderr
    require_complete(tmp_path / "runs", 2)


def test_o_ck_07_two_nodes_with_equal_local_ranks(tmp_path):
    """Who writes what goes by rank, not by local rank: every file has one writer."""
    body = """
import random
os.environ["LOCAL_RANK"] = str(world.rank % 2)
world.local_rank = world.rank % 2
for step in range(2, 12):
    time.sleep(random.random() * 0.02)
    checkpoints.save(state(step), step=step)
checkpoints.close()
"""
    result = run(tmp_path, body, ranks=4)
    assert result.returncode == 0, result.stderr
    require_complete(tmp_path / "runs", 11)
    files = read_manifest(tmp_path / "runs", 11).files
    assert len({file.name for file in files}) == len(files)
    assert {file.rank for file in files} == {0, 1, 2, 3}
    assert sorted(os.listdir(tmp_path / "runs" / "step-0000000011")) == sorted(
        ["manifest.json", *(f.name for f in files)]
    )
