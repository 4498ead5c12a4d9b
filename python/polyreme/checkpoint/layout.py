"""Who holds what, and who writes it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..errors import CheckpointError, CommError, InvalidArgument
from .manifest import ITEM_BYTES, TensorRecord
from .slab import Slab, uncovered

__all__ = ["HeldTensor", "State", "WritePlan", "agree_on_plan"]

_CUT = re.compile(r"(?:\{([0-9]+:[0-9,-]+)\})?(?:\[([0-9]{1,18}):([0-9]{1,18})\])?\Z")
_MAX_NAME_BYTES = 1000


@dataclass(frozen=True)
class HeldTensor:
    """What this rank holds of a tensor: ranges [begin, end) of its flat row-major elements, ascending; or of those
    of a slab."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[int, int]]
    slab: Slab | None = None

    @property
    def num_elements(self) -> int:
        """Of the slab, or of the tensor."""
        return math.prod(self.slab.shape(self.shape) if self.slab else self.shape)

    @property
    def record(self) -> TensorRecord:
        """The tensor as a whole."""
        return TensorRecord(self.dtype, self.shape)


class State(Protocol):
    """Something whose state can be saved and loaded by pieces. All calls come from the thread of the steps."""

    def held(self) -> list[HeldTensor]:
        """What this rank holds, the same list at every call; the pieces cover every tensor over all ranks."""

    def read(self, pieces: Sequence[tuple[int, int, int]], staging: NDArray[np.uint8]) -> None:
        """Copies pieces (index into held(), begin, end) into `staging`, one after the other."""

    def write(self, pieces: Sequence[tuple[int, int, int]], staging: NDArray[np.uint8]) -> None:
        """The inverse, for pieces of held()."""

    def scalars(self) -> dict[str, Any]:
        """What is no tensor, as JSON; the same on all ranks."""

    def layout(self) -> dict[str, Any]:
        """How the ranks divide it, for people, as JSON."""

    def check_scalars(self, state: dict[str, Any]) -> list[str]:
        """What of saved scalars does not fit; empty if all does. Changes nothing."""

    def set_scalars(self, state: dict[str, Any]) -> None:
        """Takes them over."""


def check_names(held: Sequence[HeldTensor]) -> None:
    """Refuses names that a file could not give back.

    Raises:
        InvalidArgument: a name twice, empty, too long, not Unicode, or one that looks like a cut of another.
    """
    seen: dict[str, set[Slab | None]] = {}
    for tensor in held:
        name, slabs = tensor.name, seen.setdefault(tensor.name, set())
        if slabs and (None in slabs or tensor.slab is None or tensor.slab in slabs):
            raise InvalidArgument(f"two tensors are named {name!r}; names must differ")
        slabs.add(tensor.slab)
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise InvalidArgument(f"the name {name!r} is not valid Unicode") from None
        if not 0 < size <= _MAX_NAME_BYTES or name == "__metadata__" or _looks_cut(name) or "\0" in name:
            raise InvalidArgument(
                f"the name {name[:80]!r} of {size} bytes cannot be used; expected 1 to {_MAX_NAME_BYTES} bytes, not"
                " '__metadata__', and no '[number:number]' or '{number:...}' at the end"
            )


def _looks_cut(name: str) -> bool:
    cut = _CUT.search(name)
    return cut is not None and cut.start() < len(name)


def entry_of(tensor: HeldTensor, begin: int, end: int) -> tuple[str, list[int]]:
    """Name and shape of a piece in its shard."""
    slab = f"{{{tensor.slab}}}" if tensor.slab else ""
    if end - begin < tensor.num_elements:
        return f"{tensor.name}{slab}[{begin}:{end}]", [end - begin]
    return tensor.name + slab, list(tensor.slab.shape(tensor.shape) if tensor.slab else tensor.shape)


def parse_entry(entry: str, tensors: dict[str, TensorRecord]) -> tuple[str, Slab | None, int, int] | None:
    """(tensor, slab, begin, end) of an entry, or None if the manifest has no such part of a tensor."""
    cut = _CUT.search(entry)
    assert cut is not None  # it may be empty
    name = entry[: cut.start()]
    record, slab = tensors.get(name), Slab.parse(cut[1]) if cut[1] else None
    if record is None or (cut[1] and (slab is None or not slab.fits(record.shape))):
        return None
    count = math.prod(slab.shape(record.shape) if slab else record.shape)
    begin, end = (int(cut[2]), int(cut[3])) if cut[2] else (0, count)
    return (name, slab, begin, end) if begin <= end <= count else None


@dataclass(frozen=True)
class WritePlan:
    """What this rank writes: pieces (index into its held(), begin, end); and all tensors by name."""

    pieces: list[tuple[int, int, int]]
    tensors: dict[str, TensorRecord]
    bytes_of_rank: list[int]


@dataclass
class Planner:
    """Agrees with the other ranks on who writes what; the plan is kept while nobody's pieces change."""

    min_cut_bytes: int = 1 << 20
    _key: tuple[str, ...] = field(default=(), init=False)
    _plan: WritePlan | None = field(default=None, init=False)

    def digest(self, held: Sequence[HeldTensor]) -> str:
        """Equal where table and pieces are."""
        return _digest(_encode_table(held), _encode_pieces(held))

    def plan(self, world: _core.World, held: Sequence[HeldTensor], digests: Sequence[str]) -> WritePlan:
        """Collective where any of the `digests` (by rank) is another than last time."""
        key = tuple(digests)
        if self._plan is None or key != self._key:
            self._plan = agree_on_plan(world, held, digests, self.min_cut_bytes)
            self._key = key
        return self._plan


