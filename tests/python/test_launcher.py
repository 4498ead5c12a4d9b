"""The local launcher with real processes and real signals.

Time limits here only guard against hangs; they are far above what the launcher needs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2] / "python")
HANG_S = 20.0
pytestmark = pytest.mark.mp

# Variables of this process must not look like a launch.
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not re.match(r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|POLYREME_|OMP_NUM|OMPI_|PMI|SLURM_)", name)
}
CLEAN["PYTHON_COLORS"] = "0"  # tracebacks as they are in a pipe
CLEAN["PYTHONPATH"] = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))

# Waits until all ranks have come this far, without any runtime.
MEET = """
def meet(name):
    folder = os.environ["MEET"]
    open(f"{folder}/{name}-{rank}", "w").close()
    while not all(os.path.exists(f"{folder}/{name}-{r}") for r in range(world)):
        time.sleep(0.005)
"""
HEAD = f"""
import os, signal, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
{MEET}
"""


class Job:
    """Runs `polyreme run` on a script, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "meet").mkdir()
        self.environment = {**CLEAN, "MEET": str(folder / "meet")}
        self.running: list[subprocess.Popen[bytes]] = []

    def command(self, script: str, *options: str, num_ranks: int, arguments: tuple[str, ...]) -> list[str]:
        path = self.folder / "script.py"
        path.write_text(HEAD + textwrap.dedent(script))
        launcher = [sys.executable, "-m", "polyreme", "run", "-n", str(num_ranks), *options]
        return [*launcher, str(path), *arguments]

    def start(
        self, script: str, *options: str, num_ranks: int = 2, arguments: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self.command(script, *options, num_ranks=num_ranks, arguments=arguments),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def run(self, script: str, *options: str, num_ranks: int = 2, arguments: tuple[str, ...] = ()) -> Done:
        process = self.start(script, *options, num_ranks=num_ranks, arguments=arguments)
        return self.wait(process)

    def wait(self, process: subprocess.Popen[bytes]) -> Done:
        out, err = process.communicate(timeout=HANG_S)
        return Done(process.returncode, out.decode(), err.decode())

    def wait_for(self, name: str, num_ranks: int = 2) -> None:
        """Returns when all ranks have met under `name`."""
        deadline = time.monotonic() + HANG_S
        while not all((self.folder / "meet" / f"{name}-{r}").exists() for r in range(num_ranks)):
            assert time.monotonic() < deadline, f"ranks did not reach {name}"
            time.sleep(0.005)

    def processes(self) -> list[int]:
        """Processes of this job that are alive: they carry its folder in their environment."""
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{entry}/environ").read_bytes()
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                if f"MEET={self.folder}/meet".encode() in environment and state != "Z":
                    found.append(int(entry))
        return found

    def gone_after_s(self, limit_s: float = HANG_S) -> float:
        """Seconds until no process of the job is left."""
        start = time.monotonic()
        while left := self.processes():
            assert time.monotonic() - start < limit_s, f"left behind: {left}"
            time.sleep(0.01)
        return time.monotonic() - start


class Done:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def report(self) -> dict[str, object]:
        """The report of `--json`: the last line of stderr."""
        found = json.loads(self.err.splitlines()[-1])
        assert isinstance(found, dict)
        return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for process in made.running:
        if process.poll() is None:
            process.kill()
            process.communicate()
    with contextlib.suppress(AssertionError):
        made.gone_after_s(2)
    left = made.processes()
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind: {left}"


# --- what a rank finds ---


def test_environment_and_arguments_of_ranks(job: Job) -> None:
    script = """
    import json
    names = ("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT POLYREME_JOB_ID"
             " POLYREME_SECRET POLYREME_LAUNCHER POLYREME_STORE_FD").split()
    print(json.dumps([sys.argv[1:], {n: os.environ.get(n) for n in names}]))
    """
    done = job.run(script, "--prefix", "never", num_ranks=3, arguments=("--a", "b c", "-n", "--"))
    assert done.code == 0
    assert done.err == ""
    found = sorted((json.loads(line) for line in done.out.splitlines()), key=lambda f: f[1]["RANK"])
    assert [f[0] for f in found] == [["--a", "b c", "-n", "--"]] * 3
    for rank, (_, got) in enumerate(found):
        assert got["RANK"] == got["LOCAL_RANK"] == str(rank)
        assert got["WORLD_SIZE"] == got["LOCAL_WORLD_SIZE"] == "3"
        assert got["MASTER_ADDR"] == "127.0.0.1"
        assert got["POLYREME_LAUNCHER"] == "run"
        assert (got["POLYREME_STORE_FD"] is not None) == (rank == 0)
    for name in ("MASTER_PORT", "POLYREME_JOB_ID", "POLYREME_SECRET"):
        assert len({got[name] for _, got in found}) == 1
    assert re.fullmatch("[0-9a-f]{64}", found[0][1]["POLYREME_SECRET"])


def test_secret_is_on_no_command_line_and_in_no_report(job: Job) -> None:
    process = job.start(
        """
        if rank == 0:
            print(os.environ["POLYREME_SECRET"])
        meet("up")
        time.sleep(1000)
        """,
        "--json",
        "--prefix",
        "never",
    )
    job.wait_for("up")
    command_lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in job.processes()]
    process.terminate()
    done = job.wait(process)
    secret = done.out.strip()
    assert len(command_lines) >= 3
    assert secret
    assert all(secret.encode() not in line for line in command_lines)
    assert secret not in done.err


