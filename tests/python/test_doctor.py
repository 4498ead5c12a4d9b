"""`polyreme doctor` as text and as JSON."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import polyreme as pr
import pytest
from helpers import clean_environment, polyreme
from polyreme import _core
from polyreme.cli import doctor

pytestmark = pytest.mark.mp

FIELDS = {
    "version",
    "python",
    "executable",
    "system",
    "cpus",
    "memory_bytes",
    "shared_memory_bytes",
    "build",
    "cuda",
    "nccl",
    "backends",
    "can_train",
    "promise",
}
BACKENDS = {"cpu", "cuda", "shm", "tcp", "nccl", "mpi"}


def test_json():
    done = polyreme("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == FIELDS
    assert report["version"] == pr.__version__
    assert report["can_train"] is True
    assert report["cpus"] == len(os.sched_getaffinity(0))
    assert report["memory_bytes"] > 0
    assert report["shared_memory_bytes"] > 0
    assert set(report["backends"]) == BACKENDS
    for backend in report["backends"].values():
        assert set(backend) == {"usable", "text"}
        assert backend["text"]
    assert all(level in report["backends"]["cpu"]["text"] for level in _core.supported_isas())
    assert all(set(row) == {"backend", "equal", "seen"} for row in report["promise"])
    assert report["build"] == _core.build_info()


def test_text():
    done = polyreme("doctor")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith(f"polyreme {pr.__version__}")
    for word in (*BACKENDS, "CPUs", "memory", "same bits", "seen:", *_core.supported_isas()):
        assert word in done.stdout, word


def test_output_that_is_lost_is_told():
    command = [sys.executable, "-m", "polyreme", "doctor"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, env=clean_environment(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert os.strerror(errno.ENOSPC) in done.stderr


def test_the_promise_is_that_of_the_readme():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme.partition("| backend | what is equal to what | seen |\n|---|---|---|\n")[2]
    rows = [" | ".join(row.values()) for row in doctor.PROMISE]
    assert table.partition("\n\n")[0].splitlines() == [f"| {row} |" for row in rows]


def test_what_is_absent_is_said_with_the_reason():
    report = doctor.examine()
    build = report["build"]
    expected = build["mpi_version"] or build["mpi_absent"]
    assert expected
    assert expected in report["backends"]["mpi"]["text"]
    text = report["backends"]["nccl"]["text"]
    assert report["nccl"]["message"] in text
    if report["nccl"]["loaded"]:
        assert text.startswith("NCCL 2.")
        assert report["nccl"]["version"] > 20000
    else:
        assert "build polyreme again" in text or "could not be loaded" in text
    assert not report["backends"]["nccl"]["usable"]
    assert not report["backends"]["cuda"]["usable"]


def test_a_machine_that_cannot_train(monkeypatch, capsys):
    monkeypatch.setattr(_core, "supported_isas", list)
    report = doctor.examine()
    assert report["can_train"] is False
    assert "AVX2" in doctor.render(report)[-1]
    monkeypatch.setattr(doctor, "examine", lambda: report)
    assert doctor.run(type("Arguments", (), {"json": False})) == 1
    assert "cannot train" in capsys.readouterr().out
