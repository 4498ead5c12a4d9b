"""Runs `polyreme run` on small scripts, for the tests of the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2] / "python")
HANG_S = 20.0

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

    def end(self) -> None:
        """Ends what still runs. Fails if a process of the job outlives its launcher."""
        for process in self.running:
            if process.poll() is None:
                process.kill()
                process.communicate()
        with contextlib.suppress(AssertionError):
            self.gone_after_s(2)
        left = self.processes()
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"left behind: {left}"


class Done:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def report(self) -> dict[str, object]:
        """The report of `--json`: the last line of stderr."""
        found = json.loads(self.err.splitlines()[-1])
        assert isinstance(found, dict)
        return found


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
