"""Reading a checkpoint on any layout: what is needed, checked, before anything is changed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..errors import CheckpointCorrupt
from .directory import step_name
from .layout import HeldTensor, parse_entry
from .manifest import ITEM_BYTES, SHARD_DTYPES, Manifest, TensorRecord, read_manifest
from .slab import Slab, flat_runs, uncovered

__all__ = ["CheckpointFiles", "Match", "match_tensors"]

_NUM_THREADS = 4
_PORTION_BYTES = 32 << 20  # of one thread at a time; a multiple of the blocks that are checked


@dataclass
class _Part:
    """Elements [begin, end) of a slab lie in a file from byte `at` of its data."""

    slab: Slab | None
    begin: int
    end: int
    file: int
    at: int


class CheckpointFiles:
    """A checkpoint whose manifest and headers are read and agree.

    is_alone: no other process of this host reads it at the same time.

    Raises:
        CheckpointCorrupt: a file that is missing, truncated, damaged or of another save.
    """

    def __init__(self, directory: str, step: int, *, is_alone: bool = False) -> None:
        self._is_alone = is_alone
        self.path = os.path.join(directory, step_name(step))
        self.manifest: Manifest = read_manifest(directory, step)
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            self.files = list(pool.map(self._open, range(len(self.manifest.files))))
        self._parts: dict[str, list[_Part]] = {name: [] for name in self.manifest.tensors}
        for index, file in enumerate(self.files):
            self._add(index, file)
        for name, parts in self._parts.items():
            self._check_cover(name, parts)
        self._tables: dict[tuple[str, Slab | None], NDArray[np.int64]] = {}

    def _open(self, index: int) -> _core.ShardFile:
        record = self.manifest.files[index]
        return _core.ShardFile(
            self.path,
            record.name,
            size_bytes=record.size_bytes,
            header_crc32c=record.header_crc32c,
            generation=self.manifest.generation,
        )

    def _add(self, index: int, file: _core.ShardFile) -> None:
        for entry, dtype, shape, begin_byte, end_byte in file.entries:
            found = parse_entry(entry, self.manifest.tensors)
            if found is None:
                raise CheckpointCorrupt(f"'{file.path}' has {entry!r}, which the manifest does not know")
            name, slab, begin, end = found
            record = self.manifest.tensors[name]
            size = (end - begin) * ITEM_BYTES[record.dtype]
            if dtype != SHARD_DTYPES[record.dtype] or end_byte - begin_byte != size:
                raise CheckpointCorrupt(
                    f"'{file.path}' has {entry!r} as {dtype}{list(shape)}; the manifest says {record.dtype}"
                    f"{list(record.shape)}"
                )
            self._parts[name].append(_Part(slab, begin, end, index, begin_byte))

    def _check_cover(self, name: str, parts: list[_Part]) -> None:
        shape = self.manifest.tensors[name].shape
        by_slab: dict[Slab | None, list[_Part]] = {}
        for part in parts:
            by_slab.setdefault(part.slab, []).append(part)
        if problem := uncovered(list(by_slab) or [Slab(0, ())], shape):
            raise CheckpointCorrupt(f"'{self.path}': {name!r}: {problem}")
        for slab, own in by_slab.items():
            end, what = 0, f"{name!r}" + (f" at {slab}" if slab else "")
            for part in sorted(own, key=lambda part: part.begin):
                if part.begin != end:
                    raise CheckpointCorrupt(
                        f"'{self.path}': elements {end} to {part.begin} of {what} are there not once"
                    )
                end = part.end
            if end != math.prod(slab.shape(shape) if slab else shape):
                raise CheckpointCorrupt(f"'{self.path}': {what} ends at element {end}")

    def _table(self, name: str, inside: Slab | None) -> NDArray[np.int64]:
        """Where the elements of a tensor, or of a slab that the files have, are: rows (first, end, file, byte),
        ascending, every element once."""
        table = self._tables.get((name, inside))
        if table is None:
            record = self.manifest.tensors[name]
            rows = []
            for part in self._parts[name]:
                if inside is None or part.slab == inside:
                    slab = part.slab if inside is None else None
                    runs = flat_runs(slab, record.shape, part.begin, part.end)
                    begins, counts = runs.T
                    at = part.at + (np.cumsum(counts) - counts) * ITEM_BYTES[record.dtype]
                    rows.append(
                        np.stack([begins, begins + counts, np.full_like(begins, part.file), at], axis=1)
                    )
            table = np.concatenate(rows)
            table = table[np.argsort(table[:, 0], kind="stable")]
            # What several slabs have is taken from the first of them.
            taken = np.maximum.accumulate(np.concatenate([[0], table[:-1, 1]]))
            skipped = np.maximum(taken - table[:, 0], 0)
            table[:, 0] += skipped
            table[:, 3] += skipped * ITEM_BYTES[record.dtype]
            self._tables[name, inside] = table = table[table[:, 0] < table[:, 1]]
        return table

    def _rows(self, name: str, slab: Slab | None, begin: int, end: int, place: int) -> NDArray[np.int64]:
        """What to read for elements [begin, end) of a slab: rows (file, byte, bytes, place)."""
        # A slab that was saved as such is one run of its own elements, not one for each row of the tensor.
        inside = slab if any(part.slab == slab for part in self._parts[name]) else None
        record, table = self.manifest.tensors[name], self._table(name, inside)
        item = ITEM_BYTES[record.dtype]
        wanted = flat_runs(None if inside else slab, record.shape, begin, end)
        starts, counts = wanted.T
        ends, places = starts + counts, place + (np.cumsum(counts) - counts) * item
        first = np.searchsorted(table[:, 0], starts, "right") - 1
        num = np.searchsorted(table[:, 0], ends, "left") - first  # of the table's rows that each run meets
        run = np.repeat(np.arange(len(starts)), num)
        source = np.arange(len(run)) - np.repeat(np.cumsum(num) - num - first, num)
        low = np.maximum(starts[run], table[source, 0])
        high = np.minimum(ends[run], table[source, 1])
        at = table[source, 3] + (low - table[source, 0]) * item
        to = places[run] + (low - starts[run]) * item
        return np.stack([table[source, 2], at, (high - low) * item, to], axis=1)

    def read(self, pieces: Sequence[tuple[str, Slab | None, int, int]], to: NDArray[np.uint8]) -> int:
        """Reads pieces (tensor, slab, begin, end) into `to`, one after the other; returns the bytes that were wanted.

        Reads the blocks of the files that hold them, in parallel, and checks each.
        """
        rows, at = [np.empty((0, 4), np.int64)], 0
        for name, slab, begin, end in pieces:
            if begin < end:
                rows.append(self._rows(name, slab, begin, end, at))
            at += (end - begin) * ITEM_BYTES[self.manifest.tensors[name].dtype]
        tasks = list(_portions(np.concatenate(rows)))
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(lambda task: self.files[task[0]].read(task[1], to, is_alone=self._is_alone), tasks))
        return at

    def read_tensor(self, name: str) -> NDArray[np.uint8]:
        """A whole tensor as bytes."""
        record = self.manifest.tensors[name]
        data = np.empty(record.num_bytes, np.uint8)
        self.read([(name, None, 0, record.num_elements)], data)
        return data

    def verify(self) -> int:
        """Reads everything; returns the bytes. Raises CheckpointCorrupt."""
        total = 0
        for name, record in self.manifest.tensors.items():
            total += record.num_bytes
            self.read_tensor(name)
        return total


def _portions(rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Rows (file, byte, bytes, place) as tasks for threads: (file, rows (byte, bytes, place) of one portion of it).

    A portion ends at a border of blocks, so that no block is read twice.
    """
    first = rows[:, 1] // _PORTION_BYTES
    num = (rows[:, 1] + rows[:, 2] - 1) // _PORTION_BYTES - first + 1
    row = np.repeat(np.arange(len(rows)), num)
    portion = np.arange(len(row)) - np.repeat(np.cumsum(num) - num - first, num)
    file, start, size, place = rows[row].T
    begin = np.maximum(start, portion * _PORTION_BYTES)
    end = np.minimum(start + size, (portion + 1) * _PORTION_BYTES)
    cut = np.stack([begin, end - begin, place + begin - start], axis=1)
    order = np.lexsort((begin, file))
    file, portion, cut = file[order], portion[order], cut[order]
    changes = np.flatnonzero((np.diff(file) != 0) | (np.diff(portion) != 0)) + 1
    if len(cut):
        for task in np.split(np.arange(len(cut)), changes):
            yield int(file[task[0]]), np.ascontiguousarray(cut[task])


