"""The norm of gradients, over arrays of a script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _core
from .arrays import Target, check_distinct, check_float, readable
from .checks import check_number
from .errors import InvalidArgument
from .group import Group

__all__ = ["clip_grad_norm"]

_MAX_ORDER = 8.0  # (the largest fp32)^8 is still a double


def check_norm_type(what: str, value: float) -> float:
    """The order of a norm: 1 to 8, or infinity."""
    if isinstance(value, float) and value == math.inf:
        return value
    order = check_number(what, value, 1.0, otherwise="math.inf")
    if order > _MAX_ORDER:
        raise InvalidArgument(
            f"{what}={value}: the sum of such powers could overflow; expected 1 to 8, or math.inf"
        )
    return order


def clip_grad_norm(
    arrays: Mapping[str, Any] | Iterable[Any],
    max_norm: float,
    group: Group | None = None,
    *,
    norm_type: float = 2.0,
    sharded: bool | Sequence[bool] = False,
) -> float:
    """Scales gradients in place so that their norm over all of them is at most `max_norm`.

        norm = pr.clip_grad_norm([p.grad for p in module.parameters()], 1.0)
        norm = pr.clip_grad_norm(shards, 1.0, mesh["dp"], sharded=True)   # every rank holds a part

    The norm does not depend on the order of arrays, elements or ranks, except that for orders other than 1,
    2 and infinity (and for 2, in the last bits) an array counts in blocks of 1024 elements from its start.
    Every element must be handed over once: a tied array once, a shared-out one with `sharded`.

    Args:
        arrays: float32, bfloat16 or float16, of any strides; None is left out.
        max_norm: 0: only measure.
        group: the ranks that hold the gradients together; None: this rank alone. Collective over it.
        norm_type: 1 to 8; math.inf for the largest magnitude.
        sharded: whether the ranks of the group hold different elements (all of them are counted) or the same
            (counted once); one answer for all arrays, or one for each.

    Returns: the norm before clipping, on every rank. If it is not finite, nothing is changed.

    Raises:
        InvalidArgument: before anything is changed or communicated.
    """
    limit = check_number("clip_grad_norm: max_norm", max_norm)
    order = check_norm_type("clip_grad_norm: norm_type", norm_type)
    given = list(arrays.values() if isinstance(arrays, Mapping) else arrays)
    one = isinstance(sharded, (bool, np.bool_))
    flags = [bool(sharded)] * len(given) if one else [bool(flag) for flag in np.atleast_1d(sharded)]
    if len(flags) != len(given):
        raise InvalidArgument(f"clip_grad_norm: sharded has {len(flags)} entries for {len(given)} arrays")
    if group is None and any(flags):
        raise InvalidArgument(
            "clip_grad_norm: sharded arrays need the group of ranks that hold the rest of them"
        )
    for place, array in enumerate(given):
        if array is not None:
            check_float(f"clip_grad_norm: array {place}", array, written=True)
    check_distinct("clip_grad_norm", {f"array {i}": a for i, a in enumerate(given) if a is not None})

    norm = _core.ArrayNorm(None if group is None else group._mesh.world._core, order)
    for array, is_sharded in zip(given, flags, strict=True):
        # What all ranks hold alike is counted by the first one.
        if array is not None and (is_sharded or group is None or group.rank == 0):
            norm.add(readable(array))
    if group is not None:
        norm.reduce(group._mesh._core, group.axes)
    total = norm.value()
    if math.isfinite(total) and 0 < limit < total:
        for array in given:
            if array is not None:
                target = Target(array)
                norm.scale(target.memory, limit / total)
                target.store()
    return total
