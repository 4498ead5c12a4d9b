"""What the tests share: small models and batches, refusals, token files, processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import polyreme as pr
import pytest
from polyreme.data.prepare import prepare_bytes
from polyreme.data.token_file import write_tokens
from polyreme.environment import RankEnvironment

TINY = dict(layers=2, hidden=32, heads=4, vocab=61, seq_len=24)


def batches(steps, samples, model, *, seed=0, ignored=0.0):
    """`steps` random (tokens, targets) of the global batch; a share of targets is ignored."""
    random = np.random.default_rng(seed)
    result = []
    for _ in range(steps):
        tokens = random.integers(0, model.vocab, (samples, model.seq_len + 1))
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        targets[random.random(targets.shape) < ignored] = -100
        result.append((inputs.astype(np.int32), targets.astype(np.int32)))
    return result


def make_trainer(world, model=None, **options):
    model = model or pr.models.GPT(**TINY)
    options.setdefault("optimizer", pr.AdamW(lr=1e-3, eps=1e-4, weight_decay=0.1))
    options.setdefault("global_batch", 8)
    return pr.Trainer(model, pr.Mesh(world), **options)


def local_part(world, array):
    """This rank's samples of a global batch."""
    count = len(array) // world.size
    return array[world.rank * count : (world.rank + 1) * count]


def fingerprint(trainer):
    """A hash of all weights and optimizer state."""
    digest = hashlib.sha256()
    for name in trainer.parameter_names():
        digest.update(trainer.parameter(name).tobytes())
        for kind in ("exp_avg", "exp_avg_sq"):
            digest.update(trainer.optimizer_state(name, kind).tobytes())
    return digest.hexdigest()


def train(world, data, model=None, **options):
    """Trains on global batches; returns the exact losses, norms and the final fingerprint."""
    trainer = make_trainer(world, model, **options)
    history = []
    for tokens, targets in data:
        stats = trainer.step(local_part(world, tokens), local_part(world, targets))
        history.append((stats.loss.hex(), stats.grad_norm.hex()))
    return history, fingerprint(trainer)


# ---- one rank, errors, text ----


def alone(**options):
    """The world of this process alone, whatever the environment says."""
    return pr.init(environment=RankEnvironment(), num_threads=1, **options)


def refused(error, words, function):
    """The text of the error that function() must raise; it must have all the words."""
    with pytest.raises(error) as caught:
        function()
    assert caught.type is error
    text = str(caught.value)
    missing = [word for word in words if word not in text]
    assert not missing, f"{text!r} lacks {missing}"
    return text


def refused_unchanged(trainer, error, words, function):
    """The same, and weights, optimizer state and step count stay what they were."""
    before = fingerprint(trainer), trainer.applied_steps
    refused(error, words, function)
    assert (fingerprint(trainer), trainer.applied_steps) == before


def python_corpus(folder):
    """A token file of real text: the package's own Python files."""
    path = folder / "corpus.bin"
    if not path.exists():
        sources = Path(pr.__file__).resolve().parent
        prepare_bytes([str(sources)], str(path), include=["*.py"])
    return path


def token_file(folder, tokens, vocab_size):
    """A token file of the given numbers."""
    path = folder / "tokens.bin"
    write_tokens(path, [np.asarray(tokens)], vocab_size)
    return path


# ---- processes ----

HANG_S = 60.0  # a guard against hangs, far above what is needed
HERE = os.path.dirname(os.path.abspath(__file__))


def clean_environment(**more):
    """The environment without a launcher's variables, in which the same package is found, and this module."""
    launch = re.compile(
        r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|POLYREME_|OMP_NUM|OMPI_|PMI|MPI_LOCAL|PALS_|SLURM|TORCHELASTIC)"
    )
    environment = {name: value for name, value in os.environ.items() if not launch.match(name)}
    package = str(Path(pr.__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(
        [HERE, package, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {**environment, **more}


def polyreme(*arguments, timeout=HANG_S, cwd=None, **environment):
    """Runs the command line to its end."""
    command = [sys.executable, "-m", "polyreme", *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def processes_with(name, value):
    """Processes that are alive and have this variable in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if (
                    f"{name}={value}".encode() in (entry / "environ").read_bytes().split(b"\0")
                    and state != "Z"
                ):
                    found.append(int(entry.name))
    return found


def json_lines(text):
    """The JSON objects among the lines of a text."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def free_port():
    """A port of this host that nobody uses, yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """Processes of one job, without a launcher. `scripts[r]` is rank r's, `own[r]` its own variables."""

    def __init__(self, scripts, own=None, **environment):
        port = free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=clean_environment(
                    RANK=str(rank),
                    WORLD_SIZE=str(len(scripts)),
                    **{
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                        "POLYREME_SECRET": "a secret of this test",
                        **environment,
                        **(own or {}).get(rank, {}),
                    },
                ),
            )
            for rank, script in enumerate(scripts)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait_for(self, rank, line):
        assert line in self.processes[rank].stdout.readline(), self.processes[rank].communicate()

    def end(self, rank):
        """Its exit code, what it said and its error output."""
        out, errors = self.processes[rank].communicate(timeout=HANG_S)
        return self.processes[rank].returncode, json_lines(out), errors
