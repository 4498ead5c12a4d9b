"""Cuts what ranks print into lines and marks each with its rank. Pure."""

from __future__ import annotations

MAX_LINE_BYTES = 1 << 20


class LineSplitter:
    """Cuts a byte stream into lines, with bounded memory.

    A line without end is cut after `max_line_bytes` (a little earlier where the cut would fall
    inside a UTF-8 character). A carriage return is an ordinary byte.
    """

    def __init__(self, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        if max_line_bytes < 8:
            raise ValueError(f"max_line_bytes is {max_line_bytes}; give 8 or more")
        self._max = max_line_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Lines that `data` completes, without their newline."""
        lines: list[bytes] = []
        pieces = data.split(b"\n")
        for piece in pieces[:-1]:
            if not self._pending and len(piece) <= self._max:
                lines.append(piece)
                continue
            self._extend(piece, lines)
            lines.append(bytes(self._pending))
            self._pending.clear()
        self._extend(pieces[-1], lines)
        return lines

    def finish(self) -> list[bytes]:
        """The last line if it has no newline; the stream is over."""
        rest = [bytes(self._pending)] if self._pending else []
        self._pending.clear()
        return rest

    def _extend(self, piece: bytes, lines: list[bytes]) -> None:
        self._pending += piece
        while len(self._pending) > self._max:
            cut = self._max
            while cut > self._max - 4 and self._pending[cut] & 0xC0 == 0x80:
                cut -= 1
            lines.append(bytes(self._pending[:cut]))
            del self._pending[:cut]


def mark_line(line: bytes, *, rank: int, num_ranks: int, mode: str) -> bytes:
    """`line` with `[rank] ` before it, as `mode` says.

    always: every line. never: none. auto: every line of a launch with several ranks, except
    lines of rank 0 that start with `{`, so that its JSON lines stay readable by a program.
    """
    if mode == "never":
        return line
    if mode == "auto" and (num_ranks == 1 or (rank == 0 and line.startswith(b"{"))):
        return line
    return b"[%d] %s" % (rank, line)
