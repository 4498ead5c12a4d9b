"""What the launcher reads from a rank: pipes, or a terminal of its own for rank 0."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections import deque
from collections.abc import Callable

from .output import LineSplitter, mark_line
from .sink import Sink

_READ_BYTES = 1 << 16
# More than a pipe holds by default; a process that outlives its rank may go on writing.
_DRAIN_BYTES = 1 << 21
_TAIL_LINES = 20
_TAIL_LINE_BYTES = 2000


class RankLog:
    """`rank-K.log`: the lines of both streams of a rank, unmarked. Errors end the log only."""

    def __init__(self, path: str, on_error: Callable[[str], None]) -> None:
        self._on_error = on_error
        self._path = path
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  (lives as long as the rank)

    def write(self, lines: list[bytes]) -> None:
        """Appends lines, each with a newline."""
        if self._file.closed:
            return
        data = memoryview(b"\n".join(lines) + b"\n")
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._on_error(f"cannot write {self._path}: {error}; this log ends here")
            self.close()

    def close(self) -> None:
        """Ends the log; later lines are dropped."""
        self._file.close()


class RankStream:
    """The reading end of one stream of a rank; where its lines go."""

    def __init__(
        self,
        fd: int,
        *,
        rank: int,
        num_ranks: int,
        prefix: str,
        sink: Sink,
        is_terminal: bool,
        log: RankLog | None,
        tail: deque[bytes] | None,
    ) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.sink = sink
        self.is_open = True
        self._rank, self._num_ranks, self._prefix = rank, num_ranks, prefix
        self._is_terminal = is_terminal
        self._log, self._tail = log, tail
        self._splitter = LineSplitter()

    def read_some(self) -> int:
        """Reads what is there, up to a limit that leaves other ranks their turn.

        Returns the bytes read; 0 if there are none now or the stream has ended (`is_open`).
        """
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # a terminal whose other side is closed answers EIO
            data = b""
        if not data:
            self._close()
            return 0
        if self._is_terminal:
            self.sink.passthrough(data)
        self._take(self._splitter.feed(data))
        return len(data)

    def drain(self) -> None:
        """Reads what an ended rank left behind, and closes the stream."""
        taken = 0
        while self.is_open and taken < _DRAIN_BYTES:
            size = self.read_some()
            if size == 0:
                break
            taken += size
        self._close()

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            os.close(self.fd)
            self._take(self._splitter.finish())

    def _take(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._log is not None:
            self._log.write(lines)
        if self._tail is not None:
            self._tail.extend(line[:_TAIL_LINE_BYTES] for line in lines[-_TAIL_LINES:])
        if self._is_terminal:
            return
        for line in lines:
            self.sink.put_line(mark_line(line, rank=self._rank, num_ranks=self._num_ranks, mode=self._prefix))


def new_tail() -> deque[bytes]:
    """Keeps the last lines of a rank for the report."""
    return deque(maxlen=_TAIL_LINES)


def open_terminal(like: int) -> tuple[int, int]:
    """A pseudo-terminal of the size of terminal `like`: (our end, the rank's end).

    The output passes unchanged, since the real terminal does the newline translation.
    """
    ours, theirs = pty.openpty()
    modes = termios.tcgetattr(theirs)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    copy_window_size(like, ours)
    return ours, theirs


def copy_window_size(source: int, target: int) -> None:
    """Gives terminal `target` the size of terminal `source`, if that has one."""
    try:
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)
    except OSError:
        pass
