"""What a ShardedOptimizer refuses: arrays, buffers and states that do not fit."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .arrays import dtype_name
from .checks import check_int, check_type
from .errors import InvalidArgument
from .group import Group
from .loss_scaler import LossScaler

__all__ = ["check_alike", "check_state", "named_arrays"]


def named_arrays(what: str, arrays: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Arrays by name, each named once. what: the argument's name."""
    pairs = list(arrays.items() if isinstance(arrays, Mapping) else arrays)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidArgument(
                f"ShardedOptimizer: {what}: expected names to arrays, or pairs of a name and an array;"
                f" got a {type(pair).__name__}"
            )
    named = dict(pairs)
    if len(named) != len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise InvalidArgument(f"ShardedOptimizer: {what}: the name {twice!r} comes twice")
    if what == "params" and not named:
        raise InvalidArgument("ShardedOptimizer: there are no parameters")
    return named


def check_alike(group: Group, buffers: Mapping[str, Any]) -> None:
    """That all ranks have the same names, shapes and dtypes. Collective."""
    texts = [f"{name!r}: {dtype_name(array)}{list(array.shape)}" for name, array in buffers.items()]
    facts = [f"{len(texts)} buffers"], texts
    for here in facts:
        own = np.array([zlib.crc32(text.encode()) for text in here], np.int64)
        low, high = group.all_reduce(own, "min"), group.all_reduce(own, "max")
        different = [text for text, low_, high_ in zip(here, low, high, strict=True) if low_ != high_]
        if different:
            raise InvalidArgument(
                f"ShardedOptimizer: the ranks have different buffers; here: {'; '.join(different)}"
            )


def check_state(
    state: Mapping[str, Any],
    *,
    rule: str,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, Sequence[str]],
    loss_scaler: LossScaler | None,
) -> dict[tuple[str, str], Any]:
    """The arrays of a state_dict by kind and name. Raises with all that is wrong.

    rule, shapes, loss_scaler: of the optimizer. kinds: the names that have each kind of state.
    """
    check_type("load_state_dict: state", state, Mapping, "what state_dict returns")
    missing = {"rule", "applied_steps", "updates", "loss_scaler", "weight", "state"} - set(state)
    if missing:
        raise InvalidArgument(f"load_state_dict: the state lacks {', '.join(sorted(missing))}")
    if state["rule"] != rule:
        raise InvalidArgument(
            f"load_state_dict: the state is of rule {state['rule']!r}, this optimizer has {rule!r}"
        )
    check_int("load_state_dict: applied_steps", state["applied_steps"], 0)
    check_int("load_state_dict: skips", state.get("skips", 0), 0)
    for part in ("updates", "weight", "state"):
        check_type(f"load_state_dict: {part}", state[part], Mapping, "a dictionary")
    parts = {"weight": state["weight"], **state["state"]}
    problems = [f"this rule has no {kind}" for kind in parts if kind not in kinds]
    problems += [f"the updates of {name!r} are missing" for name in shapes if name not in state["updates"]]
    for kind, names in kinds.items():
        have = parts.get(kind, {})
        problems += [f"{kind} of {name!r} is missing" for name in names if name not in have]
        problems += [f"{kind} of {name!r} belongs to no parameter" for name in have if name not in names]
        for name in names:
            shape = shapes[name]
            if name in have and np.shape(have[name]) != shape:
                problems.append(f"{kind} of {name!r} has shape {np.shape(have[name])}; expected {shape}")
            elif name in have and np.asarray(have[name]).dtype.kind not in "fiu":
                problems.append(f"{kind} of {name!r} is of {np.asarray(have[name]).dtype}; expected numbers")
    if (state["loss_scaler"] is None) != (loss_scaler is None):
        problems.append("one of both has a loss scaler, the other none")
    if problems:
        raise InvalidArgument(f"load_state_dict: {'; '.join(problems)}. Nothing was changed")
    for name in shapes:
        check_int(f"load_state_dict: updates of {name!r}", state["updates"][name], 0)
    if loss_scaler is not None:
        loss_scaler._check(state["loss_scaler"])
    return {(kind, name): parts[kind][name] for kind, names in kinds.items() for name in names}
