"""The one thing that may outlive a rank: a private folder in shared memory, for copies of the newest state.

It belongs to the process that starts the ranks again, whose name it bears (pid, start, boot): `polyreme run` makes it
and removes it, or its guard does. torchrun knows nothing of it: there the first rank of each host makes it in the name
of the agent, and a guard of its own removes it when that process ends. What is left even so, after a guard was
killed, is removed by the next job of the user on that host.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping

from ..errors import InvalidArgument
from .private_file import launcher_identity, start_of, why_not_ours

__all__ = ["MEMORY", "SHARED_MEMORY", "create", "find", "free_bytes", "job_of"]

SHARED_MEMORY = "/dev/shm"
MEMORY = "POLYREME_MEMORY"  # what `polyreme run` tells its ranks
_NAME = re.compile(r"polyreme-(.+)-memory-([0-9]+)-([0-9]+-[0-9a-f]+)\Z")
_GUARD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_segment_guard.py")


def create(job: str, owner: int) -> str:
    """The segment of a job that ends with process `owner`; an existing one stays as it is.

    Raises:
        OSError: it cannot be made.
        InvalidArgument: something else is there, or it is open to other users.
    """
    _remove_stale()
    path = os.path.join(SHARED_MEMORY, f"polyreme-{job}-memory-{owner}-{start_of(owner)}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    _check(path)
    return path


def find(environ: Mapping[str, str]) -> tuple[str, str]:
    """(path, "") of this job's segment on this host, or ("", why there is none). One rank of each host calls it: it
    is made where the launcher has not."""
    remedy = "use `polyreme run --restarts N`, or torchrun --max-restarts N"
    if path := environ.get(MEMORY, ""):
        _check(path)
        return path, ""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return "", f"nobody starts the ranks again, so copies in memory would be of no use; {remedy}"
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return "", "torchrun was started with --max-restarts 0, so copies in memory would be of no use"
    # torchrun's run id may be "none" for every job of a host: its process tells them apart.
    identity = launcher_identity(("RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    owner = int(identity.split("-")[1])
    try:
        path = create(identity, owner)
        _start_guard(owner, path)
    except OSError as error:
        return "", f"shared memory cannot be used: {error}"
    return path, ""


def job_of(path: str) -> str:
    """The name of the job whose segment it is."""
    match = _NAME.match(os.path.basename(path))
    return match[1] if match else ""


def free_bytes(path: str) -> int:
    """What may be written there: the room of the file system, and no more than the memory that is available."""
    room = os.statvfs(path)
    free = room.f_bavail * room.f_frsize
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    return free


def _check(path: str) -> None:
    try:
        info = os.lstat(path)
    except OSError as error:
        raise InvalidArgument(
            f"the memory segment '{path}' of this job is not there: {error.strerror}"
        ) from None
    problem = "is no folder" if not stat.S_ISDIR(info.st_mode) else why_not_ours(info)
    if problem:
        raise InvalidArgument(f"the memory segment '{path}' {problem}; remove it")


def _remove_stale() -> None:
    """Removes what jobs of this user have left whose owner lives no longer."""
    for name in os.listdir(SHARED_MEMORY):
        match = _NAME.match(name)
        if match is None or start_of(int(match[2])) == match[3]:
            continue
        path = os.path.join(SHARED_MEMORY, name)
        with contextlib.suppress(OSError):
            info = os.lstat(path)
            if stat.S_ISDIR(info.st_mode) and not why_not_ours(info):
                shutil.rmtree(path, ignore_errors=True)


def _start_guard(owner: int, path: str) -> None:
    with contextlib.suppress(FileExistsError):
        # Once for a job, though the ranks are started several times.
        os.close(os.open(os.path.join(path, ".guard"), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        # Its parent may end before it: nobody waits for it.
        subprocess.Popen(
            (sys.executable, "-I", "-S", _GUARD, str(owner), path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
