"""What lies in a directory of checkpoints: steps, `latest`, the lock, what an interrupted save has left.

    step-0000000100       a complete checkpoint
    latest                the name of the newest one
    .tmp-<step>-<id>      being written; stale if no save is in flight
    .old-<step>-<id>      a complete one that is being replaced by another save of its step
    .del-<step>-<id>      being deleted
    .lock                 held by rank 0 of the job that writes here

Only rank 0 of a job with the lock changes names here.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import stat
from pathlib import Path

from .. import _core
from ..errors import CheckpointError

__all__ = [
    "DirectoryLock",
    "clean",
    "commit",
    "complete_steps",
    "delete_step",
    "latest_step",
    "retain",
    "step_name",
]

MANIFEST = "manifest.json"
LATEST = "latest"
MAX_STEP = 10**18
_STEP = re.compile(r"step-([0-9]{10,19})\Z")
_LEFT_OVER = re.compile(r"\.(tmp|old|del)-([0-9]{10,19})-[0-9a-f]+\Z")
_LATEST_LEFT_OVER = re.compile(r"\.latest-[0-9a-f]+\Z")


def step_name(step: int) -> str:
    """The directory of a step, in order of steps when sorted as text up to ten digits."""
    return f"step-{step:010d}"


def hidden_name(kind: str, step: int, generation: str) -> str:
    """The name of a directory that is no checkpoint yet ("tmp") or no longer ("old", "del")."""
    return f".{kind}-{step:010d}-{generation}"


def place_of(directory: str) -> str:
    """A short name for a directory."""
    return hashlib.sha256(directory.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def complete_steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps of the complete checkpoints, ascending; none where there is no such directory."""
    steps = []
    for name in _names(os.fspath(directory)):
        match = _STEP.match(name)
        if match and name == step_name(int(match[1])) and _is_complete(os.path.join(directory, name)):
            steps.append(int(match[1]))
    return sorted(steps)


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """The step that `latest` names if that is complete, else the highest complete one, else None.

    Clocks have no say in it.
    """
    steps = complete_steps(directory)
    with contextlib.suppress(CheckpointError):
        match = _STEP.match(
            _core.read_flat_file(os.fspath(directory), LATEST, 100).decode("ascii", "replace").strip()
        )
        if match and int(match[1]) in steps:
            return int(match[1])
    return steps[-1] if steps else None


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"the checkpoints in '{directory}' cannot be listed: {error}") from error


def _is_complete(path: str) -> bool:
    try:
        inside = stat.S_ISDIR(os.lstat(path).st_mode)
        return inside and stat.S_ISREG(os.lstat(os.path.join(path, MANIFEST)).st_mode)
    except OSError:
        return False


# ---- changes, by rank 0 ----


def commit(files: _core.FileOps, directory: str, step: int, generation: str) -> None:
    """Makes the durable directory of `generation` visible as the checkpoint of `step`, and then `latest`.

    A left-over of that name, or an earlier checkpoint of the same step, is replaced.
    """
    temporary, name = hidden_name("tmp", step, generation), step_name(step)
    replaced = None
    if os.path.lexists(os.path.join(directory, name)):
        replaced = hidden_name("del", step, generation)
        if files.exchange(directory, temporary, name):
            files.rename(directory, temporary, replaced)
        else:
            old = hidden_name("old", step, generation)
            files.rename(directory, name, old)
            files.rename(directory, temporary, name)
            files.rename(directory, old, replaced)
    else:
        files.rename(directory, temporary, name)
    files.sync_directory(directory)
    write_latest(files, directory, step, generation)
    if replaced:
        remove_tree(files, directory, replaced)


def write_latest(files: _core.FileOps, directory: str, step: int, generation: str) -> None:
    """Points `latest` at `step` in one step."""
    temporary = f".latest-{generation}"
    files.write_file(directory, temporary, f"{step_name(step)}\n".encode())
    files.rename(directory, temporary, LATEST)
    files.sync_directory(directory)


