"""Parts of a tensor along one dim, and where they lie in the order of the whole.

Tensor parallelism cuts a dim, maybe inside of blocks (q|k|v), so that a rank's part is no run of the tensor's flat
row-major order: a cut along the last dim would be as many runs as there are rows. A *slab* is what a rank holds, as a
tensor of its own: the elements whose index along `dim` lies in one of `ranges`, in row-major order. Files have slabs,
or flat ranges of them, under names that say so: `w{1:0-16,48-64}[100:200]`. Runs of the whole tensor appear only when
a file is read for another cut.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument

__all__ = ["Slab", "flat_runs", "uncovered"]

_TEXT = re.compile(r"([0-9]{1,2}):((?:[0-9]{1,18}-[0-9]{1,18}(?:,[0-9]{1,18}-[0-9]{1,18})*)?)\Z")


@dataclass(frozen=True)
class Slab:
    """The elements of a tensor whose index along `dim` lies in one of `ranges`: [begin, end), ascending, disjoint."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @staticmethod
    def of(dim: int, ranges: Iterable[Sequence[int]], shape: Sequence[int]) -> Slab | None:
        """None where it is all of the tensor.

        Raises:
            InvalidArgument: ranges outside of the dim, or not ascending.
        """
        merged: list[tuple[int, int]] = []
        if not 0 <= dim < len(shape):
            raise InvalidArgument(f"dim {dim} of a tensor of shape {tuple(shape)}")
        end = 0
        for first, last in ranges:
            if not end <= first <= last <= shape[dim]:
                raise InvalidArgument(
                    f"range {first} to {last} along dim {dim} of a tensor of shape {tuple(shape)}; expected ascending"
                    f" ones inside of {shape[dim]}"
                )
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], last)
            elif first < last:
                merged.append((first, last))
            end = last
        slab = Slab(dim, tuple(merged))
        return None if slab.extent == shape[dim] else slab

    @staticmethod
    def parse(text: str) -> Slab | None:
        """The inverse of str; None if it is not such a text."""
        match = _TEXT.match(text)
        if match is None:
            return None
        texts = match[2].split(",") if match[2] else []
        ranges = tuple((int(a), int(b)) for a, b in (text.split("-") for text in texts))
        borders = [-1, *(border for both in ranges for border in both)]
        ascending = all(a < b for a, b in itertools.pairwise(borders))
        return Slab(int(match[1]), ranges) if ascending else None

    def __str__(self) -> str:
        return f"{self.dim}:{','.join(f'{begin}-{end}' for begin, end in self.ranges)}"

    @property
    def extent(self) -> int:
        """Along its dim."""
        return sum(end - begin for begin, end in self.ranges)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """As a tensor of its own."""
        return (*whole[: self.dim], self.extent, *whole[self.dim + 1 :])

    def fits(self, whole: Sequence[int]) -> bool:
        """Whether it lies inside of a tensor of this shape."""
        return self.dim < len(whole) and (not self.ranges or self.ranges[-1][1] <= whole[self.dim])


def uncovered(slabs: Sequence[Slab | None], shape: Sequence[int]) -> str:
    """What of a tensor is in none of its slabs, or what else is wrong with them; empty if nothing is."""
    parts = [slab for slab in slabs if slab is not None]
    if len(parts) < len(slabs) or not math.prod(shape):
        return ""
    dims = {slab.dim for slab in parts}
    if len(dims) != 1:
        return f"it is cut along dims {sorted(dims)}; expected one"
    dim, at = dims.pop(), 0
    for begin, end in sorted(r for slab in parts for r in slab.ranges):
        if begin > at:
            break
        at = max(at, end)
    return "" if at == shape[dim] else f"nobody has index {at} of dim {dim}"


def flat_runs(slab: Slab | None, shape: Sequence[int], begin: int, end: int) -> NDArray[np.int64]:
    """Elements [begin, end) of a slab as rows (first element in the whole, count), in the slab's order."""
    if slab is None or begin == end:
        return np.array([(begin, end - begin)], dtype=np.int64)
    inner = math.prod(shape[slab.dim + 1 :])
    row = slab.extent * inner  # elements of the slab for one index of the dims before
    ranges = np.array(slab.ranges, dtype=np.int64) * inner
    first, last = begin // row, -(-end // row)
    rows = np.arange(first, last, dtype=np.int64)[:, None] * (shape[slab.dim] * inner)
    starts = (rows + ranges[:, 0]).reshape(-1)
    counts = np.tile(ranges[:, 1] - ranges[:, 0], last - first)
    places = np.cumsum(counts) - counts + first * row  # in the slab
    low, high = np.maximum(places, begin), np.minimum(places + counts, end)
    kept = low < high
    runs: NDArray[np.int64] = np.stack([starts + (low - places), high - low], axis=1)[kept]
    return runs