@dataclass
class Match:
    """How a state and a checkpoint fit: tensors of the state that the checkpoint lacks, the reverse, and those
    that differ in shape or dtype (as texts)."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def complaint(self, *, strict: bool) -> str:
        """All that speaks against loading; empty if nothing does."""
        parts = []
        if self.different:
            parts.append("different: " + "; ".join(self.different))
        if strict and self.missing:
            parts.append("missing in the checkpoint: " + ", ".join(map(repr, self.missing)))
        if strict and self.unexpected:
            parts.append("unexpected in the checkpoint: " + ", ".join(map(repr, self.unexpected)))
        return "; ".join(parts)


def match_tensors(
    held: Sequence[HeldTensor],
    everywhere: set[str],
    tensors: dict[str, TensorRecord],
    wanted: str | None = None,
) -> tuple[list[int], Match]:
    """Indices into `held` of what can be loaded, and the rest. everywhere: the names that any rank holds.
    wanted: a prefix of the names that count."""
    match, indices = Match(), []
    for index, tensor in enumerate(held):
        if wanted and not tensor.name.startswith(wanted):
            continue
        record = tensors.get(tensor.name)
        if record is None:
            continue
        if record != tensor.record:
            match.different.append(
                f"{tensor.name!r} is {record.dtype}{list(record.shape)} in the checkpoint,"
                f" {tensor.dtype}{list(tensor.shape)} here"
            )
        else:
            indices.append(index)
    match.missing = [n for n in sorted(everywhere - set(tensors)) if not wanted or n.startswith(wanted)]
    match.unexpected = [n for n in tensors if n not in everywhere and (not wanted or n.startswith(wanted))]
    return indices, match
