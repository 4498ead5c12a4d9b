"""A Trainer as the state of a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .layout import HeldTensor
from .slab import Slab

if TYPE_CHECKING:
    from ..trainer import Trainer

__all__ = ["TrainerState"]

# Of the configuration of a model, what changes memory and speed alone.
_FREE = ("recompute",)


class TrainerState:
    """Weights as model/<parameter>, state of the optimizer as optimizer/<kind>/<parameter>; by shard of ZeRO."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._engine = trainer._engine
        specs = trainer.model.param_specs()
        shapes = {spec["name"]: tuple(spec["shape"]) for spec in specs}
        self._params = [spec["name"] for spec in specs]
        self._held: list[HeldTensor] = []
        self._parts: list[list[tuple[int, int, int]]] = []  # of each tensor: (part, begin, end)
        index: dict[tuple[str, Slab | None], int] = {}
        for part, (kind, param, dtype, begin, size, dim, ranges) in enumerate(self._engine.state_parts()):
            name = f"model/{param}" if kind == "weight" else f"optimizer/{kind}/{param}"
            slab = Slab.of(dim, ranges, shapes[param]) if ranges else None
            held = index.setdefault((name, slab), len(self._held))
            if held == len(self._held):
                self._held.append(HeldTensor(name, dtype, shapes[param], [], slab))
                self._parts.append([])
            self._held[held].pieces.append((begin, begin + size))
            self._parts[held].append((part, begin, begin + size))

    def held(self) -> list[HeldTensor]:
        """See State."""
        return self._held

    def _ranges(self, pieces: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
        rows = []
        for index, begin, end in pieces:
            for part, first, last in self._parts[index]:
                if max(begin, first) < min(end, last):
                    rows.append((part, max(begin, first), min(end, last)))
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    def read(self, pieces: Sequence[tuple[int, int, int]], staging: NDArray[np.uint8]) -> None:
        """See State."""
        self._engine.read_state(self._ranges(pieces), staging)

    def write(self, pieces: Sequence[tuple[int, int, int]], staging: NDArray[np.uint8]) -> None:
        """See State."""
        self._engine.write_state(self._ranges(pieces), staging)

    def scalars(self) -> dict[str, Any]:
        """See State."""
        trainer = self._trainer
        return {
            "applied_steps": trainer.applied_steps,
            "skipped_steps": trainer.skipped_steps,
            "skipped_in_a_row": self._engine.skipped_in_a_row,
            "loss_scale": list(self._engine.loss_scaler_state),
            "precision": dataclasses.asdict(trainer.precision) | {"loss_scale": None},
            "updates": dict(zip(self._params, self._engine.updates, strict=True)),
            "seed": trainer.seed,
            "global_batch": trainer.global_batch,
            "lanes": dataclasses.asdict(trainer.lanes),
            "micro_batch": trainer.micro_batch,
            "model": {"kind": type(trainer.model).__name__, **trainer.model._facts()},
            "optimizer": type(trainer.optimizer).__name__,
            "data": trainer._data_facts,
            "isa": trainer.mesh.world.device.rsplit(", ", 1)[-1],
        }

    def layout(self) -> dict[str, Any]:
        """See State."""
        mesh = self._trainer.mesh
        return {"mesh": {axis: mesh.size(axis) for axis in mesh.order}, "zero": self._trainer.zero.stage}

    def check_scalars(self, state: dict[str, Any]) -> list[str]:
        """See State. Lanes may differ, with a warning: then so do the bits."""
        own, problems = self.scalars(), []
        try:
            # What earlier versions did not write: as it was then.
            state = {
                "skipped_in_a_row": 0,
                **state,
                "lanes": {"tp": 1, **state["lanes"]},
                "precision": {"gradients": "fp32", **state["precision"]},
            }
            for key in ("seed", "global_batch", "optimizer", "precision"):
                if state[key] != own[key]:
                    problems.append(f"{key} was {state[key]!r}, is {own[key]!r}")
            for key in sorted({*state["model"], *own["model"]} - {*_FREE}):
                old, new = state["model"].get(key), own["model"].get(key)
                if old != new:
                    problems.append(f"model: {key} was {old!r}, is {new!r}")
            if set(state["updates"]) != set(self._params):
                problems.append("the counters of updates are of other parameters")
            counts = [
                *(state[key] for key in ("applied_steps", "skipped_steps", "skipped_in_a_row")),
                *state["updates"].values(),
            ]
            if not all(type(n) is int for n in counts):
                problems.append("a count is no integer")
            if [type(n) for n in state["loss_scale"]] != [float, int, int]:
                problems.append(f"{state['loss_scale']!r} is no state of a loss scale")
            if state["lanes"] != own["lanes"]:
                self._warn(
                    "the checkpoint was made with lanes %s, this run has %s", state["lanes"], own["lanes"]
                )
            order, micro_batch = own["lanes"]["order"], state.get("micro_batch", own["micro_batch"])
            if order == "round_first" and micro_batch != own["micro_batch"]:
                self._warn(
                    "the checkpoint was made with micro_batch=%d, which is part of the order of sums with"
                    " order='round_first'; this run has %d",
                    micro_batch,
                    own["micro_batch"],
                )
            levels = {state.get("isa", own["isa"]), own["isa"]}
            if own["precision"]["dtype"] == "bf16" and len(levels) > 1 and "amx" in levels:
                self._warn(
                    "the checkpoint was made at the instruction-set level %s, this run has %s",
                    state["isa"],
                    own["isa"],
                )
        except (KeyError, TypeError, AttributeError):
            problems.append("it was not saved from a Trainer; load its weights alone with weights_only=True")
        return problems

    def _warn(self, text: str, *values: Any) -> None:
        if self._trainer.mesh.world.rank == 0:
            end = ": it goes on, but not with the bits of the run that was stopped"
            logging.getLogger("polyreme").warning(text + end, *values)

    def set_scalars(self, state: dict[str, Any]) -> None:
        """See State."""
        updates = [state["updates"][name] for name in self._params]
        self._engine.set_progress(
            state["applied_steps"], state["skipped_steps"], state.get("skipped_in_a_row", 0), updates
        )
        if self._trainer.precision.scaling().dynamic:
            scale, good_steps, hysteresis_left = state["loss_scale"]
            self._engine.loss_scaler_state = (scale, good_steps, hysteresis_left)
        self._trainer._data_facts = state.get("data")