def retain(files: _core.FileOps, directory: str, keep: int, newest: int) -> list[int]:
    """Deletes all complete checkpoints but the last `keep`, never `newest`; returns the deleted steps."""
    steps = complete_steps(directory)
    # Steps above the newest are those of a run that was taken up again from before them: the first to go, so that
    # what is left leads up to the newest.
    others = sorted((s for s in steps if s != newest), key=lambda s: (s < newest, s if s < newest else -s))
    doomed = others[: max(0, len(others) - (keep - 1))]
    for step in doomed:
        delete_step(files, directory, step)
    return doomed


def delete_step(files: _core.FileOps, directory: str, step: int) -> None:
    """Deletes a checkpoint: it is gone in one step, its files follow."""
    hidden = hidden_name("del", step, new_generation())
    files.rename(directory, step_name(step), hidden)
    files.sync_directory(directory)
    remove_tree(files, directory, hidden)


def remove_tree(files: _core.FileOps, directory: str, name: str) -> None:
    """Deletes a directory of files, or a file, without following links."""
    path = os.path.join(directory, name)
    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        files.remove_file(directory, name)
        return
    for entry in sorted(os.listdir(path)):
        inner = os.path.join(path, entry)
        if os.path.isdir(inner) and not os.path.islink(inner):
            raise CheckpointError(f"'{inner}' is a directory, which no checkpoint has: remove it")
        files.remove_file(path, entry)
    files.remove_directory(path)


def clean(files: _core.FileOps, directory: str) -> list[str]:
    """Removes what interrupted saves and deletions have left; returns the names. No save may be in flight."""
    removed = []
    for name in _names(directory):
        match = _LEFT_OVER.match(name)
        if match and match[1] == "old":
            # Killed between the two renames of a replacement: the old one is what there is.
            final = step_name(int(match[2]))
            if _is_complete(os.path.join(directory, name)) and not _is_complete(
                os.path.join(directory, final)
            ):
                remove_tree(files, directory, final)
                files.rename(directory, name, final)
                files.sync_directory(directory)
                continue
        if match or _LATEST_LEFT_OVER.match(name):
            remove_tree(files, directory, name)
            removed.append(name)
    return removed


def recover(files: _core.FileOps, directory: str) -> None:
    """Puts a complete checkpoint back that a killed job was replacing, where nobody writes now and this user may."""
    if any(match and match[1] == "old" for match in map(_LEFT_OVER.match, _names(directory))):
        with contextlib.suppress(CheckpointError):
            lock = DirectoryLock(directory)
            try:
                clean(files, directory)
            finally:
                lock.release()


def new_generation() -> str:
    """A random text, of 64 bits."""
    return os.urandom(8).hex()


class DirectoryLock:
    """One job may write into a directory of checkpoints at a time; ends with the process at the latest.

    Raises:
        CheckpointError: another job has it; names its host and pid.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, ".lock")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise CheckpointError(f"the lock '{self._path}' cannot be opened: {error}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 1000, 0).decode("utf-8", "replace").strip()
            os.close(self._fd)
            if not isinstance(error, BlockingIOError):
                raise CheckpointError(f"'{self._path}' cannot be locked: {error}") from error
            if holder == _who():
                raise CheckpointError(
                    f"this process has a Checkpointer that writes into '{directory}' already; call its close()"
                ) from None
            raise CheckpointError(
                f"another job writes checkpoints into '{directory}': {holder or 'it has not said who it is'};"
                " use a directory for each job, or end the other one"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, (_who() + "\n").encode(), 0)

    def release(self) -> None:
        """Twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _who() -> str:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid()})


def resolve(path: str | os.PathLike[str]) -> tuple[str, int]:
    """A checkpoint as (directory, step): of `runs/a` the latest step, of `runs/a/step-0000000100` that one.

    Raises:
        CheckpointError: there is none.
    """
    text = os.fspath(path).rstrip("/") or "/"
    match = _STEP.match(Path(text).name)
    if match and _is_complete(text):
        return os.path.dirname(text) or ".", int(match[1])
    step = latest_step(text)
    if step is None:
        raise CheckpointError(
            f"no committed checkpoint in '{text}'; expected a directory of step-... or one of them"
        )
    return text, step
