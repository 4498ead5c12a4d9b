"""torchrun's own store, through which rank 0 tells where it listens.

The agent owns MASTER_PORT and serves PyTorch's TCPStore there. Only its client is used.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

from ..errors import CommError, NotAvailable, Timeout

_POLL_S = 0.1


class AgentStore:
    """Connects, and gives up after limit_s in all. `key` names this attempt of this job.

    Raises:
        CommError: nobody serves there.
        NotAvailable: PyTorch is installed, but cannot be imported.
    """

    def __init__(self, host: str, port: int, key: str, limit_s: float) -> None:
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]
        except ImportError as error:  # the other ranks may have it: no other way is tried
            raise NotAvailable(
                f"torchrun's store at MASTER_ADDR={host} MASTER_PORT={port} is asked by PyTorch, which is"
                f" installed, but cannot be imported: {error}"
            ) from error
        self._where = f"torchrun's store at MASTER_ADDR={host} MASTER_PORT={port}, key {key!r}"
        self._key = key
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        limit = timedelta(seconds=limit_s)
        try:
            self._store = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            raise CommError(f"{self._where}: {error}") from error

    @contextlib.contextmanager
    def told(self, host: str, port: int) -> Iterator[None]:
        """Rank 0: tells where it listens; takes it back after the body."""
        try:
            self._store.set(self._key, f"{host} {port}")
        except RuntimeError as error:
            raise CommError(f"{self._where}: {error}") from error
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # the agent may be gone, and the key with it
                self._store.delete_key(self._key)

    def ask(self) -> tuple[str, int]:
        """Other ranks: host and port, as soon as rank 0 has told them and listens there: one that was killed in an
        earlier attempt could not take back what it told.

        Raises:
            Timeout: it did not within the limit.
        """
        while True:
            host, port = self._told_last()
            left_s = self._deadline - time.monotonic()
            try:
                socket.create_connection((host, port), timeout=max(0.001, left_s)).close()
            except OSError as error:
                if left_s <= _POLL_S:
                    raise Timeout(
                        f"rank 0 does not listen at {host}:{port}, as it told through {self._where}: {error}"
                    ) from error
                time.sleep(_POLL_S)
            else:
                return host, port

    def _told_last(self) -> tuple[str, int]:
        left_s = max(0.001, self._deadline - time.monotonic())
        try:
            self._store.set_timeout(timedelta(seconds=left_s))
            text = self._store.get(self._key).decode("ascii")
        except RuntimeError as error:
            raise Timeout(
                f"rank 0 has not told its port within {self._limit_s:g} s through {self._where}: {error}"
            ) from error
        host, _, port = text.rpartition(" ")
        if not port.isdigit():
            raise CommError(f"{self._where}: {text[:80]!r} is no host and port")
        return host, int(port)
