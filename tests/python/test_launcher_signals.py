"""The local launcher: signals.

Real processes and real signals. Time limits only guard against hangs; they are far above what the launcher
needs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launcher_job import HANG_S, Job, Terminal

pytestmark = pytest.mark.mp

# --- signals ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_o_fl_03_f24_stop_reaches_every_rank_once(job: Job, number: signal.Signals) -> None:
    script = """
    caught = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, frame: caught.append(n))
    meet("up")
    while not caught:
        time.sleep(0.01)
    time.sleep(0.3)
    print("caught", *caught)
    """
    process = job.start(script, num_ranks=3)
    job.wait_for("up", 3)
    process.send_signal(number)
    done = job.wait(process)
    assert sorted(done.out.splitlines()) == [f"[{r}] caught {int(number)}" for r in range(3)]
    assert done.code == 0
    assert f"stopped by {number.name}" in done.err


def test_ctrl_c_on_a_terminal_reaches_every_rank_once(job: Job) -> None:
    script = """
    caught = []
    signal.signal(signal.SIGINT, lambda n, frame: caught.append(n))
    meet("up")
    while not caught:
        time.sleep(0.01)
    time.sleep(0.3)
    print("caught", len(caught))
    """
    command = job.command(script, num_ranks=2, arguments=())
    # A session leader gets the terminal as its controlling one by opening it.
    control = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
    terminal = Terminal([sys.executable, "-c", control, *command], job.environment)
    job.wait_for("up")
    os.write(terminal.ours, b"\x03")
    assert terminal.close() == 0
    assert terminal.shown.count(b"caught 1") == 2


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_other_signals_are_passed_on_and_the_job_goes_on(job: Job, name: str) -> None:
    script = f"""
    caught = []
    signal.signal(signal.{name}, lambda n, frame: caught.append(n))
    meet("up")
    while not caught:
        time.sleep(0.01)
    print("caught")
    """
    process = job.start(script, "--grace", "0")
    job.wait_for("up")
    process.send_signal(getattr(signal, name))
    done = job.wait(process)
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == ["[0] caught", "[1] caught"]


def test_unhandled_forwarded_signal_is_explained(job: Job) -> None:
    process = job.start("meet('up'); time.sleep(1000)")
    job.wait_for("up")
    process.send_signal(signal.SIGUSR1)
    done = job.wait(process)
    assert done.code == 128 + signal.SIGUSR1
    assert "the launcher received SIGUSR1 and passed it on" in done.err


def test_rank_that_ignores_sigterm_is_killed_after_the_grace_period(job: Job) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); meet('up'); time.sleep(1000)"
    process = job.start(script, "--grace", "0.4")
    job.wait_for("up")
    start = time.monotonic()
    process.terminate()
    done = job.wait(process)
    assert time.monotonic() - start >= 0.4
    assert done.code == 143
    assert "ended by the stop: rank 0 (SIGKILL), rank 1 (SIGKILL)" in done.err


def test_second_sigint_kills_at_once(job: Job) -> None:
    script = "signal.signal(signal.SIGINT, signal.SIG_IGN); meet('up'); time.sleep(1000)"
    process = job.start(script, "--grace", "1000")
    job.wait_for("up")
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert job.wait(process).code == 130


def test_stopped_ranks_can_be_killed_and_ctrl_z_stops_them(job: Job) -> None:
    process = job.start("meet('up'); time.sleep(1000)")
    job.wait_for("up")

    def states() -> set[str]:
        found = set()
        for pid in job.processes():
            if b"_guard.py" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        return found

    process.send_signal(signal.SIGTSTP)
    deadline = time.monotonic() + HANG_S
    while states() != {"T"}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGCONT)
    while "T" in states():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.terminate()
    assert job.wait(process).code == 143


def test_f31_workers_of_a_killed_launcher_are_gone(job: Job) -> None:
    script = """
    import multiprocessing
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    name = f"/dev/shm/polyreme-{os.environ['POLYREME_JOB_ID']}-{rank}"
    open(name, "w").close()
    print(name)
    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")
        multiprocessing.Process(target=time.sleep, args=(1000,)).start()
        meet("up")
        time.sleep(1000)
    """
    process = job.start(script, "--prefix", "never")
    job.wait_for("up")
    assert process.stdout is not None
    names = [process.stdout.readline().decode().strip() for _ in range(2)]
    assert all(os.path.exists(name) for name in names)
    assert len(job.processes()) >= 6
    process.kill()
    assert job.gone_after_s() < 3
    assert not any(os.path.exists(name) for name in names)


def test_i4_nothing_is_left_behind(job: Job) -> None:
    script = """
    job_id = os.environ["POLYREME_JOB_ID"]
    open(f"/dev/shm/polyreme-{job_id}-{rank}", "w").close()
    open(f"/dev/shm/polyreme-{job_id[1:]}-{rank}", "w").close()
    print(job_id)
    """
    before = set(os.listdir(job.folder))
    done = job.run(script, "--prefix", "never")
    assert done.code == 0
    assert job.processes() == []
    job_id = done.out.split()[0]
    others = [f"polyreme-{job_id[1:]}-{rank}" for rank in range(2)]
    left = sorted(name for name in os.listdir("/dev/shm") if job_id[1:] in name)
    for name in others:
        os.unlink(f"/dev/shm/{name}")
    assert left == others  # segments of other jobs are not ours to remove
    assert set(os.listdir(job.folder)) - before == {"script.py"}


def test_report_file(job: Job) -> None:
    path = job.folder / "report.json"
    done = job.run("sys.exit('oh no') if rank else time.sleep(1000)", "--report", str(path))
    assert done.code == 1
    report = json.loads(path.read_text())
    assert report["exit_code"] == 1
    assert report["first_cause"]["rank"] == 1
    assert report["first_cause"]["stderr_tail"] == ["oh no"]
    assert report["num_ranks"] == 2
    assert "exit code 1" in done.err


def test_fast_ranks_in_large_number(job: Job) -> None:
    done = job.run("print('x' * 1000)", num_ranks=32)
    assert done.code == 0
    assert len(done.out.splitlines()) == 32