def _encode_table(held: Sequence[HeldTensor]) -> bytes:
    return json.dumps([[t.name, t.dtype, list(t.shape), str(t.slab or "")] for t in held]).encode()


def _encode_pieces(held: Sequence[HeldTensor]) -> bytes:
    rows = [(i, begin, end) for i, t in enumerate(held) for begin, end in t.pieces]
    return np.array(rows, dtype="<i8").reshape(-1, 3).tobytes()


def _digest(table: bytes, pieces: bytes) -> str:
    return f"{hashlib.sha256(table).hexdigest()}/{hashlib.sha256(pieces).hexdigest()}"


def agree_on_plan(
    world: _core.World, held: Sequence[HeldTensor], digests: Sequence[str], min_cut_bytes: int
) -> WritePlan:
    """Exchanges what the ranks hold and deals the writing out. Collective.

    Only the first of the ranks with equal tables, or equal pieces, sends them: what a rank receives grows with
    the number of different ones.

    Raises:
        InvalidArgument: on all ranks: a tensor of which ranks say different things, or that nobody holds whole.
    """
    tables, table_of_rank = _exchange(world, _encode_table(held), [d.split("/")[0] for d in digests])
    pieces, _ = _exchange(world, _encode_pieces(held), list(digests))
    classes = list(dict.fromkeys(digests))
    first = [list(digests).index(d) for d in classes]

    tensors: dict[str, TensorRecord] = {}
    slabs: dict[str, dict[str, int]] = {}  # of each tensor: its slabs, and their numbers among all
    parts: list[tuple[str, int, int]] = []  # by number: name, elements, bytes of one
    numbers: list[NDArray[np.int64]] = []  # of each table: number of its i-th part among all
    for t, table in enumerate(tables):
        number = []
        for name, dtype, shape, text in json.loads(table):
            record = TensorRecord(dtype, tuple(shape))
            known = tensors.setdefault(name, record)
            if known != record:
                rank = table_of_rank.index(t)
                raise InvalidArgument(
                    f"save: tensor {name!r} is {record.dtype}{list(record.shape)} on rank {rank} and"
                    f" {known.dtype}{list(known.shape)} on a rank before it"
                )
            index = slabs.setdefault(name, {}).setdefault(text, len(parts))
            if index == len(parts):
                slab = Slab.parse(text)
                count = math.prod(slab.shape(shape)) if slab else record.num_elements
                parts.append((name + (f"{{{text}}}" if text else ""), count, ITEM_BYTES[dtype]))
            number.append(index)
        numbers.append(np.array(number, dtype=np.int64))
    for name, known_slabs in slabs.items():
        if problem := uncovered([Slab.parse(text) for text in known_slabs], tensors[name].shape):
            raise InvalidArgument(f"save: tensor {name!r}: {problem}")

    rows = []
    for rank, piece in zip(first, pieces, strict=True):
        row = np.frombuffer(piece, dtype="<i8").reshape(-1, 3).copy()
        row[:, 0] = numbers[table_of_rank[rank]][row[:, 0]]
        rows.append(row)
    class_of = {digest: c for c, digest in enumerate(classes)}
    planned, loads = _core.plan_save(parts, rows, [class_of[d] for d in digests], world.rank, min_cut_bytes)
    own = {int(number): i for i, number in enumerate(numbers[table_of_rank[world.rank]])}
    return WritePlan(
        pieces=[(own[int(t)], int(begin), int(end)) for t, begin, end in planned],
        tensors=tensors,
        bytes_of_rank=loads,
    )


def names_everywhere(world: _core.World, own: Sequence[str]) -> set[str]:
    """The names that any rank holds. Collective."""
    text = json.dumps(list(own)).encode()
    digest = hashlib.sha256(text).hexdigest()
    digests = [d.decode() for d in gather(world, digest.encode(), "checkpoint load: names")]
    texts, _ = _exchange(world, text, digests)
    return {name for part in texts for name in json.loads(part)}


def _exchange(world: _core.World, own: bytes, digests: list[str]) -> tuple[list[bytes], list[int]]:
    """The distinct texts, in order of the first rank that has each, and which of them every rank has."""
    distinct = list(dict.fromkeys(digests))
    sends = digests.index(digests[world.rank]) == world.rank
    gathered = gather(world, own if sends else b"", "checkpoint: layout")
    texts = [gathered[digests.index(d)] for d in distinct]
    return texts, [distinct.index(d) for d in digests]


def gather(world: _core.World, data: bytes, what: str) -> list[bytes]:
    """Every rank's bytes, by rank. Collective; errors between ranks say `what` was to be done."""
    try:
        return world.all_gather_bytes(data, what)
    except CommError as error:
        raise type(error)(f"{what}: {error}") from None


def require_agreement(world: _core.World, what: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """All ranks' `facts`, by rank. Collective.

    Raises:
        CheckpointError: on all ranks, if any has an "error"; names ranks and texts.
    """
    all_facts = [json.loads(text) for text in gather(world, json.dumps(facts).encode(), what)]
    errors = {rank: f["error"] for rank, f in enumerate(all_facts) if f.get("error")}
    if errors:
        raise CheckpointError(f"{what}: {join_errors(errors)}")
    return all_facts


def join_errors(errors: dict[int, str]) -> str:
    """ "rank 1: text; rank 3: text"; ranks with one text together."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        ranks_of.setdefault(text, []).append(rank)
    parts = []
    for text, ranks in ranks_of.items():
        shown = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
        parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}: {text}")
    return "; ".join(parts)
