"""Reads the journals of collectives that ranks write (csrc/comm/journal.h has the layout).

A journal is data of a process that may have been killed at any moment, in a directory that others may have
put files into: sizes are checked and capped before memory is taken, text is cleaned for terminals.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Group", "Journal", "JournalError", "Note", "clean", "read_directory", "read_journal"]

_MAGIC = b"PLYJRNL\n"
_VERSION = 2
_LARGEST = {"max_groups": 1 << 12, "max_events": 1 << 12, "num_slots": 1 << 20}
_NO_PARENT = 0xFFFFFFFF
_NOTE_KINDS = {1: "stall", 2: "failure"}

_HEADER = np.dtype(
    [
        ("magic", "S8"),
        *((name, "<u4") for name in ("version", "header_bytes", "group_bytes", "max_groups")),
        *((name, "<u4") for name in ("event_bytes", "max_events", "operation_bytes", "num_slots")),
        *((name, "<i4") for name in ("rank", "world_size")),
        *((name, "<i8") for name in ("pid", "start_ns", "wall_offset_ns")),
        *(("host", "S64"), ("boot_id", "S40"), ("job_id", "S104")),
        *(("operation_names", "S16", 32), ("dtype_names", "S12", 16)),
        *(("reduction_names", "S12", 8), ("state_names", "S12", 8)),
        ("num_operations", "<u8"),
        *((name, "<u4") for name in ("num_groups", "num_events")),
        *((name, "<i8") for name in ("heard_ns", "ended_ns")),
    ],
    align=True,
)
_GROUP = np.dtype(
    [
        *(("name", "S64"), ("rank", "<i4"), ("size", "<i4"), ("parent", "<u4"), ("color", "<i4")),
        *(("split_sequence", "<u8"), ("ready", "<u4"), ("reserved", "<u4")),
    ]
)
_EVENT = np.dtype(
    [("kind", "<u4"), ("reserved", "<u4"), ("time_ns", "<i8"), ("duration_ns", "<i8"), ("text", "S488")]
)
_OPERATION = np.dtype(
    [
        *((name, "<u8") for name in ("mark", "sequence")),
        *((name, "<i8") for name in ("count", "num_bytes", "enqueued_ns", "started_ns", "ended_ns")),
        *(("group", "<u4"), ("root", "<i4")),
        *((name, "u1") for name in ("operation", "dtype", "reduction", "state")),
        *(("label", "S32"), ("num_parts", "<u4"), ("counts_hash", "<u8"), ("parts", "<i4", 4)),
    ]
)
# Operations that carry no elements.
_WITHOUT_DATA = {"nothing", "attach", "barrier", "split"}


class JournalError(Exception):
    """A file is no journal, or a broken one; the text says why."""


@dataclass(frozen=True)
class Group:
    """A group as one rank knows it.

    key: the same for the same group on all ranks; None where it cannot be told apart from others.
    """

    name: str
    rank: int
    size: int
    key: tuple[Any, ...] | None


@dataclass(frozen=True)
class Note:
    """kind: "stall" or "failure". Times are of CLOCK_MONOTONIC."""

    kind: str
    text: str
    time_ns: int
    duration_ns: int


@dataclass
class Journal:
    """What one rank wrote.

    operations: structured array, oldest first, of what the ring still holds. state, operation, dtype and
    reduction are indices into the names. num_broken: operations that were half-written.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    boot_id: str
    job_id: str
    start_ns: int
    wall_offset_ns: int
    heard_ns: int
    ended_ns: int
    groups: list[Group]
    notes: list[Note]
    operations: NDArray[Any]
    num_operations: int
    num_broken: int
    names: dict[str, list[str]] = field(repr=False)

    def name(self, kind: str, number: int) -> str:
        """The name of a number; kind: "operation", "dtype", "reduction" or "state"."""
        names = self.names[kind]
        return names[number] if number < len(names) and names[number] else f"{kind} {number}"

    def describe(self, operation: Any) -> str:
        """As in "all_reduce float32[4] sum"."""
        name = self.name("operation", int(operation["operation"]))
        text = name
        if name not in _WITHOUT_DATA:
            text += f" {self.name('dtype', int(operation['dtype']))}[{operation['count']}]"
        if operation["counts_hash"] > 1:
            text += f" uneven (counts {int(operation['counts_hash']):x})"
        elif operation["counts_hash"]:
            text += ", uneven"
        if operation["num_parts"]:
            text = f"{name}: {self.describe_parts(operation)}"
        if "reduce" in name:
            text += f" {self.name('reduction', int(operation['reduction']))}"
        if operation["root"] >= 0:
            text += f" root {operation['root']}"
        return text

    def describe_parts(self, operation: Any) -> str:
        """As in "sends to 1, receives from 2": places in the group."""
        told = [f"sends to {p}" if p >= 0 else f"receives from {~p}" for _, p in self.parts(operation)]
        more = int(operation["num_parts"]) - len(told)
        return ", ".join(told) + (f", and {more} more" if more > 0 else "")

    def parts(self, operation: Any) -> list[tuple[bool, int]]:
        """Of an exchange, as far as they are told: whether it sends, and the peer, or ~peer of a receive."""
        known = operation["parts"][: int(operation["num_parts"])].tolist()
        return [(part >= 0, part) for part in known]

    def state(self, name: str) -> int:
        """The number of a state; -1 if this journal has no such state."""
        return self.names["state"].index(name) if name in self.names["state"] else -1


