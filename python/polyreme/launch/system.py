"""Small dealings with the system: the store's socket, shared memory, a file in one piece."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket

from ..environment.memory_segment import SHARED_MEMORY
from .config import LaunchError
from .env import MASTER_ADDR


def listen(port: int, num_ranks: int) -> socket.socket:
    """The store's listening socket, which rank 0 inherits."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port != 0:
            # Only past connections that linger; a live listener still makes bind fail.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((MASTER_ADDR, port))
        listener.listen(max(128, 2 * num_ranks))
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen on {MASTER_ADDR}:{port}: {error.strerror}; choose another port,"
            " or leave --port out to get a free one"
        ) from error
    return listener


def remove_segments(prefix: str, *, keep: str = "") -> tuple[str, ...]:
    """Removes the shared-memory segments of a job, but not `keep`; returns those that stay, with the reason."""
    left = []
    for path in glob.glob(f"{SHARED_MEMORY}/{prefix}*"):
        if path == keep:
            continue
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except OSError as error:
            left.append(f"{path}: {error}")
    return tuple(left)


def write_whole(path: str, text: str) -> None:
    """Writes a file that is never seen in part. Raises OSError."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
