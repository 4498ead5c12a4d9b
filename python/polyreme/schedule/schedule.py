"""One built schedule: what it costs, what it holds, how it is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from polyreme import _core
from polyreme.checks import check_int, check_number, check_type
from polyreme.errors import InvalidArgument

from . import json_form, picture

__all__ = ["Action", "Costs", "Problem", "Schedule", "Timeline"]

PerChunk: TypeAlias = float | Sequence[float]


class Action(NamedTuple):
    """One thing that a rank does.

    kind: "forward", "backward" (both halves), "backward_input", "backward_weight", "send_activation",
        "recv_activation", "send_gradient", "recv_gradient", "gather", "release", "reduce" or "step".
    chunk: one that the rank holds; -1 for the step.
    micro_batch: -1 for gather, release, reduce and step.
    peer: the other rank of a transfer, else -1.
    with_previous: a transfer that runs at once with the one before it.
    """

    kind: str
    chunk: int = -1
    micro_batch: int = -1
    peer: int = -1
    with_previous: bool = False


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long things take, in any one unit of time; a sequence has one number for each chunk.

    forward, backward_input, backward_weight: of one micro-batch; a whole backward takes the sum of two.
    latency, transfer_bytes, bandwidth: a transfer takes latency + bytes / bandwidth (None: no limit). Bytes
        of chunk c are those of the tensor between chunks c - 1 and c.
    gather, reduce, step: of each collective.
    overlap: transfers and collectives run beside computations; False: one thing after the other.
    """

    forward: PerChunk = 1.0
    backward_input: PerChunk = 1.0
    backward_weight: PerChunk = 1.0
    latency: float = 0.0
    transfer_bytes: PerChunk = 0.0
    bandwidth: float | None = None
    gather: float = 0.0
    reduce: float = 0.0
    step: float = 0.0
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "transfer_bytes"):
            object.__setattr__(self, name, _per_chunk(name, getattr(self, name)))
        for name in ("latency", "gather", "reduce", "step"):
            object.__setattr__(self, name, check_number(f"Costs: {name}", getattr(self, name)))
        if self.bandwidth is not None:
            bandwidth = check_number(
                "Costs: bandwidth", self.bandwidth, above=True, otherwise="None for no limit"
            )
            object.__setattr__(self, "bandwidth", bandwidth)
        check_type("Costs: overlap", self.overlap, bool, "True or False")

    def _to_core(self) -> _core.ScheduleCosts:
        per_byte = 0.0 if self.bandwidth is None else 1.0 / self.bandwidth
        return _core.ScheduleCosts(
            forward=_numbers(self.forward),
            backward_input=_numbers(self.backward_input),
            backward_weight=_numbers(self.backward_weight),
            transfer=[self.latency + per_byte * size for size in _numbers(self.transfer_bytes)],
            gather=self.gather,
            reduce=self.reduce,
            step=self.step,
            overlap=self.overlap,
        )


def _per_chunk(name: str, value: PerChunk) -> PerChunk:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(check_number(f"Costs: {name}[{i}]", number) for i, number in enumerate(value))
    return check_number(f"Costs: {name}", value, otherwise="a sequence with one for each chunk")


def _numbers(value: PerChunk) -> list[float]:
    return list(value) if isinstance(value, Sequence) else [value]


def _sizes(what: str, value: int | Sequence[int]) -> list[int]:
    values = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [value]
    return [check_int(f"peak_bytes: {what}", number, 0) for number in values]


@dataclass(frozen=True)
class Timeline:
    """When everything happens: the lists run by their costs.

    spans: [rank][position], the start and end of each action.
    busy: [rank], the time in computations.
    bubble: [rank], the share of the makespan in which the rank computes nothing.
    """

    makespan: float
    spans: tuple[tuple[tuple[float, float], ...], ...]
    busy: tuple[float, ...]
    bubble: tuple[float, ...]

    @property
    def mean_bubble(self) -> float:
        """The idle share of all ranks together."""
        return math.fsum(self.bubble) / len(self.bubble)


@dataclass(frozen=True)
class Problem:
    """Why a schedule is not valid. cycle: of a deadlock, (rank, position, action, waits for rank) of each."""

    rank: int
    position: int
    action: str
    reason: str
    cycle: tuple[tuple[int, int, str, int], ...]
    message: str


