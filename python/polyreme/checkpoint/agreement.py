"""What the ranks of a Checkpointer agree on before anything is changed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from .. import _core
from ..errors import CheckpointError, Error
from . import directory as names
from .arrays import state_of
from .layout import Planner, State, check_names, require_agreement
from .manifest import encode_json

__all__ = ["AgreedSave", "agree_on_save", "agree_on_settings"]


def agree_on_settings(core: _core.World, settings: dict[str, Any]) -> None:
    """Refuses settings that are not those of rank 0. Collective.

    Raises:
        CheckpointError: on all ranks: which differ, and where.
    """
    facts = {"settings": settings, "error": ""}
    first = require_agreement(core, "Checkpointer", facts)[0]["settings"]
    facts["error"] = "; ".join(
        f"{name}={own!r}, rank 0 has {first[name]!r}" for name, own in settings.items() if own != first[name]
    )
    require_agreement(core, "Checkpointer: all ranks need the same arguments", facts)


@dataclass(frozen=True)
class AgreedSave:
    """A save that all ranks mean alike. digests: of what each holds, for the plan. is_busy: an earlier save of any
    rank is in flight."""

    source: State
    scalars: dict[str, Any]
    extras: dict[str, Any]
    generation: str
    digests: list[str]
    is_busy: bool


def agree_on_save(
    core: _core.World, planner: Planner, state: Any, step: int, extras: dict[str, Any], *, busy: bool
) -> AgreedSave:
    """Compares what every rank is about to save. Collective: all ranks return, or all raise.

    Raises:
        InvalidArgument: names, arrays, extras of this rank that cannot be saved.
        CheckpointError: that is so on another rank; or the ranks mean different steps or scalars.
    """
    what = f"checkpoint save of step {step}"
    local: Error | None = None
    facts: dict[str, Any] = {"step": step, "busy": busy, "error": ""}
    try:
        source = state_of(state, writable=False)
        held, scalars = source.held(), source.scalars()
        check_names(held)
        texts = encode_json("extras", extras) + encode_json("scalars", scalars)
        facts["scalars"] = hashlib.sha256(texts).hexdigest()
        facts["digest"] = planner.digest(held)
        facts["generation"] = names.new_generation()
    except Error as error:
        local = error
        facts["error"] = str(error)
    try:
        everybody = require_agreement(core, what, facts)
    except CheckpointError:
        if local is not None:
            raise local from None
        raise
    for key, meaning in (("step", "step"), ("scalars", "extras")):
        ranks = [r for r, f in enumerate(everybody) if f[key] != everybody[0][key]]
        if ranks:
            raise CheckpointError(
                f"{what}: rank {ranks[0]} has another {meaning} than rank 0: {everybody[ranks[0]][key]} and"
                f" {everybody[0][key]}; all ranks must save the same"
            )
    return AgreedSave(
        source=source,
        scalars=scalars,
        extras=extras,
        generation=everybody[0]["generation"],
        digests=[f["digest"] for f in everybody],
        is_busy=any(f["busy"] for f in everybody),
    )