def clean(raw: bytes) -> str:
    """Fixed-size text of a journal, harmless to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in raw.decode(errors="replace"))


def read_directory(folder: Path) -> tuple[list[Journal], dict[str, str]]:
    """All journals of a directory by rank, and why the other files that are named like one were skipped.

    Raises:
        OSError: the directory cannot be read.
    """
    journals: list[Journal] = []
    skipped: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".journal":
            try:
                journals.append(read_journal(path))
            except (JournalError, OSError) as error:
                skipped[clean(path.name.encode(errors="replace"))] = (
                    error.strerror or str(error) if isinstance(error, OSError) else str(error)
                )
            else:
                expected = f"rank-{journals[-1].rank:05d}.journal"
                if path.name != expected:
                    skipped[clean(path.name.encode(errors="replace"))] = f"its content says {expected}"
                    journals.pop()
    return sorted(journals, key=lambda journal: journal.rank), skipped


def read_journal(path: Path) -> Journal:
    """Reads one file.

    Raises:
        JournalError: it is none.
        OSError: it cannot be read.
    """
    # Never follows a link, never waits for the other end of a pipe.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise JournalError("not a regular file")
        head_bytes = file.read(_HEADER.itemsize)
        sizes = _check_sizes(head_bytes, status.st_size)
        file.seek(0)
        data = file.read(sum(sizes))
    if len(data) < sum(sizes):
        raise JournalError("cut short while it was read")
    ends = np.cumsum(sizes)
    parts = [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return _decode(np.frombuffer(head_bytes, _HEADER)[0], parts)


def _check_sizes(head_bytes: bytes, file_bytes: int) -> list[int]:
    """Bytes of header, groups, events and ring."""
    if len(head_bytes) < _HEADER.itemsize:
        raise JournalError(f"{file_bytes} bytes are too few for a journal")
    head = np.frombuffer(head_bytes, _HEADER)[0]
    if bytes(head["magic"]) != _MAGIC:
        raise JournalError("not a journal (its first bytes are others)")
    if head["version"] != _VERSION:
        raise JournalError(
            f"version {head['version']} of the layout; this program reads {_VERSION}: use the one that wrote it"
        )
    known = {
        "group_bytes": _GROUP.itemsize,
        "event_bytes": _EVENT.itemsize,
        "operation_bytes": _OPERATION.itemsize,
    }
    for name, expected in known.items():
        if head[name] != expected:
            raise JournalError(f"{name} is {head[name]}; expected {expected}")
    for name, largest in _LARGEST.items():
        if not 1 <= head[name] <= largest:
            raise JournalError(f"{name} is {head[name]}; expected 1 to {largest}")
    if not _HEADER.itemsize <= head["header_bytes"] <= 1 << 16:
        raise JournalError(f"header_bytes is {head['header_bytes']}")
    if not 0 <= head["rank"] < head["world_size"] <= 1 << 20:
        raise JournalError(f"rank {head['rank']} of {head['world_size']}")
    sizes = [
        int(head["header_bytes"]),
        int(head["max_groups"]) * _GROUP.itemsize,
        int(head["max_events"]) * _EVENT.itemsize,
        int(head["num_slots"]) * _OPERATION.itemsize,
    ]
    if sum(sizes) != file_bytes:
        raise JournalError(f"{file_bytes} bytes; its header says {sum(sizes)}")
    return sizes


def _decode(head: Any, parts: list[bytes]) -> Journal:
    ring = np.frombuffer(parts[3], _OPERATION)
    total, slots = int(head["num_operations"]), len(ring)
    # The slot of operation n is n % slots, and its mark 2n + 2; others are half-written or were never used.
    marks = ring["mark"]
    tickets = marks // 2 - 1
    own_slot = tickets % slots == np.arange(slots, dtype=np.uint64)
    whole = (marks > 0) & (marks % 2 == 0) & own_slot & (tickets < total)
    operations = ring[whole]
    operations = operations[np.argsort(operations["mark"])]
    groups = _decode_groups(np.frombuffer(parts[1], _GROUP)[: int(head["num_groups"])])
    notes = [
        Note(_NOTE_KINDS[int(row["kind"])], clean(row["text"]), int(row["time_ns"]), int(row["duration_ns"]))
        for row in np.frombuffer(parts[2], _EVENT)
        if int(row["kind"]) in _NOTE_KINDS
    ]
    return Journal(
        rank=int(head["rank"]),
        world_size=int(head["world_size"]),
        pid=int(head["pid"]),
        host=clean(head["host"]),
        boot_id=clean(head["boot_id"]),
        job_id=clean(head["job_id"]),
        start_ns=int(head["start_ns"]),
        wall_offset_ns=int(head["wall_offset_ns"]),
        heard_ns=int(head["heard_ns"]),
        ended_ns=int(head["ended_ns"]),
        groups=groups,
        notes=notes,
        operations=operations[operations["group"] < len(groups)],
        num_operations=total,
        num_broken=int(((marks > 0) & ~whole).sum()),
        names={
            kind: [clean(name) for name in head[f"{kind}_names"]]
            for kind in ("operation", "dtype", "reduction", "state")
        },
    )


def _decode_groups(rows: NDArray[Any]) -> list[Group]:
    groups: list[Group] = []
    num_roots = 0
    for row in rows:
        parent = int(row["parent"])
        key: tuple[Any, ...] | None = None
        if row["ready"] == 1 and parent == _NO_PARENT:
            key = (num_roots,)
            num_roots += 1
        elif row["ready"] == 1 and parent < len(groups) and groups[parent].key is not None:
            key = (groups[parent].key, int(row["split_sequence"]), int(row["color"]))
        groups.append(Group(clean(row["name"]), int(row["rank"]), int(row["size"]), key))
    return groups
