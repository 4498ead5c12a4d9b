"""Signals for commands that have temporary files or processes of their own."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program by an exception, so that what is temporary goes.

    What the parent ignores stays ignored, as under nohup.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    earlier = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in earlier.items():
        if handler == signal.SIG_DFL:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
