"""Waits for output of ranks, room in the launcher's own output, and signals: one thread."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from .sink import Sink, TerminalSink
from .streams import RankStream

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_READER_GONE = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal
_FLUSH_S = 10.0  # how long a reader of our output may stand still after the ranks are gone


class EventLoop:
    """Moves bytes from rank streams to the sinks, and turns signals into calls.

    `stdout` and `stderr` are one sink where both are terminals.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._selector = selectors.PollSelector()
        self._streams: list[RankStream] = []
        self._interrupted = False
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None where it was closed at the start
                stream.flush()
        self.stdout = TerminalSink(1) if os.isatty(1) else Sink(1)
        if os.isatty(1) and os.isatty(2):
            self.stderr = self.stdout
        else:
            self.stderr = TerminalSink(2) if os.isatty(2) else Sink(2)

    @property
    def sinks(self) -> list[Sink]:
        """The one or two different sinks."""
        return [self.stdout] if self.stdout is self.stderr else [self.stdout, self.stderr]

    def add_stream(self, stream: RankStream) -> None:
        """Reads `stream` from the next turn on, until `end_stream`."""
        self._streams.append(stream)

    def end_stream(self, stream: RankStream) -> None:
        """Takes what an ended rank left in its stream, and forgets it."""
        self._watch(stream.fd, selectors.EVENT_READ, stream.read_some, False)
        stream.drain()
        self._streams.remove(stream)

    def turn(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for anything to do, and does what can be done at once."""
        for stream in self._streams:
            wanted = stream.is_open and not stream.sink.full
            self._watch(stream.fd, selectors.EVENT_READ, stream.read_some, wanted)
        for sink in self.sinks:
            self._watch(sink.fd, selectors.EVENT_WRITE, sink.write_some, sink.pending)
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            key.data()

    def flush(self, patience_s: float = _FLUSH_S) -> bool:
        """Writes what is queued; False if it gave up, because nobody read for a while or on SIGINT."""
        self._interrupted = False
        deadline = time.monotonic() + patience_s
        written = 0
        while any(sink.pending for sink in self.sinks) and not self._interrupted:
            self.turn(deadline - time.monotonic())
            total = sum(sink.written_bytes for sink in self.sinks)
            if total > written:
                written, deadline = total, time.monotonic() + patience_s
            elif time.monotonic() >= deadline:
                break
        return not any(sink.pending for sink in self.sinks)

    def lost_output(self) -> list[str]:
        """Why output was lost, for each sink that failed; a reader that has gone wanted no more."""
        names = {self.stdout: "stdout", self.stderr: "stderr"}
        return [
            f"{names[sink]}: {sink.error.strerror}"
            for sink in self.sinks
            if sink.error is not None and sink.error.errno not in _READER_GONE
        ]

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, signals reach `on_signal` from `turn`. What the parent ignores stays ignored,
        as under nohup, except for SIGCHLD, without which no status could be read."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

        def noop(number: int, frame: FrameType | None) -> None:
            pass

        earlier_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        earlier = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, noop)}
        for number in (*FORWARDED, signal.SIGTSTP, signal.SIGWINCH):
            if signal.getsignal(number) != signal.SIG_IGN:
                earlier[number] = signal.signal(number, noop)
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._read_signals(reader))
        try:
            yield
        finally:
            self._selector.unregister(reader)
            for number, handler in earlier.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(earlier_wakeup)
            os.close(reader)
            os.close(writer)

    def close(self) -> None:
        """Closes all that the loop has opened or taken over."""
        for stream in list(self._streams):
            self.end_stream(stream)
        self._selector.close()
        for sink in self.sinks:
            sink.close()

    def _read_signals(self, reader: int) -> None:
        for number in os.read(reader, 512):
            self._interrupted = self._interrupted or number == signal.SIGINT
            self._on_signal(number)

    def _watch(self, fd: int, event: int, action: Callable[[], object], wanted: bool) -> None:
        watched = fd in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(fd, event, action)
        elif watched and not wanted:
            self._selector.unregister(fd)
