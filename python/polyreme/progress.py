"""What rank 0 shows while it trains: one line that redraws itself, or JSON lines."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import TextIO

from .step_stats import StepStats

__all__ = ["Progress"]

_REDRAW_S = 0.1


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Reports steps on `stream`: a progress line if it is a terminal, otherwise one JSON object a step.

    The line shows step, loss, validation loss, gradient norm, learning rate, tokens/s, MFU and time
    left; rates are averages over the last steps. Other ranks pass enabled=False.
    """

    def __init__(self, total_steps: int, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._enabled = enabled
        self._stream = stream if stream is not None else sys.stdout
        self._terminal = self._stream.isatty()
        self._validation_loss: float | None = None
        self._seconds: float | None = None  # of a step, smoothed
        self._drawn = 0.0
        self._width = 0

    def report(self, stats: StepStats) -> None:
        """Shows one step."""
        if not self._enabled:
            return
        if stats.validation_loss is not None:
            self._validation_loss = stats.validation_loss
        previous = stats.seconds if self._seconds is None else self._seconds
        self._seconds = 0.9 * previous + 0.1 * stats.seconds
        if self._terminal:
            self._draw(stats)
        else:
            self._stream.write(json.dumps(self.record(stats)) + "\n")
            self._stream.flush()

    def record(self, stats: StepStats) -> dict[str, float | None]:
        """The JSON object of a step; numbers that are not finite are null."""
        return {
            "step": stats.step,
            "loss": _finite(stats.loss),
            "validation_loss": _finite(stats.validation_loss),
            "grad_norm": _finite(stats.grad_norm),
            "lr": stats.lr,
            "tokens_per_s": round(stats.tokens_per_s, 1),
            "mfu": None if stats.mfu is None else round(stats.mfu, 4),
            "eta_s": round((self._total - stats.step) * (self._seconds or 0.0), 1),
        }

    def line(self, stats: StepStats) -> str:
        """The progress line of a step."""
        parts = [f"step {stats.step}/{self._total}", f"loss {stats.loss:.4f}"]
        if self._validation_loss is not None:
            parts.append(f"val {self._validation_loss:.4f}")
        parts += [f"norm {stats.grad_norm:.2f}", f"lr {stats.lr:.1e}", f"{stats.tokens_per_s:,.0f} tok/s"]
        if stats.mfu is not None:
            parts.append(f"MFU {100 * stats.mfu:.0f}%")
        parts.append(f"ETA {_duration((self._total - stats.step) * (self._seconds or 0.0))}")
        return "  ".join(parts)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _draw(self, stats: StepStats) -> None:
        now = time.monotonic()
        last = stats.step >= self._total
        if now - self._drawn < _REDRAW_S and not last and stats.validation_loss is None:
            return
        self._drawn = now
        line = self.line(stats)
        # Steps that were validated stay on the screen.
        end = "\n" if last or stats.validation_loss is not None else ""
        room = self._columns() - 1
        if not end and len(line) > room:  # a line that wraps cannot be redrawn
            line = line.removeprefix("step ").replace("  ", " ").replace(" tok/s", " t/s")[:room]
        self._stream.write("\r" + line.ljust(self._width) + end)
        self._stream.flush()
        self._width = 0 if end else len(line)
