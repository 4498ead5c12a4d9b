"""Loss scaling for gradients in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _core
from .checks import check_int, check_number, check_type
from .errors import InvalidArgument

__all__ = ["LossScaler"]


class LossScaler:
    """The factor of the loss that keeps small gradients from vanishing in float16 (Micikevicius et al. 2018).

        scaler = pr.LossScaler()
        loss = model(batch) * scaler.scale      # gradients are scale times as large
        ...                                     # divide them by scale; skip the step if one is not finite
        scaler.update(overflowed)               # the same flag on all ranks

    `pr.ShardedOptimizer(..., loss_scaler=scaler)` does the last two lines.

    Args:
        initial: the first scale.
        growth: its factor after `interval` steps in a row without an overflow.
        backoff: its factor at an overflow.
        minimum, maximum: the scale stays between them.
        hysteresis: how many overflows there must have been since the scale last grew before it backs off.

    Raises:
        InvalidArgument: constants out of range.
    """

    def __init__(
        self,
        *,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        minimum: float = 1.0,
        maximum: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        self._core = _core.LossScaler(
            dynamic=True,
            initial=check_number("LossScaler: initial", initial, above=True),
            growth=check_number("LossScaler: growth", growth, above=True),
            backoff=check_number("LossScaler: backoff", backoff, above=True),
            interval=check_int("LossScaler: interval", interval, 1),
            minimum=check_number("LossScaler: minimum", minimum, above=True),
            maximum=check_number("LossScaler: maximum", maximum, above=True),
            hysteresis=check_int("LossScaler: hysteresis", hysteresis, 1),
        )
        self.dynamic = True

    @classmethod
    def static(cls, scale: float) -> LossScaler:
        """A scale that never changes; a step that overflows is still skipped."""
        self = cls.__new__(cls)
        scale = check_number("LossScaler: scale", scale, above=True)
        self._core = _core.LossScaler(
            dynamic=False,
            initial=scale,
            growth=2.0,
            backoff=0.5,
            interval=1,
            minimum=scale,
            maximum=scale,
            hysteresis=1,
        )
        self.dynamic = False
        return self

    @property
    def scale(self) -> float:
        """The factor of the loss until the next update."""
        return self._core.scale

    def update(self, overflowed: bool) -> None:
        """Once per step, after it, with the same flag on all ranks: whether a gradient was not finite."""
        self._core.update(bool(overflowed))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: {"scale", "good_steps", "hysteresis_left"}."""
        return self._core.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`.

        Raises:
            InvalidArgument: not a state of such a scaler; nothing is changed.
        """
        self._core.load(**self._check(state))

    def _check(self, state: Any) -> dict[str, Any]:
        """The numbers of a state. Raises if it is none."""
        check_type("LossScaler: state", state, Mapping, "what state_dict returns")
        missing = {"scale", "good_steps", "hysteresis_left"} - set(state)
        if missing:
            raise InvalidArgument(f"LossScaler: the state lacks {', '.join(sorted(missing))}")
        return {
            "scale": check_number("LossScaler: scale", state["scale"], above=True),
            "good_steps": check_int("LossScaler: good_steps", state["good_steps"], 0),
            "hysteresis_left": check_int("LossScaler: hysteresis_left", state["hysteresis_left"], 0),
        }
