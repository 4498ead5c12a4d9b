"""Evidence of the promise: what every rank computed in every step, and the first place where two runs differ.

`polyreme verify` starts a script once for each layout with POLYREME_VERIFY_DIR and
POLYREME_VERIFY_STEPS set; the trainer then writes a record of every step and ends the script after
the last one. POLYREME_VERIFY_LAYOUT and _LANES take the place of the script's (see layout.py). With
POLYREME_VERIFY_PRECISION the trainer computes in that precision, and records losses alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from .errors import InvalidArgument
from .layout import AXES, LANES_VARIABLE, LAYOUT_VARIABLE
from .precision import Precision

if TYPE_CHECKING:
    from .step_stats import StepStats
    from .trainer import Trainer

__all__ = [
    "Difference",
    "LossDifference",
    "StepRecorder",
    "compare_losses",
    "first_difference",
    "is_verifying",
    "precision_to_verify",
    "read_records",
    "variables",
]

DIR_VARIABLE = "POLYREME_VERIFY_DIR"
STEPS_VARIABLE = "POLYREME_VERIFY_STEPS"
PRECISION_VARIABLE = "POLYREME_VERIFY_PRECISION"


def variables(
    folder: str,
    steps: int,
    *,
    layout: str | None = None,
    lanes: Mapping[str, int] | None = None,
    precision: str | None = None,
) -> dict[str, str]:
    """The environment that makes a script record `steps` steps in `folder`, with these instead of its own."""
    found = {DIR_VARIABLE: folder, STEPS_VARIABLE: str(steps)}
    if layout is not None:
        found[LAYOUT_VARIABLE] = layout
    if lanes:
        found[LANES_VARIABLE] = json.dumps(lanes)
    if precision is not None:
        found[PRECISION_VARIABLE] = precision
    return found


def is_verifying(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this is a run of `polyreme verify`."""
    return DIR_VARIABLE in (os.environ if environ is None else environ)


def precision_to_verify(precision: Precision) -> Precision:
    """The precision that `polyreme verify --precision` asks for; outside of it, the script's own."""
    dtype = os.environ.get(PRECISION_VARIABLE)
    return precision if dtype in (None, precision.dtype) else Precision.of(str(dtype))


