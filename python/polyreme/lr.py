"""Learning-rate schedules: pure functions of the number of the update, counted from 1.

All start with a linear warm-up: update k of `warmup` has peak * k / warmup. A skipped step does
not count, since the position is the number of applied updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .checks import check_int, check_number
from .errors import InvalidArgument

__all__ = ["Schedule", "constant", "warmup_cosine", "warmup_linear", "wsd"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate of update `step`: `schedule(step)`. Made by the functions of this module."""

    peak: float
    warmup: int
    total: int
    final: float
    _after: Callable[[int], float]
    _text: str

    def __post_init__(self) -> None:
        def store(name: str, value: int | float) -> None:
            object.__setattr__(self, name, value)

        store("peak", check_number(f"{self._text}: peak", self.peak))
        store("warmup", check_int(f"{self._text}: warmup", self.warmup, 0))
        store("total", check_int(f"{self._text}: total", self.total, 0))
        store("final", check_number(f"{self._text}: final", self.final))
        if self.warmup > self.total:
            raise InvalidArgument(
                f"{self._text}: warmup={self.warmup}, total={self.total}; expected 0 <= warmup <= total"
            )

    def __call__(self, step: int) -> float:
        """The learning rate of update number `step`, from 1."""
        step = check_int(f"{self._text}: updates are counted from 1: step", step, 1)
        if step <= self.warmup:
            return self.peak * step / self.warmup
        return self.peak * self._after(step)

    def __repr__(self) -> str:
        return self._text


def _progress(step: int, begin: int, end: int) -> float:
    """0 at the update after `begin`, 1 at `end` and after."""
    if end - begin <= 1:
        return 0.0 if step <= end else 1.0
    return min(1.0, max(0.0, (step - begin - 1) / (end - begin - 1)))


def constant(peak: float, *, warmup: int = 0) -> Schedule:
    """`peak` after the warm-up, for ever."""
    return Schedule(peak, warmup, warmup, 1.0, lambda step: 1.0, f"constant(peak={peak}, warmup={warmup})")


def warmup_cosine(*, peak: float, warmup: int, total: int, final: float = 0.1) -> Schedule:
    """Half a cosine from `peak` down to final * peak at update `total`, then constant."""

    def after(step: int) -> float:
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * _progress(step, warmup, total)))

    text = f"warmup_cosine(peak={peak}, warmup={warmup}, total={total}, final={final})"
    return Schedule(peak, warmup, total, final, after, text)


def warmup_linear(*, peak: float, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """A straight line from `peak` to final * peak, which update total + 1 would have."""

    def after(step: int) -> float:
        share = min(1.0, (step - 1 - warmup) / max(1, total - warmup))
        return 1 - (1 - final) * share

    text = f"warmup_linear(peak={peak}, warmup={warmup}, total={total}, final={final})"
    return Schedule(peak, warmup, total, final, after, text)


def wsd(*, peak: float, warmup: int, total: int, decay: int, final: float = 0.0) -> Schedule:
    """Warm-up, stable, decay (Hu et al. 2024): linear to final * peak over the last `decay` updates."""
    text = f"wsd(peak={peak}, warmup={warmup}, total={total}, decay={decay}, final={final})"
    warmup = check_int(f"{text}: warmup", warmup, 0)
    total = check_int(f"{text}: total", total, 0)
    decay = check_int(f"{text}: decay", decay, 0)
    if decay > total - warmup:
        raise InvalidArgument(f"{text}: decay={decay}; expected 0 <= decay <= total - warmup")

    def after(step: int) -> float:
        into_decay = step - (total - decay)
        return 1.0 if into_decay <= 0 else 1 - (1 - final) * min(1.0, into_decay / max(1, decay))

    return Schedule(peak, warmup, total, final, after, text)
