"""The local launcher: one rank fails, and all end with it.

Real processes and real signals. Time limits only guard against hangs; they are far above what the launcher
needs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_job import HANG_S, Job

pytestmark = pytest.mark.mp

# --- failures ---


def test_o_fl_01_first_cause_is_reported_and_the_others_end(job: Job) -> None:
    script = """
    meet("up")
    if rank == 2:
        raise ValueError("boom")
    time.sleep(1000)
    """
    start = time.monotonic()
    done = job.run(script, num_ranks=4)
    assert time.monotonic() - start < 5
    assert done.code == 1
    assert re.search(r"polyreme run: rank 2 \(pid \d+\) failed with exit code 1", done.err)
    assert "polyreme run:   ValueError: boom" in done.err
    assert "ended as a consequence: rank 0 (SIGTERM), rank 1 (SIGTERM), rank 3 (SIGTERM)" in done.err
    assert job.processes() == []


def test_o_fl_01_loader_workers_end_with_their_rank(job: Job) -> None:
    script = """
    import multiprocessing
    def load():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")
        for _ in range(2):
            multiprocessing.Process(target=load).start()
        meet("up")
        if rank == 1:
            os._exit(7)
        time.sleep(1000)
    """
    assert job.run(script).code == 7
    job.gone_after_s(2)


def test_rank_that_ignores_sigterm_is_killed_after_a_failure(job: Job) -> None:
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    meet("up")
    if rank == 1:
        sys.exit(4)
    time.sleep(1000)
    """
    done = job.run(script, "--json", num_ranks=3)
    assert done.code == 4
    report = done.report
    ranks = report["ranks"]
    assert isinstance(ranks, list)
    assert [r["role"] for r in ranks] == ["consequence", "cause", "consequence"]
    assert [r["signal"] for r in ranks] == ["SIGKILL", None, "SIGKILL"]
    assert report["causes"] == [1]
    assert isinstance(report["first_cause"], dict)
    assert report["first_cause"]["exit_code"] == 4


def test_survivor_grace_lets_the_others_tell_their_error(job: Job) -> None:
    script = """
    meet("up")
    if rank == 1:
        sys.exit(4)
    time.sleep(0.2)
    sys.exit("rank 1 is lost")
    """
    done = job.run(script, "--survivor-grace", "10")
    assert done.code == 4
    assert "[0] rank 1 is lost" in done.err
    assert "failed after it: rank 0 (exit code 1)" in done.err


def test_o_fl_04_killed_worker_is_a_failure(job: Job) -> None:
    process = job.start("print(os.getpid()) if rank == 1 else 0; meet('up'); time.sleep(1000)")
    job.wait_for("up")
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    os.kill(int(line.removeprefix("[1] ")), signal.SIGKILL)
    done = job.wait(process)
    assert done.code == 137
    assert re.search(r"rank 1 \(pid \d+\) was ended by SIGKILL", done.err)
    assert "out-of-memory" in done.err


def test_o_fl_04_early_exit_0_is_named_when_a_peer_fails(job: Job) -> None:
    script = """
    meet("up")
    if rank == 1:
        os._exit(0)
    time.sleep(0.5)
    raise RuntimeError("peer lost")
    """
    done = job.run(script)
    assert done.code == 1
    assert re.search(r"earlier, rank 1 \(pid \d+\) exited with code 0", done.err)


def test_o_fl_04_early_exit_0_is_a_failure_after_exit_grace(job: Job) -> None:
    done = job.run("os._exit(0) if rank == 1 else time.sleep(1000)", "--exit-grace", "0.3")
    assert done.code == 1
    assert re.search(r"rank 1 \(pid \d+\) exited with code 0 while other ranks went on", done.err)


def test_f30_two_ranks_killed_together_are_both_named(job: Job) -> None:
    process = job.start("print(os.getpid()); meet('up'); time.sleep(1000)", "--json", num_ranks=4)
    job.wait_for("up", 4)
    assert process.stdout is not None
    pids = dict(process.stdout.readline().decode()[1:].split("] ") for _ in range(4))
    for rank in ("1", "3"):
        os.kill(int(pids[rank]), signal.SIGKILL)
    done = job.wait(process)
    assert done.code == 137
    ranks = done.report["ranks"]
    assert isinstance(ranks, list)
    roles = [r["role"] for r in ranks]
    assert roles[0] == roles[2] == "consequence"
    # On a busy machine the two signals may lie further apart than 10 ms: still both are named.
    assert sorted({roles[1], roles[3]}) in (["cause"], ["also_failed", "cause"])


def test_f21_crash_leaves_its_python_stack(job: Job) -> None:
    script = """
    def here_it_is():
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(1)
    meet("up")
    here_it_is() if rank == 1 else time.sleep(1000)
    """
    done = job.run(script)
    assert done.code == 139
    assert "rank 1 (pid" in done.err
    assert "SIGSEGV" in done.err
    assert "here_it_is" in done.err


@contextlib.contextmanager
def control_group(controller: str, limits: dict[str, str]) -> Iterator[Path]:
    """A control group with limits for the duration of the block; skips where none can be made."""
    root = Path("/sys/fs/cgroup")
    if not (root / "cgroup.controllers").exists():  # version 1
        root = root / controller
    group = root / f"polyreme-test-{os.getpid()}"
    try:
        group.mkdir()
        for name, value in limits.items():
            (group / name).write_text(value)
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a limit can be made here: {error}")
    try:
        yield group
    finally:
        deadline = time.monotonic() + 2
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # busy until the last process is gone
                group.rmdir()
            time.sleep(0.02)


def run_in_group(
    group: Path, command: list[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *command],
        env=environment,
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )


def test_f29_out_of_memory_kill_is_told(job: Job) -> None:
    version_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    size = str(200 << 20)
    limits = {"memory.max": size, "memory.swap.max": "0"}
    with control_group("memory", limits if version_2 else {"memory.limit_in_bytes": size}) as group:
        script = "meet('up'); x = bytearray((300 << 20) * rank); time.sleep(1000)"
        command = job.command(script, num_ranks=2, arguments=())
        done = run_in_group(group, command, job.environment)
    assert done.returncode == 137
    assert re.search(
        r"rank 1 .* was ended by SIGKILL .*: out of memory, oom_kill=1,"
        r" peak RSS \d+ MiB of limit 200 MiB",
        done.stderr.decode(),
    )


def test_f84_limit_of_processes_is_named_and_nothing_half_starts(job: Job) -> None:
    with control_group("pids", {"pids.max": "5"}) as group:
        command = job.command("time.sleep(1000)", num_ranks=8, arguments=())
        done = run_in_group(group, command, job.environment)
        job.gone_after_s(2)
    assert done.returncode == 2
    assert re.search("cannot start rank [0-9]: .*RLIMIT_NPROC.*pids.max", done.stderr.decode())
