"""Optimizer rules, as configurations; the arithmetic is in the C++ core."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .checks import check_number, check_type
from .errors import InvalidArgument
from .lr import Schedule

__all__ = ["SGD", "AdamW", "Optimizer"]

LearningRate: TypeAlias = float | Schedule


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """What all rules share.

    lr: a number, or a schedule of `polyreme.lr`.
    weight_decay: decoupled; applied to parameters of two dims and more.
    weight_decay_rules: patterns of names (as in fnmatch) to their decay, first match wins, before
        the default rule: {"wte.*": 0.0}. A pattern that matches nothing is refused.
    """

    lr: LearningRate = 1e-3
    weight_decay: float = 0.0
    weight_decay_rules: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rule = type(self).__name__
        if not callable(self.lr):
            lr = check_number(f"{rule}: lr", self.lr, otherwise="a schedule of polyreme.lr")
            object.__setattr__(self, "lr", lr)
        check_type(
            f"{rule}: weight_decay_rules",
            self.weight_decay_rules,
            Mapping,
            "patterns of names to their decay",
        )
        decay = check_number(f"{rule}: weight_decay", self.weight_decay)
        rules = {
            pattern: check_number(f"{rule}: weight_decay_rules: {pattern}", value)
            for pattern, value in self.weight_decay_rules.items()
        }
        object.__setattr__(self, "weight_decay", decay)
        object.__setattr__(self, "weight_decay_rules", rules)

    def lr_at(self, step: int) -> float:
        """The learning rate of the update number `step`, counted from 1."""
        if not callable(self.lr):
            return self.lr
        return check_number(f"{type(self).__name__}: learning rate of update {step}: lr", self.lr(step))

    def decay_of(self, specs: list[dict[str, Any]]) -> list[float]:
        """The weight decay of every parameter in `specs`."""
        for pattern in self.weight_decay_rules:
            if not any(fnmatch.fnmatchcase(spec["name"], pattern) for spec in specs):
                raise InvalidArgument(
                    f"weight_decay_rules: no parameter matches {pattern!r}; names are like {specs[0]['name']!r}"
                )
        return [self._decay(spec) for spec in specs]

    def _decay(self, spec: dict[str, Any]) -> float:
        for pattern, value in self.weight_decay_rules.items():
            if fnmatch.fnmatchcase(spec["name"], pattern):
                return value
        return self.weight_decay if spec["weight_decay"] else 0.0

    @abstractmethod
    def _constants(self) -> dict[str, Any]:
        """The rule and its constants, as the core takes them."""


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019) with bias correction, eps outside the root."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise InvalidArgument(f"AdamW: betas={self.betas!r}; expected two numbers, 0 <= beta < 1")
        betas = tuple(check_number(f"AdamW: betas={self.betas}: beta", beta, high=1.0) for beta in self.betas)
        object.__setattr__(self, "betas", betas)
        object.__setattr__(self, "eps", check_number("AdamW: eps", self.eps, above=True))

    def _constants(self) -> dict[str, Any]:
        return {
            "rule": "adamw",
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "momentum": 0.0,
        }


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum b = momentum * b + g where it is above 0."""

    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "momentum", check_number("SGD: momentum", self.momentum, high=1.0))

    def _constants(self) -> dict[str, Any]:
        return {"rule": "sgd", "beta1": 0.0, "beta2": 0.0, "eps": 1.0, "momentum": self.momentum}
