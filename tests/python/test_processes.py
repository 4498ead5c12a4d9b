"""Real processes: the example under every launcher, ranks that fail, ranks that end.

Time limits only guard against hangs; they are far above what is needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from helpers import HANG_S, clean_environment, json_lines, polyreme, processes_with

pytestmark = pytest.mark.mp

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "01_train_gpt.py"
SIZES = {
    "steps": 4,
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "seq-len": 32,
    "global-batch": 4,
    "micro-batch": 1,
    "lanes": 2,
    "generate": 20,
}
FIELDS = {"step", "loss", "validation_loss", "grad_norm", "lr", "tokens_per_s", "mfu", "eta_s"}
GONE_S = 20  # all processes of a job that failed must have ended after this

# Every script trains a tiny model; `step(k)` makes step k, counted from 1.
HEAD = """
import os, signal, sys, time
import polyreme as pr
from helpers import TINY, batches, local_part, make_trainer
from polyreme.environment import read_rank_environment

world = pr.init(init_timeout_s=20, timeout_s=20)
assert world.size == int(os.environ["WORLD_SIZE"])
trainer = make_trainer(world)
data = batches(4, 8, trainer.model)
print("JOB", read_rank_environment().job_id, flush=True)

def step(k):
    stats = trainer.step(*(local_part(world, array) for array in data[k - 1]))
    assert stats.step == k
    return stats
"""


class Job:
    """Runs a script under `polyreme run`; nothing may be left of it afterwards."""

    def __init__(self, folder):
        self.folder = folder

    def run(self, script, *options, num_ranks=2):
        path, report = self.folder / "script.py", self.folder / "report.json"
        path.write_text(HEAD + textwrap.dedent(script))
        start = time.monotonic()
        self.done = polyreme(
            *("run", "-n", num_ranks, "--report", report, *options, path), POLYREME_TEST_JOB=self.folder
        )
        self.seconds = time.monotonic() - start
        self.report = json.loads(report.read_text())
        return self

    @property
    def code(self):
        return self.done.returncode

    @property
    def err(self):
        return self.done.stderr

    def check_nothing_is_left(self):
        assert self.report["leftovers"] == []
        assert segments(self.report["job_id"]) == []
        assert processes_with("POLYREME_TEST_JOB", self.folder) == []


def segments(job_id):
    return [name for name in os.listdir("/dev/shm") if job_id in name]


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.check_nothing_is_left()


# ---- the example ----


@pytest.fixture
def example_module():
    """The example's module."""
    if not EXAMPLE.exists():
        pytest.skip(f"{EXAMPLE} is not here")
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_prints_no_control_characters(example_module):
    assert example_module.visible("a\tb\n\x1b[2J\x00\r\x9bé") == "a\tb\n\ufffd[2J\ufffd\ufffd\ufffdé"


