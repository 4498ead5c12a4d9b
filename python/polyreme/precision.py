"""In which formats a model is stored, and how its loss is scaled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .checks import check_int, check_number, check_type
from .errors import InvalidArgument

__all__ = ["DTYPES", "LossScale", "Precision"]

# The names that users write, and those of dtypes.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A factor of the loss that keeps small gradients from vanishing in fp16 (Micikevicius et al. 2018).

    Gradients are divided by it again in fp32, before clipping. A step with a gradient that is not finite on any
    rank is skipped on all of them, and the scale backs off.

    initial: the first scale.
    growth, interval: the scale is multiplied by `growth` after `interval` applied steps in a row.
    backoff: factor at an overflow; with hysteresis=n at the n-th overflow since the scale last grew, and at every
        one after it.
    minimum, maximum: limits. An overflow at the minimum is an error, since no smaller scale could help.
    dynamic: False keeps `initial` for ever.

    Raises:
        InvalidArgument: a field out of range, naming it.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0
    maximum: float = 16777216.0
    hysteresis: int = 1
    dynamic: bool = True

    def __post_init__(self) -> None:
        def store(name: str, value: int | float) -> None:
            object.__setattr__(self, name, value)

        for name in ("initial", "minimum", "maximum"):
            store(name, check_number(f"LossScale: {name}", getattr(self, name), above=True))
        store("growth", check_number("LossScale: growth", self.growth, 1.0))
        store("backoff", check_number("LossScale: backoff", self.backoff, high=1.0, above=True))
        store("interval", check_int("LossScale: interval", self.interval, 1))
        store("hysteresis", check_int("LossScale: hysteresis", self.hysteresis, 1))
        check_type("LossScale: dynamic", self.dynamic, bool, "True or False")
        if not self.minimum <= self.initial <= self.maximum:
            raise InvalidArgument(
                f"LossScale: initial={self.initial:g}; expected minimum={self.minimum:g} to maximum={self.maximum:g}"
            )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a model is stored. `Trainer(precision="bf16")` is `Trainer(precision=pr.Precision(dtype="bf16"))`.

    Arithmetic, statistics and sums inside kernels, sums of gradients and the optimizer are fp32 in any case; what is stored in 16 bits is rounded once, to nearest even. With 16-bit parameters the optimizer keeps
    fp32 masters, from which they are rounded after every update.

    dtype: "fp32", "bf16" or "fp16": parameters and activations.
    norms: the parameters of norms: `dtype` (None) or "fp32".
    logits: what the loss reads, and its gradient: `dtype` (None) or "fp32".
    gradients: "fp32", "bf16" or "fp16": what the gradient of a lane is rounded to, once, before lanes are added in
        fp32. The bits are those of any other layout; where every rank has one lane (lanes.dp is dp, a power of
        two) gradients travel between ranks in half the bytes.
    loss_scale: LossScale(...), a number for a fixed one, or None: dynamic for fp16, 1 otherwise.

    Example:
        >>> import polyreme as pr
        >>> pr.Precision(dtype="bf16", norms="fp32").dtype
        'bf16'

    Raises:
        InvalidArgument: an unknown name or a combination that does not exist, naming the field.
    """

    dtype: str = "fp32"
    norms: str | None = None
    logits: str | None = None
    gradients: str = "fp32"
    loss_scale: LossScale | float | None = None

    def __post_init__(self) -> None:
        check_name("Precision: dtype", self.dtype, tuple(DTYPES))
        for name in ("norms", "logits"):
            if getattr(self, name) is not None:
                check_name(f"Precision: {name}", getattr(self, name), tuple({self.dtype: 0, "fp32": 0}))
        check_name("Precision: gradients", self.gradients, tuple(DTYPES))
        scale = self.loss_scale
        if scale is not None and not isinstance(scale, LossScale):
            number = check_number(
                "Precision: loss_scale", scale, above=True, otherwise="a polyreme.LossScale or None"
            )
            object.__setattr__(self, "loss_scale", number)

    @classmethod
    def of(cls, value: str | Precision) -> Precision:
        """`value`, or the precision of that name."""
        if isinstance(value, Precision):
            return value
        check_name("precision", value, tuple(DTYPES), "a polyreme.Precision")
        return cls(dtype=value)

    def scaling(self) -> LossScale:
        """What `loss_scale` means."""
        if isinstance(self.loss_scale, LossScale):
            return self.loss_scale
        if self.loss_scale is None and self.dtype == "fp16":
            return LossScale()
        fixed = 1.0 if self.loss_scale is None else self.loss_scale
        return replace(LossScale(), initial=fixed, minimum=fixed, maximum=fixed, dynamic=False)

    def _dtypes(self) -> dict[str, str]:
        """The dtypes that the model is built with."""
        return {
            "dtype": DTYPES[self.dtype],
            "norm_dtype": DTYPES[self.norms or self.dtype],
            "logits_dtype": DTYPES[self.logits or self.dtype],
        }


def check_name(what: str, value: object, names: tuple[str, ...], otherwise: str = "") -> None:
    if value not in names:
        expected = " or ".join(repr(name) for name in names)
        raise InvalidArgument(
            f"{what}={value!r}; expected {expected}{f', or {otherwise}' if otherwise else ''}"
        )
