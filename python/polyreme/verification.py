"""Evidence of the promise: what every rank computed in every step, and the first place where two runs differ.

`polyreme verify` starts a script once for each layout with POLYREME_VERIFY_DIR and
POLYREME_VERIFY_STEPS set; the trainer then writes a record of every step and ends the script after
the last one.
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

if TYPE_CHECKING:
    from .trainer import StepStats, Trainer

__all__ = ["Difference", "StepRecorder", "first_difference", "read_records"]

DIR_VARIABLE = "POLYREME_VERIFY_DIR"
STEPS_VARIABLE = "POLYREME_VERIFY_STEPS"


class StepRecorder:
    """Writes one JSON line a step to DIR/rank-K.jsonl: loss, norm, and a digest of every gradient and weight.

    The trainer calls `begin` before a step and `record` after it.
    """

    def __init__(self, folder: str, steps: int, rank: int) -> None:
        self._steps = steps
        self._file: TextIO = open(os.path.join(folder, f"rank-{rank}.jsonl"), "w", encoding="utf-8")  # noqa: SIM115

    @classmethod
    def from_environment(cls, rank: int, environ: Mapping[str, str] | None = None) -> StepRecorder | None:
        """The recorder that `polyreme verify` asks for; None outside of it."""
        env = os.environ if environ is None else environ
        if DIR_VARIABLE not in env:
            return None
        return cls(env[DIR_VARIABLE], int(env.get(STEPS_VARIABLE, "1")), rank)

    def begin(self, trainer: Trainer) -> None:
        """Notes the weights that the step starts from, which the script may have changed."""
        self._weights_before = {name: _digest(trainer.parameter(name)) for name in trainer.parameter_names()}

    def record(self, trainer: Trainer, stats: StepStats) -> None:
        """Writes the step; after the last one ends the script with exit code 0 on every rank."""
        names = trainer.parameter_names()
        learning = [name for name in names if name not in trainer.frozen]
        line = {
            "step": stats.step,
            "lanes": trainer.lanes.dp,
            "weights_before": self._weights_before,
            "loss": stats.loss.hex(),
            "grad_norm": stats.grad_norm.hex(),
            "gradients": {name: _digest(trainer.gradient(name)) for name in learning},
            "weights": {name: _digest(trainer.parameter(name)) for name in names},
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if stats.step >= self._steps:
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
                f"rank {rank} of {num_ranks} recorded no step; does the script train with polyreme.Trainer,"
                " and does its mesh follow the number of ranks?"
            )
        ranks.append(lines)
    return ranks


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
    lanes: tuple[int, int]

    def __str__(self) -> str:
        tensor = f" of '{self.name}'" if self.name else ""
        text = f"step {self.step}, rank {self.rank}: {self.what}{tensor} is {self.got}, the 1-rank run has {self.expected}"
        if self.lanes[0] != self.lanes[1]:
            text += (
                f"; the runs have different lanes.dp ({self.lanes[1]} and {self.lanes[0]}): give the Trainer"
                " lanes=pr.Lanes(dp=...) explicitly"
            )
        return text


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
