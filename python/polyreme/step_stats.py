"""What a training step reports."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepStats"]


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one step reports; the same on every rank, times apart.

    loss: mean over the valid tokens of the global batch.
    grad_norm: 2-norm of the whole gradient before clipping.
    lr: learning rate that was applied, or would have been.
    loss_scale: factor of the loss in this step; loss and grad_norm are without it.
    skipped: the gradient or the loss was not finite, or no token of the batch had a target; nothing has changed, and
        `step` has not advanced.
    not_finite: where `skipped` for that, the first parameter and the first rank with such a gradient.
    tokens: of the global batch. valid_tokens: those with a target.
    mfu: model FLOPs per second over the measured rate (`Trainer.peak_flops`), or None.
    validation_loss: where `fit` evaluated after this step, else None.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    valid_tokens: int
    seconds: float
    loss_scale: float = 1.0
    skipped: bool = False
    not_finite: str = ""
    mfu: float | None = None
    validation_loss: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the global batch over the seconds of the step."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0
