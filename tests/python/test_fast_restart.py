"""Copies in memory: a rank is killed, the launcher starts all again, and they go on from the newest state."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import polyreme as pr
import pytest
from helpers import HANG_S, alone, clean_environment, json_lines, polyreme, python_corpus, refused
from polyreme import _core
from polyreme.checkpoint import complete_steps
from polyreme.environment import memory_segment
from polyreme.testing import run_ranks

SCRIPT = """
import hashlib, json, os, signal, sys
import polyreme as pr
world = pr.init(num_threads=1, heartbeat_s=0.5, peer_timeout_s=3)
model = pr.models.GPT(layers=1, hidden=32, heads=4, vocab=257, seq_len=24)
trainer = pr.Trainer(
    model, pr.Mesh(world), optimizer=pr.AdamW(lr=1e-2), global_batch=4, lanes=pr.Lanes(dp=4), zero=int(sys.argv[3])
)
data = pr.data.TokenDataset(sys.argv[1], seq_len=24)
starts = int(os.environ.get("POLYREME_RESTART_COUNT", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
with pr.Checkpointer(sys.argv[2], every=6, memory_every=2) as checkpoints:
    restored = trainer.resume(checkpoints)
    losses = []
    for stats in trainer.fit(data, steps=12, checkpoints=checkpoints):
        losses.append(stats.loss.hex())
        if world.rank == world.size - 1 and [starts, stats.step] in json.loads(sys.argv[4]):
            checkpoints.wait()  # so that the test knows which step it is
            os.kill(os.getpid(), signal.SIGKILL)
bits = hashlib.sha256()
for name in trainer.parameter_names():
    bits.update(trainer.parameter(name).tobytes())
    bits.update(trainer.optimizer_state(name, "exp_avg_sq").tobytes())
if world.rank == 0:
    source = [restored.step, restored.source] if restored else None
    print(json.dumps({"source": source, "losses": losses, "bits": bits.hexdigest()}), flush=True)
"""


def segments():
    return [name for name in os.listdir("/dev/shm") if memory_segment._NAME.match(name)]


@pytest.fixture
def script(tmp_path, tmp_path_factory):
    """Its path and first argument."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [str(path), str(python_corpus(tmp_path_factory.getbasetemp()))]


@pytest.mark.mp
def test_a_killed_rank_and_the_newest_state(tmp_path, script):
    """Killed after step 9, and again after step 11: on from 8 and 10, which no disk has."""
    result = polyreme("run", "-n", 1, *script, tmp_path / "whole", 0, "[]")
    (whole,) = json_lines(result.stdout)
    deaths = json.dumps([[0, 9], [1, 11]])
    result = polyreme("run", "-n", 2, "--restarts", 3, *script, tmp_path / "run", 1, deaths)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("was ended by SIGKILL") == 2
    assert "restart 2 of 3" in result.stderr
    assert "restart 3" not in result.stderr
    (found,) = json_lines(result.stdout)
    assert found["source"] == [10, "memory"]
    assert found["losses"] == whole["losses"][10:]
    assert found["bits"] == whole["bits"]
    assert complete_steps(tmp_path / "run") == [6, 12]
    assert segments() == []


@pytest.mark.mp
@pytest.mark.torch
def test_under_torchrun(tmp_path, script):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torchrun is not installed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", *script, str(tmp_path / "run"), "0", "[[0, 9]]"]
    result = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=5 * HANG_S, check=False
    )
    assert result.returncode == 0, result.stderr
    (found,) = json_lines(result.stdout)
    assert found["source"] == [8, "memory"]
    deadline = time.monotonic() + HANG_S
    while segments() and time.monotonic() < deadline:  # its guard has seen the end of torchrun
        time.sleep(0.05)
    assert segments() == []


@pytest.mark.mp
def test_a_killed_launcher_leaves_nothing(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import os, time; print(os.environ['POLYREME_MEMORY'], flush=True); time.sleep(100)")
    command = [sys.executable, "-m", "polyreme", "run", "-n", "1", "--restarts", "1", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment()) as launcher:
        segment = launcher.stdout.readline().strip()
        assert os.path.isdir(segment)
        assert os.stat(segment).st_mode & 0o777 == 0o700
        launcher.kill()
    deadline = time.monotonic() + HANG_S
    while os.path.exists(segment) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(segment)


COUNTS = (
    "import os, sys; print(os.environ['POLYREME_JOB_ID'], os.environ['POLYREME_RESTART_COUNT'], flush=True)\n"
)


@pytest.mark.mp
def test_restarts_end(tmp_path):
    """After as many as were asked for, with the last start's code; each start is a job of its own."""
    path = tmp_path / "script.py"
    path.write_text(COUNTS + "sys.exit(3 + int(os.environ['POLYREME_RESTART_COUNT']))")
    report = tmp_path / "report.json"
    logs = tmp_path / "logs"
    result = polyreme(
        "run", "-n", 1, "--restarts", 2, "--report", report, "--log-dir", logs, path, timeout=HANG_S
    )
    assert result.returncode == 5
    jobs, counts = zip(*(line.split() for line in result.stdout.splitlines()), strict=True)
    assert counts == ("0", "1", "2")
    assert len(set(jobs)) == 3
    assert (logs / "rank-0.log").read_text().split()[1::2] == ["0", "1", "2"]
    facts = json.loads(report.read_text())
    assert (facts["restarts"], facts["exit_code"], facts["job_id"]) == (2, 5, jobs[2])
    assert polyreme("run", "-n", 1, "--restarts", -1, path).returncode == 2


@pytest.mark.mp
def test_a_stop_is_no_failure(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(COUNTS + "import time; time.sleep(100)")
    command = [sys.executable, "-m", "polyreme", "run", "-n", "1", "--restarts", "2", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
    ) as launcher:
        launcher.stdout.readline()
        launcher.send_signal(signal.SIGTERM)
        out, errors = launcher.communicate(timeout=HANG_S)
    assert (out, launcher.returncode) == ("", 128 + signal.SIGTERM), errors


# ---- what is believed: ranks are threads, the segment is this test's ----


@pytest.fixture
def segment(monkeypatch):
    path = memory_segment.create(f"test-{os.getpid()}", os.getpid())
    monkeypatch.setenv(memory_segment.MEMORY, path)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def save(folder, step, *, memory, value=None):
    def body(world):
        with pr.Checkpointer(folder, world=world, memory_every=1) as checkpoints:
            state = {"w": np.full(5, step if value is None else value, np.float32)}
            checkpoints.save_async(state, step=step, memory=memory)
            checkpoints.wait()
            return checkpoints.memory_stats

    return run_ranks(2, body)


def load(folder, **options):
    def body(world):
        state = {"w": np.zeros(5, np.float32)}
        with pr.Checkpointer(folder, world=world, memory_every=1, **options) as checkpoints:
            restored = checkpoints.load(state)
        return restored.step, restored.source, float(state["w"][0])

    results = run_ranks(2, body)
    assert results[0] == results[1]
    return results[0]


def copy_of(segment):
    """The folder of the newest copy."""
    (place,) = (os.path.join(segment, name) for name in os.listdir(segment) if not name.startswith("."))
    (step,) = (name for name in os.listdir(place) if name.startswith("step-"))
    return os.path.join(place, step)


def test_the_newest_of_both(segment, tmp_path):
    save(tmp_path, 3, memory=False)
    save(tmp_path, 5, memory=True)
    save(tmp_path, 6, memory=True)
    assert os.path.basename(copy_of(segment)) == "step-0000000006"  # one is kept
    assert load(tmp_path) == (6, "memory", 6.0)
    save(tmp_path, 7, memory=False)
    assert load(tmp_path) == (7, "disk", 7.0)
    save(tmp_path, 7, memory=True, value=8)
    assert load(tmp_path) == (7, "memory", 8.0)
    assert complete_steps(tmp_path) == [3, 7]


def test_another_folder_has_other_copies(segment, tmp_path):
    save(tmp_path / "a", 1, memory=False)
    save(tmp_path / "b", 9, memory=True)
    assert load(tmp_path / "a") == (1, "disk", 1.0)


@pytest.mark.parametrize("how", ["flip", "cut", "delete", "manifest"])
@pytest.mark.parametrize("fallback", [True, False])
def test_a_torn_copy_falls_back_to_disk(segment, tmp_path, caplog, how, fallback):
    save(tmp_path, 3, memory=False)
    save(tmp_path, 5, memory=True)
    path = copy_of(segment)
    (shard,) = (os.path.join(path, name) for name in os.listdir(path) if name.endswith("tensors"))
    if how == "delete":
        os.unlink(shard)
    elif how == "cut":
        os.truncate(shard, os.path.getsize(shard) - 3)
    else:
        name = shard if how == "flip" else os.path.join(path, "manifest.json")
        with open(name, "r+b") as file:
            file.seek(-2, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-2, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, fallback=fallback) == (3, "disk", 3.0)
    assert "going on to step 3 on disk" in caplog.text


def test_a_copy_that_was_being_written(segment, tmp_path):
    """Never renamed: as if it were not there, and gone afterwards."""
    save(tmp_path, 3, memory=False)
    save(tmp_path, 5, memory=True)
    path = copy_of(segment)
    os.rename(path, os.path.join(os.path.dirname(path), ".tmp-0000000005-0123456789abcdef"))
    assert load(tmp_path) == (3, "disk", 3.0)
    assert [name for name in os.listdir(os.path.dirname(path)) if name.startswith(".tmp")] == []


def test_a_copy_of_another_job(segment, tmp_path, monkeypatch, caplog):
    save(tmp_path, 3, memory=False)
    save(tmp_path, 5, memory=True)
    other = memory_segment.create(f"test-other-{os.getpid()}", os.getpid())
    try:
        shutil.rmtree(other)
        shutil.copytree(segment, other)
        monkeypatch.setenv(memory_segment.MEMORY, other)
        with caplog.at_level(logging.WARNING):
            assert load(tmp_path) == (3, "disk", 3.0)
        assert "is a copy of another job" in caplog.text
    finally:
        shutil.rmtree(other)


def test_a_segment_of_others_is_refused(segment, tmp_path, monkeypatch):
    def opened(words):
        checkpoints = pr.Checkpointer(tmp_path, memory_every=1, signals=False)
        refused(pr.CheckpointError, words, lambda: checkpoints._claim(checkpoints._open(alone())))
        checkpoints.close()

    os.chmod(segment, 0o755)
    opened([segment, "open to other users", "remove it"])
    monkeypatch.setenv(memory_segment.MEMORY, segment + "-not-there")
    opened([segment + "-not-there", "is not there"])
    os.symlink(segment, tmp_path / "link")
    monkeypatch.setenv(memory_segment.MEMORY, str(tmp_path / "link"))
    opened(["link", "is no folder"])


def test_no_memory_no_copy(segment, tmp_path, monkeypatch, caplog):
    """It fails alone: the training goes on, and so do checkpoints."""
    monkeypatch.setattr(memory_segment, "free_bytes", lambda path: 10)
    with caplog.at_level(logging.WARNING):
        stats = save(tmp_path, 5, memory=True)
    assert [s.failed for s in stats] == [1, 1]
    assert "a copy in memory takes 20 bytes; 10 are free" in caplog.text
    save(tmp_path, 6, memory=False)
    assert load(tmp_path) == (6, "disk", 6.0)


def test_without_a_launcher_that_restarts(tmp_path, monkeypatch, caplog):
    for variables, words in (
        ({}, "nobody starts the ranks again"),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "0"}, "--max-restarts 0"),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with (
            caplog.at_level(logging.WARNING),
            pr.Checkpointer(tmp_path, world=alone(), memory_every=1) as checkpoints,
        ):
            assert not checkpoints.save_async({"w": np.zeros(3)}, step=1, memory=True)
            assert checkpoints.memory_stats is None
            checkpoints.save({"w": np.zeros(3)}, step=1)
        assert words in caplog.text


def test_what_dead_jobs_have_left_is_removed():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left = memory_segment.create(f"test-dead-{os.getpid()}", process.pid)
    try:
        memory_segment.create(f"test-dead-{os.getpid()}", process.pid)
        assert os.path.isdir(left)  # its owner lives
        process.communicate(b"\n")
        own = memory_segment.create(f"test-own-{os.getpid()}", os.getpid())
        assert not os.path.exists(left)
        assert memory_segment.job_of(own) == f"test-own-{os.getpid()}"
        shutil.rmtree(own)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(left)


def test_a_save_to_disk_and_a_copy_at_once(segment, tmp_path):
    """Their messages between the ranks are told apart, whichever is slow."""

    def body(world):
        with pr.Checkpointer(tmp_path, world=world, memory_every=1, timeout_s=20) as checkpoints:
            checkpoints.save({"w": np.zeros(5, np.float32)}, step=0)  # the directory is there from now on
            if world.rank == 0:
                checkpoints._files = _core.FileOps(at=1, kind="delay", delay_s=0.1, sticky=True)
            for step in (1, 2, 3):
                state = {"w": np.full(5, step, np.float32)}
                assert checkpoints.save_async(state, step=step)
                assert checkpoints.save_async(state, step=step, memory=True)
            checkpoints.wait()
            return checkpoints.stats.saved, checkpoints.memory_stats.saved

    assert run_ranks(3, body) == [(4, 3)] * 3
    assert load(tmp_path) == (3, "memory", 3.0)
