"""How a run is divided over ranks, in a line such as "dp=2,tp=2,zero=1": what `polyreme verify` changes of a script."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import InvalidArgument
from .schedule import FixedSchedule, ScheduleKind
from .schedule.kinds import PUBLISHED
from .world import Lanes
from .zero import Zero

__all__ = ["AXES", "Layout", "lanes_of", "lanes_to_verify", "layout_to_verify"]

AXES = ("dp", "tp", "pp")
LAYOUT_VARIABLE = "POLYREME_VERIFY_LAYOUT"
LANES_VARIABLE = "POLYREME_VERIFY_LANES"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh's axes, and the settings that change speed and memory but no bits.

    zero, schedule, micro_batch: None leaves what the script says. schedule: the name of a kind in `pr.schedule`.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int | None = None
    schedule: str | None = None
    micro_batch: int | None = None

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads "dp=2,tp=2,zero=1".

        Raises:
            InvalidArgument: an unknown name, a bad value, the same name twice.
        """
        names = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            number = re.fullmatch(r"0|[1-9][0-9]{0,8}", value)
            valid = value in PUBLISHED if name == "schedule" else number and (int(value) or name == "zero")
            if name not in names or not valid or name in values:
                raise InvalidArgument(
                    f"layout '{text}': '{part}'; expected each at most once of dp=N, tp=N, pp=N, zero=0 to 3,"
                    f" micro_batch=N, schedule= one of {', '.join(PUBLISHED)}: such as 'dp=2,tp=2,zero=1'"
                )
            values[name] = value if name == "schedule" else int(value)
        if values.get("zero", 0) > 3:
            raise InvalidArgument(f"layout '{text}': zero={values['zero']}; expected 0, 1, 2 or 3")
        return cls(**values)

    @property
    def num_ranks(self) -> int:
        """The product of the axes."""
        return self.dp * self.tp * self.pp

    def of_zero(self, own: Zero) -> Zero:
        """The script's settings in this layout's stage, whole where dp does not have the groups that it says."""
        size = own.shard_size
        return replace(
            own,
            stage=own.stage if self.zero is None else self.zero,
            shard_size=size if size is not None and self.dp % size == 0 else None,
        )

    def of_schedule(self, own: ScheduleKind | FixedSchedule | None) -> ScheduleKind | FixedSchedule | None:
        """This layout's schedule, or the script's where there is a pipeline."""
        if self.schedule is not None:
            return PUBLISHED[self.schedule]()
        return own if self.pp > 1 else None


def layout_to_verify(environ: Mapping[str, str] | None = None) -> Layout | None:
    """The layout that `polyreme verify` asks for instead of the script's; None outside of it."""
    text = (os.environ if environ is None else environ).get(LAYOUT_VARIABLE)
    return Layout.parse(text) if text is not None else None


def lanes_to_verify(lanes: Lanes, environ: Mapping[str, str] | None = None) -> Lanes:
    """The script's lanes; under `polyreme verify` those that it leaves open are the same in every run."""
    text = (os.environ if environ is None else environ).get(LANES_VARIABLE)
    wanted: dict[str, Any] = json.loads(text) if text else {}
    return replace(lanes, **{axis: size for axis, size in wanted.items() if getattr(lanes, axis) is None})


def lanes_of(layouts: Iterable[Layout]) -> dict[str, int]:
    """Lanes that all of these layouts can have: the largest size along each axis that has lanes."""
    chosen = list(layouts)
    axes = [axis for axis in AXES if hasattr(Lanes(), axis)]
    return {axis: max(getattr(layout, axis) for layout in chosen) for axis in axes}