class Schedule:
    """What every rank does in one step, in order. Immutable. Made by `build` of a kind, or read.

    Two schedules are equal if all their actions are.
    """

    def __init__(self, core: _core.Schedule) -> None:
        self._core = core

    @staticmethod
    def from_actions(
        actions: Sequence[Sequence[Action]],
        *,
        micro_batches: int,
        chunks: Sequence[Sequence[int]] | None = None,
        forward_only: bool = False,
    ) -> Schedule:
        """A schedule of the lists of all ranks, not yet validated.

        chunks: [rank], the chunks that it holds; default: rank r holds chunk r.
        """
        micro_batches = check_int("Schedule: micro_batches", micro_batches, 1, (1 << 31) - 1)
        held = [[rank] for rank in range(len(actions))] if chunks is None else [list(c) for c in chunks]
        lists = [[Action(*action) for action in rank] for rank in actions]
        return Schedule(_core.Schedule(micro_batches, forward_only, held, lists))

    @staticmethod
    def from_text(text: str) -> Schedule:
        """Reads the text form, without validating. Raises InvalidArgument with line and token."""
        check_type("Schedule.from_text: text", text, str, "a string")
        return Schedule(_core.parse_schedule(text))

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Reads the JSON form, without validating. Raises InvalidArgument with the place."""
        check_type("Schedule.from_json: text", text, str, "a string")
        return Schedule(json_form.parse(text))

    @property
    def stages(self) -> int:
        """Ranks of the pipeline."""
        return len(self.chunks)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self._core.micro_batches

    @property
    def forward_only(self) -> bool:
        """Whether it is for evaluation: no backward anywhere."""
        return self._core.forward_only

    @property
    def has_transfers(self) -> bool:
        """Whether the lists say what is sent and received; see `with_transfers`."""
        return self._core.has_transfers

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """[rank]: the chunks (virtual stages) that it holds."""
        return tuple(map(tuple, self._core.chunks))

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """[rank]: its list."""
        return tuple(tuple(Action(*action) for action in rank) for rank in self._core.actions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._core.equals(other._core)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        num = sum(map(len, self.actions))
        return f"<Schedule: {self.stages} stages, {self.micro_batches} micro-batches, {num} actions>"

    def problem(self, lanes: int = 1) -> Problem | None:
        """The first thing that makes the schedule invalid, or None. Lists without any transfer are judged
        as computations alone (`with_transfers` then gives a valid schedule).

        lanes: equal runs of micro-batches, within which weight gradients must be in ascending order.
        """
        lanes = check_int("schedule: lanes", lanes, 1, self.micro_batches)
        found = self._core.problem(lanes, not self.has_transfers)
        if found is None:
            return None
        cycle = tuple((w["rank"], w["position"], w["action"], w["waits_for"]) for w in found.pop("cycle"))
        return Problem(cycle=cycle, **found)

    def validate(self, lanes: int = 1) -> None:
        """Raises InvalidArgument naming rank, position, action and reason unless `problem` finds none."""
        problem = self.problem(lanes)
        if problem is not None:
            raise InvalidArgument(problem.message)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """[rank]: the most activations that live at once, in chunks of one micro-batch."""
        return tuple(self._core.peak_activations())

    def peak_bytes(
        self,
        *,
        activation: int | Sequence[int],
        kept: int | Sequence[int] = 0,
        boundary: int | Sequence[int] = 0,
    ) -> tuple[int, ...]:
        """[rank]: the most bytes at once, from the bytes of one micro-batch (a sequence: of each chunk).

        activation: saved by the forward, until the backward of the input.
        kept: what of it, and of gradients, stays until the backward of the weights.
        boundary: the tensor between chunks c - 1 and c, from its receive to its use, or until it is sent.
        """
        return tuple(
            self._core.peak_bytes(
                _sizes("activation", activation), _sizes("kept", kept), _sizes("boundary", boundary)
            )
        )

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """Runs the lists by `costs` (default: every computation takes 1, nothing else takes time)."""
        self._need_transfers("simulate")
        result = self._core.simulate(_core_costs(costs))
        return Timeline(
            result["makespan"],
            tuple(map(tuple, result["spans"])),
            tuple(result["busy"]),
            tuple(result["bubble"]),
        )

    def with_transfers(self, costs: Costs | None = None) -> Schedule:
        """The same computations with sends and receives in the order in which, by `costs`, their tensors
        are made; those that were there are dropped. Raises InvalidArgument if the computations are not valid.
        """
        return Schedule(self._core.remove_transfers().add_transfers(_core_costs(costs)))

    def without_transfers(self) -> Schedule:
        """The same computations alone."""
        return Schedule(self._core.remove_transfers())

    def with_collectives(self, *, gather: str = "none", reduce: bool = False, step: bool = False) -> Schedule:
        """Adds what runs along other axes.

        gather: the whole weights of ZeRO-3: "step" from first to last use, "use" around every run of
            computations on one chunk, "none".
        reduce: the gradients of a chunk when its last one is there.
        step: the optimizer's update.
        """
        check_type("with_collectives: gather", gather, str, "'none', 'step' or 'use'")
        return Schedule(self._core.add_collectives(gather, reduce, step))

    def to_text(self) -> str:
        """The text form: a header, and one line of tokens for each rank."""
        return self._core.to_text()

    def to_json(self) -> str:
        """The JSON form: the same as objects with named fields."""
        return json_form.write(self._core)

    def svg(self, costs: Costs | None = None) -> str:
        """A picture: one row for each rank, by time."""
        return picture.svg(self._core, self.simulate(costs).spans)

    def terminal(self, costs: Costs | None = None, *, width: int = 160) -> str:
        """The same as text: one line for each rank, at most `width` characters."""
        width = check_int("terminal: width", width, 20, 100_000)
        return picture.terminal(self._core, self.simulate(costs).spans, width)

    def _need_transfers(self, what: str) -> None:
        if self.stages > 1 and not self.has_transfers:
            raise InvalidArgument(f"{what}: the schedule has computations alone; call with_transfers() first")


def _core_costs(costs: Costs | None) -> _core.ScheduleCosts:
    if costs is None:
        costs = Costs()
    check_type("schedule: costs", costs, Costs, "a polyreme.schedule.Costs")
    return costs._to_core()