def test_the_example_takes_an_empty_cache_variable_as_unset(example_module, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert example_module.default_corpus().is_relative_to(Path.home() / ".cache")


def run_example(corpus, *launcher):
    if not EXAMPLE.exists():
        pytest.skip(f"{EXAMPLE} is not here")
    sizes = [f"--{name}={value}" for name, value in SIZES.items()]
    return subprocess.run(
        [sys.executable, "-m", *launcher, str(EXAMPLE), f"--data={corpus}", *sizes],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.fixture(scope="module")
def example(corpus):
    """The example on two ranks."""
    done = run_example(corpus, "polyreme", "run", "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def exact(done):
    """What must not depend on the ranks, of every step; and the text."""
    steps = [
        [line[name] for name in ("step", "loss", "validation_loss", "grad_norm", "lr")]
        for line in json_lines(done.stdout)
    ]
    text = done.stdout.partition("--- generated from 'def ' ---\n")[2].replace("[0] ", "")
    return steps, text


def test_the_example_prints_json_lines_with_all_fields(example):
    lines = json_lines(example.stdout)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(set(line) == FIELDS for line in lines)
    assert all(line["mfu"] > 0 and line["tokens_per_s"] > 0 for line in lines)
    assert [line["validation_loss"] is not None for line in lines] == [False, False, False, True]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["eta_s"] == 0
    waits = re.compile(r"(\[\d\] )?(rendezvous: \d/2 joined|no store at )")  # of ranks on a busy machine
    assert [line for line in example.stderr.splitlines() if not waits.match(line)] == []


def test_the_example_says_what_it_trains_and_generates_text(example):
    first = example.stdout.splitlines()[0]
    for word in ("parameters", "2 ranks", "tokens", "GFLOP/s"):
        assert word in first
    assert "def " in exact(example)[1]


def test_one_process_and_two_have_the_same_losses(example, corpus):
    done = run_example(corpus, "polyreme", "run", "-n", "1")
    assert done.returncode == 0, done.stderr
    assert exact(done) == exact(example)


@pytest.mark.torch
def test_torchrun_starts_the_same_script(example, corpus):
    import reference  # noqa: F401  (skips where PyTorch is missing)

    before = set(os.listdir("/dev/shm"))
    done = run_example(corpus, "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout
    assert exact(done) == exact(example)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("polyreme-")]


# ---- ranks that fail ----


@pytest.mark.parametrize("others_are", ["in the step", "in a barrier", "computing"])
def test_o_fl_01_one_rank_raises(job, others_are):
    waiting = {"in the step": "step(3)", "in a barrier": "world.barrier()", "computing": "time.sleep(60)"}
    script = f"""
    step(1), step(2)
    if world.rank == 2:
        time.sleep(0.2)
        raise ValueError("boom")
    {waiting[others_are]}
    """
    job.run(script, num_ranks=4)
    assert job.code == 1
    assert job.seconds < GONE_S
    # Under load the launcher may find others ended at the same moment, and names them beside it.
    assert 2 in job.report["causes"]
    assert "rank 2 (pid" in job.err
    assert "polyreme run:   ValueError: boom" in job.err


def test_o_fl_04_a_killed_rank_is_a_failure(job):
    job.run(
        """
        step(1)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(2)
        """
    )
    assert job.code == 128 + signal.SIGKILL
    assert job.seconds < GONE_S
    assert "rank 1 (pid" in job.err
    assert "was ended by SIGKILL" in job.err


def test_o_fl_04_a_rank_that_leaves_early_with_code_0_is_a_failure(job):
    job.run(
        """
        step(1)
        if world.rank == 1:
            os._exit(0)
        step(2)
        """
    )
    assert job.code == 1
    assert job.seconds < GONE_S
    assert "PeerLost" in job.err
    assert "lost rank 1 (host" in job.err


def test_f16_survivors_of_a_killed_rank_name_it(job):
    job.run(
        """
        step(1), step(2)
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            step(3)
        except pr.PeerLost as error:
            print("SURVIVOR", world.rank, time.monotonic() - start, error, flush=True)
            raise SystemExit(7)
        """,
        *("--survivor-grace", "15", "--kill-after", "5", "--prefix", "never"),
        num_ranks=4,
    )
    told = [line.split(maxsplit=3) for line in job.done.stdout.splitlines() if line.startswith("SURVIVOR")]
    assert sorted(rank for _, rank, *_ in told) == ["0", "1", "3"]
    pid = next(rank["pid"] for rank in job.report["ranks"] if rank["rank"] == 2)
    for _, _, seconds, text in told:
        assert float(seconds) < 10
        assert "rank 2" in text
        assert str(pid) in text
        assert "rank 1 (" not in text, "a survivor is blamed"
        assert "rank 3 (" not in text, "a survivor is blamed"
    assert job.code == 128 + signal.SIGKILL
    assert {rank["exit_code"] for rank in job.report["ranks"]} == {7, None}


def test_f22_the_text_of_a_rank_that_raises_is_the_first_cause(job):
    """The others, given time, fail by the lost peer, not by a time limit."""
    job.run(
        """
        step(1)
        if world.rank == 1:
            raise RuntimeError("the real cause")
        step(2)
        """,
        *("--survivor-grace", "15", "--kill-after", "5", "--prefix", "always"),
    )
    assert 1 in job.report["causes"]
    assert "polyreme run:   RuntimeError: the real cause" in job.err
    last = [line for line in job.err.splitlines() if line.startswith("[0]")][-1]
    assert "PeerLost" in last
    assert "rank 1" in last
    assert job.seconds < GONE_S


# ---- ranks that end ----


@pytest.mark.parametrize(
    "ending, code, tracebacks",
    [
        ("", 0, 0),
        ("time.sleep(0.5 * world.rank)", 0, 0),
        ("time.sleep(0.5 - 0.5 * world.rank)", 0, 0),
        ("del trainer, world", 0, 0),
        ("sys.exit(3)", 3, 0),
        ("raise RuntimeError('unhandled')", 1, 2),
    ],
)
def test_o_fl_05_exit_without_shutdown(job, ending, code, tracebacks):
    job.run(f"step(1), step(2)\nworld.barrier()\n{ending}\n", "--survivor-grace", "10", "--kill-after", "5")
    assert job.code == code
    assert [(rank["exit_code"], rank["signal"]) for rank in job.report["ranks"]] == [(code, None)] * 2
    assert job.err.count("Traceback") - job.err.count("  Traceback") == tracebacks
    assert "Exception ignored" not in job.err
    assert job.seconds < GONE_S


# ---- meeting ----


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(*ranks, port, init="init_timeout_s=2", before="pass"):
    """Starts processes with variables as a user would set them, each (rank, world size).

    Returns (exit code, stderr) of each. They run `before` and call pr.init with the arguments `init`.
    """
    script = "import os, time, polyreme as pr; rank = int(os.environ['RANK'])\n"
    script += f"{before}\nprint(pr.init({init}).size)"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=clean_environment(
                RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, size in ranks
    ]
    try:
        errors = [process.communicate(timeout=HANG_S)[1] for process in running]
        return [(process.returncode, text) for process, text in zip(running, errors, strict=True)]
    finally:
        for process in running:
            process.kill()


def check_refused(ends, error, words):
    """Every process ended with this error and these words in its last line."""
    for code, text in ends:
        last = (text.splitlines() or [""])[-1]
        assert code == 1
        assert last.startswith(f"polyreme.errors.{error}: "), text
        assert not [word for word in words if word not in last], text


def test_ranks_started_by_hand_meet():
    assert meet((1, 2), (0, 2), port=free_port(), init="") == [(0, ""), (0, "")]


def test_f01_a_late_rank_is_waited_for():
    ends = meet((0, 2), (1, 2), port=free_port(), init="", before="time.sleep(2.5 * rank)")
    assert ends[1] == (0, "")
    assert ends[0][0] == 0
    assert "rendezvous: 1/2 joined, waiting for rank(s) 1" in ends[0][1]


def test_f02_a_rank_that_never_comes_is_named():
    ends = meet((0, 3), (2, 3), port=free_port())
    check_refused(ends, "Timeout", ["2/3 joined", "waiting for rank(s) 1", "2 s"])


def test_f03_world_sizes_that_differ():
    ends = meet((0, 2), (1, 3), port=free_port())
    check_refused(ends, "InvalidArgument", ["WORLD_SIZE", "2", "3", "rank 1"])


def test_o_fl_08_two_processes_with_one_rank():
    ends = meet((0, 3), (1, 3), (1, 3), port=free_port())
    check_refused(ends, "InvalidArgument", ["two processes have RANK=1", "pid"])


def test_o_fl_08_two_processes_with_rank_0():
    port = free_port()
    ends = meet((0, 2), (0, 2), port=port)
    assert [code for code, _ in ends] == [1, 1]
    texts = "".join(text for _, text in ends)
    assert "waiting for rank(s) 1" in texts
    assert f"127.0.0.1:{port}: Address already in use" in texts


def test_f06_a_port_that_a_foreign_listener_holds():
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        first, second = meet((0, 2), (1, 2), port=port)
    check_refused([first], "CommError", [f"127.0.0.1:{port}", "in use", "MASTER_PORT"])
    check_refused([second], "CommError", [f"127.0.0.1:{port}", "not our store", "MASTER_PORT"])


def test_f12_instruction_sets_that_differ():
    ends = meet((0, 2), (1, 2), port=free_port(), init="isa=['avx2', 'auto'][rank]")
    check_refused(ends, "InvalidArgument", ["isa", "avx2", "auto"])


def test_o_fl_09_jobs_at_once_do_not_meet(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(HEAD + "print('LOSS', step(1).loss.hex(), flush=True)\n")
    command = [sys.executable, "-m", "polyreme", "run", "-n", "2", "--prefix", "never", str(script)]
    jobs = [
        subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [job.communicate(timeout=HANG_S)[0].splitlines() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0]
    assert len({line for output in outputs for line in output if line.startswith("LOSS")}) == 1
    assert len({line for output in outputs for line in output if line.startswith("JOB")}) == 3


# ---- forks, and ends in the middle ----


def test_o_fl_07_forked_workers_neither_use_nor_harm_the_runtime(job):
    """Forks while a collective runs on another thread; a child that uses the runtime is told so."""
    script = """
    import multiprocessing, threading
    import numpy as np

    group = trainer.mesh["dp"]

    def work(queue):
        try:
            group.all_reduce(np.ones(2))
            queue.put("used it")
        except pr.InvalidArgument as error:
            queue.put(str(error))

    fork = multiprocessing.get_context("fork")
    for k in range(20):
        results = fork.Queue()
        total = group.all_reduce(np.ones(200_000), wait=False)
        workers = [fork.Process(target=work, args=(results,)) for _ in range(2)]
        for worker in workers:
            worker.start()
        texts = [results.get(timeout=20) for _ in workers]
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        assert all("forked" in text and "spawn" in text for text in texts), texts
        assert (total.wait() == 2).all()
    pid = os.fork()
    if pid == 0:
        sys.exit(7)  # an orderly end of the interpreter, with everything inherited
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    step(1)
    world.barrier()
    """
    job.run(script)
    assert job.code == 0, job.err


def test_o_fl_02_clean_up_after_an_error_does_not_wait_for_peers(job):
    script = """
    import numpy as np
    group = trainer.mesh["dp"]
    try:
        for k in range(1, 4):
            if (world.rank, k) == (0, 2):
                raise ValueError("boom")
            group.all_reduce(np.ones(10))
    finally:
        del trainer, group, world
    """
    job.run(script, "--survivor-grace", "10")
    assert job.code != 0
    assert all(rank["exit_code"] not in (0, None) for rank in job.report["ranks"])
    assert "boom" in job.err
    assert job.seconds < GONE_S
