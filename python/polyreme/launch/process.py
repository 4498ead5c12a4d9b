"""One rank as a process: start it, signal it, learn how it ended."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .config import LaunchConfig, LaunchError

_FOLDER = os.path.dirname(os.path.abspath(__file__))
# -I -S: no user code and no site-packages, so that a helper starts in milliseconds.
_BARE_PYTHON = (sys.executable, "-I", "-S")


@dataclass(frozen=True)
class Ended:
    """code: exit status, or minus the signal. peak_rss_bytes: largest resident memory seen."""

    code: int
    peak_rss_bytes: int


class RankProcess:
    """A running rank, leader of a session of its own; nothing else waits for it.

    Until `reap` the dead leader keeps its process group's number taken, so `kill_group` cannot
    hit a stranger.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        rank: int,
        cpus: tuple[int, ...] | None,
        stdin: int | None,
        stdout: int,
        stderr: int,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        self.rank = rank
        cpu_list = "-" if cpus is None else ",".join(str(cpu) for cpu in cpus)
        wrapper = (*_BARE_PYTHON, os.path.join(_FOLDER, "_child.py"), str(os.getpid()), cpu_list)
        try:
            self._popen = subprocess.Popen(
                (*wrapper, *command),
                env=dict(environment),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(_start_failure(rank, error)) from error
        self.pid = self._popen.pid

    def send(self, number: int) -> None:
        """Sends a signal to the rank; SIGKILL to all of its process group."""
        if number == signal.SIGKILL:
            self.send_group(number)
        else:
            os.kill(self.pid, number)

    def send_group(self, number: int) -> None:
        """Sends a signal to the rank and to what it has forked."""
        os.killpg(self.pid, number)

    def ended(self) -> bool:
        """The rank has ended and waits to be reaped."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None

    def reap(self) -> Ended:
        """Kills what is left of the process group, then collects the status."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        self._popen.returncode = code  # it must not wait for a pid that is free again
        return Ended(code=code, peak_rss_bytes=usage.ru_maxrss * 1024)


class Guard:
    """A helper process that cleans up if this one is killed (see `_guard.py`)."""

    def __init__(self, segment_prefix: str) -> None:
        try:
            self._popen = subprocess.Popen(
                (*_BARE_PYTHON, os.path.join(_FOLDER, "_guard.py"), segment_prefix),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(_start_failure(None, error)) from error

    def watch(self, group: int) -> None:
        """Has this process group killed if the launcher is."""
        self._tell(f"{group}\n")

    def forget(self, group: int) -> None:
        """It has ended: its number may become another's."""
        self._tell(f"-{group}\n")

    def dismiss(self) -> None:
        """Ends the guard: everything has been cleaned up."""
        self._tell("done\n")
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        self._popen.wait()

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(line.encode("ascii"))
            self._popen.stdin.flush()
        except OSError:
            pass  # somebody ended the guard: the launch goes on without it


def rank_command(config: LaunchConfig) -> tuple[str, ...]:
    """What a rank executes: unbuffered Python with the script or module and its arguments."""
    module = ("-m",) if config.module else ()
    return (sys.executable, "-u", *module, *config.command)


def _start_failure(rank: int | None, error: OSError) -> str:
    what = "the launcher's guard" if rank is None else f"rank {rank}"
    text = f"cannot start {what}: {error}"
    if error.errno == errno.EAGAIN:
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        text += (
            f"; the limit of processes and threads is reached (RLIMIT_NPROC {limit}, or pids.max"
            " of the control group): raise it (ulimit -u) or start fewer ranks"
        )
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        text += f"; too many open files (RLIMIT_NOFILE {soft}): raise it (ulimit -n)"
    elif error.errno == errno.ENOMEM:
        text += "; the machine is out of memory: start fewer ranks"
    return text + ". Ranks started before it have been killed"
