"""How rank 0 tells the ranks of its host where it listens, when the launcher has named no port.

One file per job, of mode 0600, in a folder of the user of mode 0700; it exists while the ranks meet.
Its name is that of the job, its content names the process that wrote it: what a process has left that
lives no longer is not believed, so that a job that reuses a name does not meet a dead one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import CommError, InvalidArgument, Timeout

_MAX_BYTES = 4096
_POLL_S = 0.02
_PROGRESS_S = 2.0
_REMEDY = "set MASTER_ADDR and MASTER_PORT for all ranks"


@dataclass(frozen=True, kw_only=True)
class Told:
    """What rank 0 tells. secret: empty if all ranks have it from elsewhere."""

    host: str
    port: int
    secret: str = field(repr=False)


@contextlib.contextmanager
def told(job_id: str, what: Told) -> Iterator[None]:
    """Rank 0: the file exists during the body. The folder goes with the last file in it.

    Raises:
        InvalidArgument: the folder is not private, or another rank 0 of this job lives.
        CommError: the file cannot be written.
    """
    path = _folder()
    content = {"pid": os.getpid(), "start": start_of(os.getpid()), **vars(what)}
    try:
        folder = _write(path, job_id, json.dumps(content).encode())
    except OSError as error:
        raise CommError(f"rank 0 cannot write {path}/{job_id}: {error.strerror}; {_REMEDY}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(job_id, dir_fd=folder)
        os.close(folder)
        with contextlib.suppress(OSError):  # files of other jobs
            os.rmdir(path)


def wait_for(job_id: str, limit_s: float) -> Told:
    """Other ranks: what rank 0 tells, as soon as it does.

    Raises:
        Timeout: it did not within limit_s.
        InvalidArgument: folder or file are not private.
        CommError: they cannot be read.
    """
    path = _folder()
    start = time.monotonic()
    next_progress_s = _PROGRESS_S
    while True:
        found = _read_living(path, job_id)
        if found is not None:
            return found
        waited_s = time.monotonic() - start
        if waited_s >= limit_s:
            raise Timeout(
                f"rank 0 has not told where it listens within {limit_s:g} s: no file {path}/{job_id} of a"
                f" living process; if the ranks do not share this folder, {_REMEDY}"
            )
        if waited_s >= next_progress_s:
            next_progress_s += _PROGRESS_S
            logging.getLogger("polyreme").warning("rendezvous: waiting for rank 0 (file %s/%s)", path, job_id)
        time.sleep(_POLL_S)


def launcher_identity(rank_variables: tuple[str, ...]) -> str:
    """A name of the process on this host that started the ranks, equal for all of them.

    It is the nearest ancestor whose environment differs in `rank_variables`: between it and a rank
    may be shells. Empty without variables.
    """
    if not rank_variables:
        return ""
    own = [os.environ.get(name) for name in rank_variables]
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                pairs = [os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0")]
        except OSError:  # a daemon of another user is no rank
            break
        variables = {name: value for name, _, value in pairs}
        if [variables.get(name) for name in rank_variables] != own:
            break
        pid = int(_stat_fields(pid)[1])
    return f"launcher-{pid}-{start_of(pid)}"


def why_not_private(info: os.stat_result) -> str:
    """What is wrong with a file that must be this user's own; empty if nothing."""
    if not stat.S_ISREG(info.st_mode):
        return "is no regular file"
    return why_not_ours(info)


def why_not_ours(info: os.stat_result) -> str:
    """What is wrong with a file or folder that must be private; empty if nothing."""
    if info.st_uid != os.geteuid():
        return f"belongs to user {info.st_uid}, not to user {os.geteuid()}"
    if info.st_mode & 0o077:
        return f"is open to other users (mode {stat.S_IMODE(info.st_mode):04o})"
    return ""


def _folder() -> str:
    """The same on all ranks of a host, which have their environment from one launcher."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):  # Slurm carries the name to hosts that have no such folder
        if os.path.isabs(runtime) and not why_not_ours(os.stat(runtime)):
            return os.path.join(runtime, "polyreme")
    return os.path.join(tempfile.gettempdir(), f"polyreme-{os.geteuid()}")


def _open_folder(path: str) -> int:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if problem := why_not_ours(os.fstat(folder)):
        os.close(folder)
        raise InvalidArgument(
            f"folder {path} {problem}; the ranks would meet there. Remove it, set XDG_RUNTIME_DIR or TMPDIR"
            f" to a private folder, or {_REMEDY}"
        )
    return folder


def _write(path: str, name: str, content: bytes) -> int:
    """Makes the file appear in full or not at all; returns the open folder."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            folder = _open_folder(path)
        except FileNotFoundError:  # the end of another job has just removed it
            continue
        try:
            _remove_dead(folder)
            _write_into(folder, path, name, content)
            return folder
        except FileNotFoundError:
            os.close(folder)
        except BaseException:
            os.close(folder)
            raise


def _write_into(folder: int, path: str, name: str, content: bytes) -> None:
    new = f"{name}.{os.getpid()}.new"
    fd = os.open(
        new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
    )
    try:
        with open(fd, "wb") as file:
            file.write(content)
        # Unlike a rename this replaces nothing: a second rank 0 of the same name is found out.
        os.link(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError:
        raise InvalidArgument(
            f"two processes are rank 0 of job {name}: this one, pid {os.getpid()}, and the writer of"
            f" {path}/{name}; give each job its own POLYREME_JOB_ID, or remove the file"
        ) from None
    finally:
        os.unlink(new, dir_fd=folder)


def _remove_dead(folder: int) -> None:
    """Removes files whose writers live no longer: jobs that were killed while they met."""
    for name in os.listdir(folder):
        with contextlib.suppress(OSError, InvalidArgument):
            if _read(folder, name) is None:
                os.unlink(name, dir_fd=folder)


def _read_living(path: str, name: str) -> Told | None:
    try:
        folder = _open_folder(path)
        try:
            return _read(folder, name)
        finally:
            os.close(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommError(f"cannot read {path}/{name}: {error.strerror}; {_REMEDY}") from None


def _read(folder: int, name: str) -> Told | None:
    """None if its writer lives no longer."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(fd, "rb") as file:
        if problem := why_not_private(os.fstat(fd)):
            raise InvalidArgument(f"file {name}, in which rank 0 tells where it listens, {problem}")
        text = file.read(_MAX_BYTES)
    try:
        content = json.loads(text)
        pid, start = int(content["pid"]), str(content["start"])
        what = Told(host=str(content["host"]), port=int(content["port"]), secret=str(content["secret"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidArgument(f"file {name} is not what rank 0 writes; remove it") from None
    return what if start_of(pid) == start else None


def start_of(pid: int) -> str:
    """When the process started, in ticks since boot, and which boot; empty if it does not live."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read(8)
        return f"{_stat_fields(pid)[19]}-{boot}"
    except OSError:
        return ""


def _stat_fields(pid: int) -> list[str]:
    """Fields 3 and later of /proc/PID/stat; the second, a name, may hold anything."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
