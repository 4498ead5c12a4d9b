"""Writes to the launcher's own stdout and stderr without ever blocking the event loop."""

from __future__ import annotations

import os
import select
import stat

_HIGH_WATER_BYTES = 1 << 20
_MAX_REDRAW_BYTES = 4096


class Sink:
    """A queue of bytes before a file descriptor.

    The descriptor is shared with other processes (the shell), so it must not be switched to
    non-blocking. A pipe that polls as writable takes `PIPE_BUF` bytes at once, a terminal at
    least some, so small writes after a poll do not block. While the queue is `full` the loop
    stops reading what feeds it: ranks then wait in their own write, and memory stays bounded.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.broken = False
        self.error: OSError | None = None  # what broke it
        self.written_bytes = 0
        self._queue = bytearray()
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def pending(self) -> bool:
        """Something waits to be written."""
        return bool(self._queue)

    @property
    def full(self) -> bool:
        """So much waits that no more should be put."""
        return len(self._queue) >= _HIGH_WATER_BYTES

    def put(self, data: bytes) -> None:
        """Queues `data`. Dropped if the reader has gone: a closed log must not end a training."""
        if not self.broken:
            self._queue += data

    def put_line(self, line: bytes) -> None:
        """Queues `line` and a newline."""
        self.put(line + b"\n")

    def passthrough(self, data: bytes) -> None:
        """Queues what a rank with a terminal of its own has printed, as it is."""
        self.put(data)

    def finish_line(self) -> None:
        """Moves below an unfinished line, where the sink knows of one."""

    def close(self) -> None:
        """Gives up what the sink opened; the descriptor that it was given stays open."""

    def write_some(self) -> None:
        """Writes what the descriptor takes now. Call it when the descriptor is writable."""
        for _ in range(16):
            if not self._queue:
                return
            size = len(self._queue) if self._is_file else min(len(self._queue), select.PIPE_BUF)
            try:
                written = os.write(self.fd, self._queue[:size])
            except BlockingIOError:  # somebody else made it non-blocking
                return
            except OSError as error:
                self.broken = True
                self.error = error
                self._queue.clear()
                return
            del self._queue[:written]
            self.written_bytes += written
            if not self._poll.poll(0):
                return


class TerminalSink(Sink):
    """A terminal on which rank 0 may be drawing a progress line.

    Lines of other ranks go above it: the unfinished line is erased, and drawn again below.
    """

    def __init__(self, fd: int) -> None:
        # A terminal that polls as writable may still take less than a write offers. Opened anew
        # it can be non-blocking for us alone.
        self._reopened = -1
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            self._reopened = os.open(os.ttyname(fd), flags)
        except OSError:
            pass
        super().__init__(fd if self._reopened < 0 else self._reopened)
        self._unfinished = b""

    def close(self) -> None:
        """Closes the descriptor that was opened anew."""
        if self._reopened >= 0:
            os.close(self._reopened)
            self._reopened = -1

    def put_line(self, line: bytes) -> None:
        """Queues a line of another rank, above an unfinished one."""
        if self._unfinished:
            self.put(b"\r\x1b[K" + line + b"\n" + self._unfinished)
        else:
            self.put(line + b"\n")

    def passthrough(self, data: bytes) -> None:
        """Queues what rank 0 draws, and remembers the line that it has not finished."""
        self.put(data)
        line = (self._unfinished + data).rpartition(b"\n")[2]
        # Only what follows the last return is visible; a return at the end moves the cursor.
        text = line.rstrip(b"\r")
        visible = text.rpartition(b"\r")[2] + line[len(text) :][:1]
        self._unfinished = visible if len(visible) <= _MAX_REDRAW_BYTES else b""

    def finish_line(self) -> None:
        """Leaves an unfinished line standing and moves below it."""
        if self._unfinished:
            self.put(b"\n")
            self._unfinished = b""
