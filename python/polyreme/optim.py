"""Optimizer rules, as configurations; the arithmetic is in the C++ core."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .checks import check_number, check_type, matching
from .errors import InvalidArgument
from .lr import Schedule

__all__ = ["LAMB", "SGD", "AdamW", "Lion", "Muon", "Optimizer"]

LearningRate: TypeAlias = float | Schedule


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """What all rules share.

    lr: a number, or a schedule of `polyreme.lr`.
    weight_decay: decoupled; applied to parameters of two dims and more.
    weight_decay_rules: patterns of names (as in fnmatch) to their decay, first match wins, before
        the default rule: {"wte.*": 0.0}. A pattern that matches nothing is refused.
    lr_rules: patterns of names to a factor of lr, first match wins: {"h.0.*": 0.5}; 1 otherwise.
    """

    lr: LearningRate = 1e-3
    weight_decay: float = 0.0
    weight_decay_rules: Mapping[str, float] = field(default_factory=dict)
    lr_rules: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rule = type(self).__name__
        if not callable(self.lr):
            lr = check_number(f"{rule}: lr", self.lr, otherwise="a schedule of polyreme.lr")
            object.__setattr__(self, "lr", lr)
        object.__setattr__(self, "weight_decay", check_number(f"{rule}: weight_decay", self.weight_decay))
        for name, what in (("weight_decay_rules", "their decay"), ("lr_rules", "a factor of lr")):
            given = getattr(self, name)
            check_type(f"{rule}: {name}", given, Mapping, f"patterns of names to {what}")
            checked = {
                pattern: check_number(f"{rule}: {name}: {pattern}", value) for pattern, value in given.items()
            }
            object.__setattr__(self, name, checked)

    def lr_at(self, step: int) -> float:
        """The learning rate of the update number `step`, counted from 1."""
        if not callable(self.lr):
            return self.lr
        return check_number(f"{type(self).__name__}: learning rate of update {step}: lr", self.lr(step))

    def decay_of(self, specs: list[dict[str, Any]]) -> list[float]:
        """The weight decay of every parameter in `specs`."""
        defaults = [self.weight_decay if spec["weight_decay"] else 0.0 for spec in specs]
        return _by_name("weight_decay_rules", self.weight_decay_rules, specs, defaults)

    def lr_multiplier_of(self, specs: list[dict[str, Any]]) -> list[float]:
        """The factor of the learning rate of every parameter in `specs`."""
        return _by_name("lr_rules", self.lr_rules, specs, [1.0] * len(specs))

    def core_options(self, specs: list[dict[str, Any]]) -> dict[str, Any]:
        """The rule and its constants for these parameters, as the core takes them."""
        return {
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "momentum": 0.0,
            "elementwise": [],
            "trainable": [],
            **self._constants(),
            "weight_decay": self.decay_of(specs),
            "lr_multiplier": self.lr_multiplier_of(specs),
            **self._of_parameters(specs),
        }

    def _of_parameters(self, specs: list[dict[str, Any]]) -> dict[str, Any]:
        """Further lists, one entry for each parameter."""
        return {}

    @abstractmethod
    def _constants(self) -> dict[str, Any]:
        """The rule and its constants, as the core takes them."""


def _by_name(
    what: str, rules: Mapping[str, float], specs: list[dict[str, Any]], defaults: list[float]
) -> list[float]:
    """The value of the first pattern that matches a parameter's name, else its default."""
    names = [spec["name"] for spec in specs]
    matching(what, list(rules), names)
    return [
        next((value for pattern, value in rules.items() if fnmatch.fnmatchcase(name, pattern)), default)
        for name, default in zip(names, defaults, strict=True)
    ]


def _check_betas(rule: Optimizer, betas: Any) -> tuple[float, ...]:
    name = type(rule).__name__
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise InvalidArgument(f"{name}: betas={betas!r}; expected two numbers, 0 <= beta < 1")
    return tuple(check_number(f"{name}: betas={betas}: beta", beta, high=1.0) for beta in betas)


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019) with bias correction, eps outside the root."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", _check_betas(self, self.betas))
        object.__setattr__(self, "eps", check_number(f"{type(self).__name__}: eps", self.eps, above=True))

    def _constants(self) -> dict[str, Any]:
        return {"rule": "adamw", "beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum b = momentum * b + g where it is above 0."""

    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "momentum", check_number("SGD: momentum", self.momentum, high=1.0))

    def _constants(self) -> dict[str, Any]:
        return {"rule": "sgd", "momentum": self.momentum}


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion (Chen et al. 2023): steps of size lr in the direction of a sign. Takes a third to a tenth of AdamW's lr."""

    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", _check_betas(self, self.betas))

    def _constants(self) -> dict[str, Any]:
        return {"rule": "lion", "beta1": self.betas[0], "beta2": self.betas[1]}


@dataclass(frozen=True, kw_only=True)
class LAMB(AdamW):
    """LAMB (You et al. 2020): AdamW's direction, scaled by the ratio of the norms of parameter and direction.

    Norms are those of whole parameters, whatever part a rank holds. Parameters without weight decay take AdamW's
    step, as is usual.
    """

    eps: float = 1e-6

    def _constants(self) -> dict[str, Any]:
        return {**super()._constants(), "rule": "lamb"}


@dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """Muon (Jordan et al. 2024): the momentum of a matrix is orthogonalized by five Newton-Schulz steps.

    Matrices are the parameters of two dims whose names match none of `elementwise`; all else takes AdamW, with
    betas and eps. Steps of matrices are 0.2 sqrt(max(rows, cols)) lr long, so that one lr and one weight decay suit
    both parts (Liu et al. 2025). A fused matrix, such as q|k|v, counts as one. The momentum is sharded like all
    state; for the update the matrices of a bucket are gathered, and each is computed by the ranks that hold a
    part of it. One that tp cuts is put together on the ranks of tp, which compute it alike.
    """

    momentum: float = 0.95
    elementwise: Sequence[str] = ("*emb*", "*wte*", "*wpe*", "*head*")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "momentum", check_number("Muon: momentum", self.momentum, high=1.0))
        if isinstance(self.elementwise, str):
            raise InvalidArgument(
                f"Muon: elementwise={self.elementwise!r}; expected a list of patterns of names"
            )

    def _constants(self) -> dict[str, Any]:
        return {**super()._constants(), "rule": "muon", "momentum": self.momentum}

    def _of_parameters(self, specs: list[dict[str, Any]]) -> dict[str, Any]:
        def is_elementwise(spec: dict[str, Any]) -> bool:
            by_name = any(fnmatch.fnmatchcase(spec["name"], pattern) for pattern in self.elementwise)
            return by_name or len(spec["shape"]) != 2

        return {"elementwise": [int(is_elementwise(spec)) for spec in specs]}
