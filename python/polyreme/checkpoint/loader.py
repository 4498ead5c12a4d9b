"""Reading a checkpoint on any layout: what is needed, checked, before anything is changed."""

from __future__ import annotations

import bisect
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

__all__ = ["CheckpointFiles", "Match", "match_tensors"]

_NUM_THREADS = 4
_PORTION_BYTES = 32 << 20  # of one thread at a time; a multiple of the blocks that are checked


@dataclass
class _Run:
    """Elements [begin, end) of a tensor lie in a file from byte `at` of its data."""

    begin: int
    end: int
    file: int
    at: int


class CheckpointFiles:
    """A checkpoint whose manifest and headers are read and agree.

    Raises:
        CheckpointCorrupt: a file that is missing, truncated, damaged or of another save.
    """

    def __init__(self, directory: str, step: int) -> None:
        self.path = os.path.join(directory, step_name(step))
        self.manifest: Manifest = read_manifest(directory, step)
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            self.files = list(pool.map(self._open, range(len(self.manifest.files))))
        self._runs: dict[str, list[_Run]] = {name: [] for name in self.manifest.tensors}
        for index, file in enumerate(self.files):
            self._add(index, file)
        for name, runs in self._runs.items():
            runs.sort(key=lambda run: run.begin)
            self._check_cover(name, runs)

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
            name, begin, end = found
            record = self.manifest.tensors[name]
            size = (end - begin) * ITEM_BYTES[record.dtype]
            if (
                dtype != SHARD_DTYPES[record.dtype]
                or end_byte - begin_byte != size
                or end > record.num_elements
            ):
                raise CheckpointCorrupt(
                    f"'{file.path}' has {entry!r} as {dtype}{list(shape)}; the manifest says {record.dtype}"
                    f"{list(record.shape)}"
                )
            self._runs[name].append(_Run(begin, end, index, begin_byte))

    def _check_cover(self, name: str, runs: list[_Run]) -> None:
        end = 0
        for run in runs:
            if run.begin != end:
                raise CheckpointCorrupt(
                    f"'{self.path}': elements {end} to {run.begin} of {name!r} are there not once"
                )
            end = run.end
        if end != self.manifest.tensors[name].num_elements:
            raise CheckpointCorrupt(f"'{self.path}': {name!r} ends at element {end}")

    def read(self, pieces: Sequence[tuple[str, int, int]], to: NDArray[np.uint8]) -> int:
        """Reads pieces (tensor, begin, end) into `to`, one after the other; returns the bytes that were wanted.

        Reads the blocks of the files that hold them, in parallel, and checks each.
        """
        rows: dict[int, list[tuple[int, int, int]]] = {}
        at = 0
        for name, begin, end in pieces:
            item = ITEM_BYTES[self.manifest.tensors[name].dtype]
            runs = self._runs[name]
            i = bisect.bisect_right(runs, begin, key=lambda run: run.begin) - 1
            while begin < end:
                run = runs[i]
                stop = min(end, run.end)
                size = (stop - begin) * item
                if size:
                    rows.setdefault(run.file, []).append((run.at + (begin - run.begin) * item, size, at))
                at += size
                begin = stop
                i += 1
        tasks = [(file, part) for file in sorted(rows) for part in _portions(rows[file])]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(lambda task: self.files[task[0]].read(task[1], to), tasks))
        return at

    def read_tensor(self, name: str) -> NDArray[np.uint8]:
        """A whole tensor as bytes."""
        record = self.manifest.tensors[name]
        data = np.empty(record.num_bytes, np.uint8)
        self.read([(name, 0, record.num_elements)], data)
        return data

    def verify(self) -> int:
        """Reads everything; returns the bytes. Raises CheckpointCorrupt."""
        total = 0
        for name, record in self.manifest.tensors.items():
            total += record.num_bytes
            self.read_tensor(name)
        return total


def _portions(rows: list[tuple[int, int, int]]) -> Iterator[NDArray[np.int64]]:
    """Reads (begin, bytes, place) of a file, cut into portions for threads; large ones at borders of blocks."""
    portion: list[tuple[int, int, int]] = []
    size = 0
    for begin, count, place in sorted(rows):
        while count > 0:
            take = min(count, _PORTION_BYTES - begin % _PORTION_BYTES)
            portion.append((begin, take, place))
            begin, count, place, size = begin + take, count - take, place + take, size + take
            if size >= _PORTION_BYTES:
                yield np.array(portion, dtype=np.int64)
                portion, size = [], 0
    if portion:
        yield np.array(portion, dtype=np.int64)


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
