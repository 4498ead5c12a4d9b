"""Signals that ask for a checkpoint, and when all ranks look whether one of them had any."""

from __future__ import annotations

import signal
import struct
import threading
import time
from types import FrameType
from typing import Any

from .. import _core
from .layout import gather

__all__ = ["SAVE_AND_END", "SignalWatch"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAVE_AND_END = 1  # the bit of SIGTERM
_LOOK_EVERY_S = 0.2  # an exchange of all ranks: in fast steps it would be a part of the time
_MAX_STEPS = 1000


class SignalWatch:
    """SIGUSR1 and SIGTERM to any rank become a decision of all ranks, after the same step."""

    def __init__(self) -> None:
        self._came: set[int] = set()
        self._handlers: dict[int, Any] = {}
        self._steps_left = 1
        self._steps = 0  # since the last look
        self._looked_at: float | None = None

    def install(self) -> None:
        """Takes the signals over; does nothing outside of the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._handlers[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Gives them back; a SIGTERM that came then ends the process as it would have."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        if signal.SIGTERM in self._came:
            self._came.clear()
            signal.raise_signal(signal.SIGTERM)

    def end_process(self) -> None:
        """Makes `restore` end it."""
        self._came.add(signal.SIGTERM)

    def after_step(self, core: _core.World, *, last: bool) -> int:
        """The signals that any rank had, as bits; looks after the `last` step, and at most every _LOOK_EVERY_S.

        Collective. The ranks agree on the number of steps until they look again from the slowest one's time.
        """
        self._steps += 1
        self._steps_left -= 1
        if self._steps_left > 0 and not last:
            return 0
        now = time.monotonic()
        step_s = _LOOK_EVERY_S if self._looked_at is None else (now - self._looked_at) / self._steps
        own = 0
        for number in tuple(self._came):
            self._came.discard(number)
            own |= 1 << _SIGNALS.index(signal.Signals(number))
        texts = gather(core, struct.pack("<Bd", own, step_s), "checkpoints: signals")
        signals, slowest = 0, 1e-6
        for text in texts:
            bits, seconds = struct.unpack("<Bd", text)
            signals, slowest = signals | bits, max(slowest, seconds)
        self._steps_left = max(1, min(_MAX_STEPS, int(_LOOK_EVERY_S / slowest)))
        self._steps, self._looked_at = 0, time.monotonic()
        return signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and number in self._came:  # a second time: at once
            signal.signal(number, self._handlers.get(number, signal.SIG_DFL))
            signal.raise_signal(number)
        self._came.add(number)