def test_rank_0_inherits_the_listening_socket(job: Job) -> None:
    done = job.run(
        """
        import socket
        port = int(os.environ["MASTER_PORT"])
        if rank == 0:
            listener = socket.socket(fileno=int(os.environ["POLYREME_STORE_FD"]))
            assert listener.getsockname() == ("127.0.0.1", port)
            connection, _ = listener.accept()
            print(connection.recv(100).decode())
        else:
            # Nobody has to retry: the socket listens before any rank exists.
            socket.create_connection(("127.0.0.1", port)).sendall(b"from rank 1")
        """
    )
    assert (done.code, done.out, done.err) == (0, "[0] from rank 1\n", "")


def test_o_fl_09_jobs_started_at_once_get_ports_of_their_own(job: Job) -> None:
    script = 'print(os.environ["MASTER_PORT"]); meet(os.environ["POLYREME_JOB_ID"])'
    processes = [job.start(script, "--prefix", "never") for _ in range(6)]
    ports = [set(job.wait(process).out.split()) for process in processes]
    assert all(len(found) == 1 for found in ports)
    assert len(set.union(*ports)) == 6


def test_o_fl_09_f06_port_of_a_foreign_listener_is_refused(job: Job) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        done = job.run("print('started')", "--port", str(port))
    assert done.code == 2
    assert done.out == ""
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.err


def test_explicit_port(job: Job) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = job.run('print(os.environ["MASTER_PORT"])', "--port", str(port), num_ranks=1)
    assert done.out == f"{port}\n"


def test_cpu_shares(job: Job) -> None:
    cpus = len(os.sched_getaffinity(0))
    script = """
    import json
    print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ["POLYREME_NUM_THREADS"],
                      os.environ["OMP_NUM_THREADS"]]))
    """
    for num_ranks in (2, cpus + 1):
        done = job.run(script, "--prefix", "never", num_ranks=num_ranks)
        found = [json.loads(line) for line in done.out.splitlines()]
        shares = [cpu for share, _, _ in found for cpu in share]
        threads = {int(value) for _, *values in found for value in values}
        assert len(found) == num_ranks
        if num_ranks > cpus:
            assert threads == {1}
            assert len(shares) == cpus * num_ranks
        elif len(set(shares)) == len(shares):
            assert threads == {len(shares) // num_ranks}
        else:
            pytest.skip("a CPU quota below the CPUs: no binding here")


def test_modules_and_exit_codes(job: Job) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "polyreme", "run", "-n", "2", "-m", "platform", "--terse"],
        env=job.environment,
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert process.returncode == 0
    assert re.fullmatch(rb"(\[[01]\] Linux.*\n){2}", process.stdout)
    assert job.run("sys.exit(3 if rank == 1 else 0)").code == 3
    assert job.run("meet('up'); os.abort() if rank == 1 else time.sleep(100)").code == 134


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "x.py"], "the number of ranks is 0; give -n 1 or more"),
        (["-n", "2", "absent.py"], "script 'absent.py' does not exist"),
        (["-n", "2"], "no script given"),
        (["-n", "two", "x.py"], "invalid int value: 'two'"),
        (["x.py"], "-n/--num-ranks"),
    ],
)
def test_arguments_are_checked_first(arguments: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polyreme", "run", *arguments],
        env=CLEAN,
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr.decode()


def test_o_fl_08_launch_inside_a_launch_is_refused(job: Job) -> None:
    job.environment.update(RANK="0", WORLD_SIZE="2")
    done = job.run("print('started', rank, world)")
    assert done.code == 2
    assert "RANK=0, WORLD_SIZE=2" in done.err
    assert "--nested" in done.err
    done = job.run("print('started', rank, world)", "--nested")
    assert sorted(done.out.splitlines()) == ["[0] started 0 2", "[1] started 1 2"]


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


class Terminal:
    """Runs a command on a pseudo-terminal and collects what it shows."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = b""

    def read_until(self, wanted: bytes | None) -> bytes:
        deadline = time.monotonic() + HANG_S
        while wanted is None or wanted not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if not select.select([self.ours], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self.ours, 65536)
            except OSError:
                break
            if not data:
                break
            self.shown += data
        return self.shown

    def close(self) -> int:
        self.read_until(None)
        os.close(self.ours)
        return self.process.wait(HANG_S)


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
