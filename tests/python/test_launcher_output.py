"""The local launcher: output of the ranks, also when it does not arrive.

Real processes and real signals. Time limits only guard against hangs; they are far above what the launcher
needs.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_job import CLEAN, HANG_S, Job, Terminal

pytestmark = pytest.mark.mp

# --- output ---


def test_whole_lines_of_ranks_do_not_mix(job: Job) -> None:
    script = """
    for i in range(2000):
        stream = (sys.stdout, sys.stderr)[i % 2]
        for piece in (f"rank {rank} ", f"line {i} ", "x" * (i % 100)):
            stream.write(piece)
            stream.flush()
        stream.write("\\n")
    """
    done = job.run(script, num_ranks=3)
    assert done.code == 0
    for text, parity in ((done.out, 0), (done.err, 1)):
        per_rank: dict[str, list[int]] = {"0": [], "1": [], "2": []}
        for line in text.splitlines():
            match = re.fullmatch(r"\[(\d)\] rank (\d) line (\d+) (x*)", line)
            assert match, line
            assert match[1] == match[2]
            assert len(match[4]) == int(match[3]) % 100
            per_rank[match[1]].append(int(match[3]))
        assert all(numbers == list(range(parity, 2000, 2)) for numbers in per_rank.values())


def test_partial_last_line_is_written_with_a_newline(job: Job) -> None:
    done = job.run("sys.stdout.write(f'end of {rank}')")
    assert sorted(done.out.splitlines(keepends=True)) == ["[0] end of 0\n", "[1] end of 1\n"]


def test_json_lines_of_rank_0_stay_json(job: Job) -> None:
    done = job.run("print('{\"rank\": %d}' % rank)")
    assert sorted(done.out.splitlines()) == ['[1] {"rank": 1}', '{"rank": 0}']


def test_huge_line_is_split_and_memory_stays_bounded(job: Job) -> None:
    size = 40 << 20
    script = f"""
    if rank == 1:
        for _ in range({size >> 16}):
            os.write(1, b"y" * 65536)
        os.write(1, b"\\nend\\n")
        time.sleep(1000)
    """
    process = job.start(script)
    assert process.stdout is not None
    text = b""
    while not text.endswith(b"end\n"):
        text += os.read(process.stdout.fileno(), 1 << 20)
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s*(\d+) kB", status)
    process.terminate()
    job.wait(process)
    lines = text.splitlines()[:-1]
    assert all(line.startswith(b"[1] y") for line in lines)
    assert sum(len(line) - 4 for line in lines) == size
    assert max(len(line) for line in lines) <= (1 << 20) + 4
    assert peak
    assert int(peak[1]) < 60 << 10  # a bare launcher has about 20 MiB


def test_flooding_rank_does_not_block_others(job: Job) -> None:
    script = """
    if rank == 0:
        line = b"flood\\n" * 1000
        while True:
            os.write(1, line)
    for i in range(50):
        print("step", i)
    meet_file = os.environ["MEET"] + "/finished"
    open(meet_file, "w").close()
    time.sleep(1000)
    """
    process = job.start(script)
    assert process.stdout is not None
    seen = bytearray()
    deadline = time.monotonic() + HANG_S
    while b"[1] step 49\n" not in seen:
        assert time.monotonic() < deadline
        seen += process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
        del seen[:-200000]
    process.terminate()
    assert job.wait(process).code == 143


def test_reader_that_stands_still_does_not_stop_the_watch(job: Job) -> None:
    # Nobody reads stdout: the flood waits in the rank, the launcher still sees the failure.
    script = """
    if rank == 0:
        while True:
            os.write(1, b"flood\\n" * 1000)
    time.sleep(0.5)
    sys.exit(5)
    """
    process = job.start(script)
    assert process.stderr is not None
    assert b"rank 1 (pid" in process.stderr.readline()
    assert job.wait(process).code == 5


def test_closed_reader_does_not_end_the_job(job: Job) -> None:
    script = """
    meet("up")
    for i in range(2000):
        print("step", i)
    open(os.environ["MEET"] + f"/finished-{rank}", "w").close()
    """
    process = job.start(script)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(HANG_S) == 0
    job.wait_for("finished")


def test_log_files_hold_the_lines_without_marks(job: Job) -> None:
    folder = job.folder / "logs" / "deep"
    done = job.run("print('out', rank); print('err', rank, file=sys.stderr)", "--log-dir", str(folder))
    assert done.code == 0
    for rank in range(2):
        lines = (folder / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(lines) == [f"err {rank}", f"out {rank}"]


def test_rank_0_draws_its_progress_line_on_a_terminal(job: Job) -> None:
    script = """
    assert sys.stdout.isatty() == sys.stderr.isatty() == (rank == 0)
    if rank == 0:
        print("start")
        sys.stderr.write("\\rstep 1\\rstep 2")
        meet("drawn")
        time.sleep(0.3)
        sys.stderr.write("\\rstep 3")
        meet("said")
        print()
    else:
        meet("drawn")
        time.sleep(0.1)
        print("hello from 1")
        meet("said")
    """
    terminal = Terminal(job.command(script, num_ranks=2, arguments=()), job.environment)
    assert terminal.close() == 0
    assert terminal.shown.startswith(b"start\r\n\rstep 1\rstep 2")
    # The line of rank 1 replaces the progress line, which is drawn again below it.
    assert b"\r\x1b[K[1] hello from 1\r\nstep 2" in terminal.shown
    assert terminal.shown.endswith(b"\rstep 3\r\n")


def test_terminal_has_the_window_size_and_failures_are_reported_on_it(job: Job) -> None:
    script = """
    if rank == 0:
        print(tuple(os.get_terminal_size()))
        raise ValueError("boom")
    time.sleep(1000)
    """
    command = job.command(script, num_ranks=2, arguments=())
    terminal = Terminal(["sh", "-c", 'stty rows 33 cols 77; exec "$@"', "sh", *command], job.environment)
    assert terminal.close() == 1
    assert b"(77, 33)\r\n" in terminal.shown
    assert b"polyreme run: rank 0 (pid " in terminal.shown
    assert b"polyreme run:   ValueError: boom\r\n" in terminal.shown


def test_prefix_always_reads_rank_0_through_a_pipe(job: Job) -> None:
    command = job.command("print(sys.stdout.isatty())", "--prefix", "always", num_ranks=1, arguments=())
    terminal = Terminal(command, job.environment)
    assert terminal.close() == 0
    assert terminal.shown == b"[0] False\r\n"


# --- output that does not arrive ---


def run_with_stdout(stdout: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    with open(stdout, "wb") as file:
        return subprocess.run(
            [sys.executable, "-m", "polyreme", "run", *arguments],
            env=CLEAN,
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_S,
        )


def test_output_that_is_lost_makes_a_notice_and_an_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('text')\n")
    done = run_with_stdout("/dev/full", "-n", "2", str(script))
    assert done.returncode == 1
    assert f"lost on stdout: {os.strerror(errno.ENOSPC)}" in done.stderr
    script.write_text("print('text', flush=True)\nraise SystemExit(7)\n")
    assert run_with_stdout("/dev/full", "-n", "1", str(script)).returncode == 7


def test_a_closed_stdout_is_fine(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('text')\nprint('told', file=sys.stderr)\n")
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m polyreme run -n 2 "$1" >&- <&-', sys.executable, str(script)],
        env=CLEAN,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == ["[0] told", "[1] told"]
