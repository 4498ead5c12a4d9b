"""Arrays of the user as the state of a checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..checks import check_int
from ..errors import InvalidArgument
from .layout import HeldTensor, State
from .manifest import ITEM_BYTES
from .slab import Slab

__all__ = ["ArrayPart", "ArrayState", "state_of"]

_NUM_THREADS = 4
_PORTION_BYTES = 16 << 20


@dataclass(frozen=True)
class ArrayPart:
    """This rank's part of a tensor that several ranks hold: a run of its flat row-major elements; or, with `dim`, of
    the elements whose index along that dim lies in one of `ranges`.

    array: any shape, contiguous. shape: of the whole tensor. begin: the first element that `array` holds.
    ranges: [begin, end) each, ascending. A rank with several such parts of a tensor gives a list of them.

        checkpoints.save({"moment": pr.checkpoint.ArrayPart(own, shape=(1000, 64), begin=first)}, step=3)
        # Rows of q, k and v, as tensor parallelism cuts them.
        part = pr.checkpoint.ArrayPart(own, shape=(192, 64), dim=0, ranges=[(0, 32), (64, 96), (128, 160)])
    """

    array: Any
    shape: tuple[int, ...]
    begin: int = 0
    dim: int | None = None
    ranges: Sequence[tuple[int, int]] = ()


class ArrayState:
    """Named arrays: NumPy's, or what speaks DLPack on the CPU. A plain array is the whole tensor, equal on all
    ranks."""

    def __init__(self, arrays: Mapping[str, Any], *, writable: bool) -> None:
        self._held: list[HeldTensor] = []
        self._bytes: list[NDArray[np.uint8]] = []
        self._begins: list[int] = []
        for name, value in _parts_of(arrays):
            part = value if isinstance(value, ArrayPart) else None
            array = value.array if part else value
            if isinstance(array, int | float | bool) or array is None:
                raise InvalidArgument(f"state {name!r} is {array!r}; scalars belong into extras=")
            dtype, data = _core.array_bytes(array, writable, f"state {name!r}")
            count = data.size // ITEM_BYTES[dtype]
            shape = tuple(int(n) for n in (part.shape if part else array.shape))
            begin = check_int(f"state {name!r}: begin", part.begin, 0) if part else 0
            for extent in shape:
                check_int(f"state {name!r}: an extent of shape", extent, 0)
            slab = _slab_of(name, part, shape)
            whole = math.prod(slab.shape(shape) if slab else shape)
            if begin + count > whole:
                raise InvalidArgument(
                    f"state {name!r}: elements {begin} to {begin + count} of"
                    f" {f'{slab} of ' if slab else ''}a tensor of shape {shape}, which has {whole}"
                )
            pieces = [(begin, begin + count)] if count else []
            self._held.append(HeldTensor(name, dtype, shape, pieces, slab))
            self._bytes.append(data)
            self._begins.append(begin)

    def held(self) -> list[HeldTensor]:
        """See State."""
        return self._held

    def _slice(self, piece: tuple[int, int, int]) -> NDArray[np.uint8]:
        index, begin, end = piece
        item, first = ITEM_BYTES[self._held[index].dtype], self._begins[index]
        return self._bytes[index][(begin - first) * item : (end - first) * item]

    def read(self, pieces: Sequence[tuple[int, int, int]], staging: NDArray[np.uint8]) -> None:
        """See State."""
        _copy((staging[at : at + own.size], own) for own, at in self._places(pieces))

    def write(self, pieces: Sequence[tuple[int, int, int]], staging: NDArray[np.uint8]) -> None:
        """See State."""
        _copy((own, staging[at : at + own.size]) for own, at in self._places(pieces))

    def _places(self, pieces: Sequence[tuple[int, int, int]]) -> Iterator[tuple[NDArray[np.uint8], int]]:
        at = 0
        for piece in pieces:
            own = self._slice(piece)
            yield own, at
            at += own.size

    def scalars(self) -> dict[str, Any]:
        """See State."""
        return {}

    def layout(self) -> dict[str, Any]:
        """See State."""
        return {}

    def check_scalars(self, state: dict[str, Any]) -> list[str]:
        """See State."""
        return []

    def set_scalars(self, state: dict[str, Any]) -> None:
        """See State."""


def _copy(pairs: Iterable[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> None:
    """Copies (target, source) in portions, by as many threads as keep memory busy."""
    portions = [
        (target[at : at + _PORTION_BYTES], source[at : at + _PORTION_BYTES])
        for target, source in pairs
        for at in range(0, source.size, _PORTION_BYTES)
    ]
    num_threads = min(_NUM_THREADS, len(os.sched_getaffinity(0)), len(portions))
    if num_threads <= 1:
        for target, source in portions:
            target[:] = source
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(lambda portion: np.copyto(*portion), portions))


def _parts_of(arrays: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in arrays.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"the name {name!r} is no text")
        several = isinstance(value, list | tuple) and value and all(isinstance(v, ArrayPart) for v in value)
        for part in value if several else [value]:
            yield name, part


def _slab_of(name: str, part: ArrayPart | None, shape: tuple[int, ...]) -> Slab | None:
    if part is None or part.dim is None:
        if part is not None and part.ranges:
            raise InvalidArgument(f"state {name!r}: ranges={part.ranges!r} without dim")
        return None
    dim = check_int(f"state {name!r}: dim", part.dim, 0)
    try:
        ranges = [(int(first), int(last)) for first, last in part.ranges]
        return Slab.of(dim, ranges, shape)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"state {name!r}: {error}") from None


def state_of(state: Any, *, writable: bool) -> State:
    """A Trainer's, or that of arrays."""
    if hasattr(state, "_checkpoint_state"):
        result: State = state._checkpoint_state()
        return result
    return ArrayState(state, writable=writable)