class StepRecorder:
    """Writes one JSON line a step to DIR/rank-K.jsonl: loss, norm, and a digest of every gradient and weight.

    The trainer calls `begin` before a step and `record` after it.
    """

    def __init__(self, folder: str, steps: int, rank: int, *, losses_only: bool = False) -> None:
        self._steps_left = steps
        self._losses_only = losses_only
        self._file: TextIO = open(os.path.join(folder, f"rank-{rank}.jsonl"), "w", encoding="utf-8")  # noqa: SIM115

    @classmethod
    def from_environment(cls, rank: int, environ: Mapping[str, str] | None = None) -> StepRecorder | None:
        """The recorder that `polyreme verify` asks for; None outside of it."""
        env = os.environ if environ is None else environ
        if not is_verifying(env):
            return None
        steps = int(env.get(STEPS_VARIABLE, "1"))
        return cls(env[DIR_VARIABLE], steps, rank, losses_only=PRECISION_VARIABLE in env)

    def begin(self, trainer: Trainer) -> None:
        """Notes the weights that the step starts from, which the script may have changed."""
        names = [] if self._losses_only else trainer.parameter_names()
        self._weights_before = {name: _digest(trainer.parameter(name)) for name in names}

    def record(self, trainer: Trainer, stats: StepStats) -> None:
        """Writes the step; after the last one ends the script with exit code 0 on every rank."""
        names = [] if self._losses_only else trainer.parameter_names()
        learning = [name for name in names if name not in trainer.frozen]
        line = {
            "step": stats.step,
            "lanes": {axis: getattr(trainer.lanes, axis) for axis in AXES if hasattr(trainer.lanes, axis)},
            "weights_before": self._weights_before,
            "skipped": stats.skipped,
            "loss": stats.loss.hex(),
            "grad_norm": stats.grad_norm.hex(),
            "gradients": {name: _digest(trainer.gradient(name)) for name in learning},
            "weights": {name: _digest(trainer.master_parameter(name)) for name in names},
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._steps_left -= 1
        if self._steps_left <= 0:
            trainer.mesh.world.barrier()
            raise SystemExit(0)


def _digest(array: np.ndarray[Any, Any]) -> str:
    """Hash of the bits and, for people, the norm; not by BLAS, whose bits depend on the threads of a rank."""
    norm = math.sqrt(float(np.square(array.astype(np.float64)).sum()))
    return f"{hashlib.sha256(array.tobytes()).hexdigest()[:16]} norm {norm!r}"


def read_records(folder: str, num_ranks: int) -> list[list[dict[str, Any]]]:
    """The records of every rank.

    Raises:
        InvalidArgument: a rank has recorded nothing.
    """
    ranks = []
    for rank in range(num_ranks):
        path = os.path.join(folder, f"rank-{rank}.jsonl")
        lines = []
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
        if not lines:
            raise InvalidArgument(
                f"rank {rank} of {num_ranks} recorded no step; does the script train with polyreme.Trainer?"
            )
        ranks.append(lines)
    return ranks


@dataclass(frozen=True, kw_only=True)
class LossDifference:
    """How the losses of a run in 16 bits compare with those of its twin in fp32.

    final, twin_final: mean loss of the last tenth of the steps, at least of one.
    worst: the largest |loss - twin's| of a step, relative to the twin's.
    skipped: steps that overflowed.
    """

    steps: int
    final: float
    twin_final: float
    worst: float
    skipped: int

    @property
    def drop(self) -> float:
        """By how much the final loss is worse than the twin's, relative to it; negative where it is better."""
        return (self.final - self.twin_final) / abs(self.twin_final) if self.twin_final else self.final


def compare_losses(run: list[dict[str, Any]], twin: list[dict[str, Any]]) -> LossDifference:
    """Compares the applied steps of two runs of one rank."""
    applied = [[float.fromhex(r["loss"]) for r in records if not r["skipped"]] for records in (run, twin)]
    steps = min(map(len, applied))
    last = max(1, steps // 10)
    losses, twin_losses = (values[:steps] for values in applied)
    pairs = list(zip(losses, twin_losses, strict=True))
    return LossDifference(
        steps=steps,
        final=sum(losses[-last:]) / last,
        twin_final=sum(twin_losses[-last:]) / last,
        worst=max(abs(loss - twin) / abs(twin) if twin else abs(loss) for loss, twin in pairs),
        skipped=sum(record["skipped"] for record in run),
    )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where a run differs from the 1-rank run.

    what: the quantity, in words; name: of the tensor, else empty.
    expected: the 1-rank run's value.
    """

    step: int
    rank: int
    what: str
    name: str
    expected: str
    got: str
    lanes: tuple[dict[str, int], dict[str, int]]

    def __str__(self) -> str:
        tensor = f" of '{self.name}'" if self.name else ""
        text = f"step {self.step}, rank {self.rank}: {self.what}{tensor} is {self.got}, the 1-rank run has {self.expected}"
        if self.lanes[0] != self.lanes[1]:
            others = " and ".join(
                _text(dict(sorted(lanes.items() - other.items())))
                for lanes, other in (self.lanes[::-1], self.lanes)
            )
            text += (
                f"; the runs have different lanes, {others}: give the Trainer the same lanes in every layout"
            )
        return text


def _text(lanes: Mapping[str, int]) -> str:
    return ", ".join(f"lanes.{axis}={size}" for axis, size in lanes.items())


def first_difference(expected: list[dict[str, Any]], ranks: list[list[dict[str, Any]]]) -> Difference | None:
    """Compares every rank's records with those of the 1-rank run; None if all bits are equal.

    The first step counts first; inside a step the weights it starts from, the loss, the gradients, the
    norm, the new weights: what is computed first is named first, whichever rank has it.
    """
    for index, reference in enumerate(expected):
        for key, what in _COMPARED:
            for rank, records in enumerate(ranks):
                record = records[index] if index < len(records) else {}
                found = _compare(reference, record, rank, key, what)
                if found is not None:
                    return found
    return None


# In order of computation: the key of a record, and its name for people.
_COMPARED = (
    ("weights_before", "the weight before the step"),
    ("loss", "loss"),
    ("gradients", "the gradient"),
    ("grad_norm", "gradient norm"),
    ("weights", "the new weight"),
)


def _compare(
    reference: dict[str, Any], record: dict[str, Any], rank: int, key: str, what: str
) -> Difference | None:
    expected, got = reference[key], record.get(key)
    if expected == got:
        return None
    name = ""
    if isinstance(expected, dict):
        found = got or {}
        name = next(name for name, value in expected.items() if found.get(name) != value)
        expected, got = expected[name], found.get(name)
    else:
        expected = repr(float.fromhex(expected))
        got = None if got is None else repr(float.fromhex(got))
    return Difference(
        step=reference["step"],
        rank=rank,
        what=what,
        name=name,
        expected=expected,
        got=str(got or "not recorded"),
        lanes=(reference["lanes"], record.get("lanes", reference["lanes"])),
    )
