"""The published schedules and those of a user, before their sizes are known."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from polyreme import _core
from polyreme.checks import check_int
from polyreme.errors import InvalidArgument

from .json_form import MAX_BYTES
from .schedule import Schedule

__all__ = [
    "PUBLISHED",
    "FixedSchedule",
    "ScheduleKind",
    "dual_pipe_v",
    "from_file",
    "from_json",
    "from_text",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "zb_h1",
    "zb_v",
]

_MAX = (1 << 31) - 1  # what the core takes; its own limits are lower


@dataclass(frozen=True)
class ScheduleKind:
    """A published schedule. Made by the functions of this module.

    chunks: per rank.
    """

    name: str
    chunks: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", check_int(f"{self.name}: chunks", self.chunks, 1, _MAX))

    def build(self, stages: int, micro_batches: int) -> Schedule:
        """The lists for these sizes. Raises InvalidArgument with the rule and the nearest sizes that work."""
        return Schedule(_core.generate_schedule(self.name, *self._check(stages, micro_batches), self.chunks))

    def build_forward_only(self, stages: int, micro_batches: int) -> Schedule:
        """The lists for evaluation, with the chunks where `build` has them; any number of micro-batches."""
        stages, micro_batches = self._check(stages, micro_batches)
        chunks = _core.place_chunks(self.name, stages, self.chunks)
        return Schedule(_core.generate_forward_only(chunks, micro_batches))

    def _check(self, stages: int, micro_batches: int) -> tuple[int, int]:
        return (
            check_int(f"{self.name}: stages", stages, 1, _MAX),
            check_int(f"{self.name}: micro_batches", micro_batches, 1, _MAX),
        )


@dataclass(frozen=True)
class FixedSchedule:
    """A user's schedule, which is for its own sizes alone. Made by from_text, from_json and from_file."""

    schedule: Schedule
    name: str = "schedule"

    def build(self, stages: int, micro_batches: int) -> Schedule:
        """The validated lists, with their transfers added if there were none. Raises InvalidArgument for a
        problem, and for other sizes than those of the schedule.
        """
        self._check_sizes(stages, micro_batches)
        self.schedule.validate()
        complete = self.schedule.has_transfers or self.schedule.stages == 1
        return self.schedule if complete else self.schedule.with_transfers()

    def build_forward_only(self, stages: int, micro_batches: int) -> Schedule:
        """The lists for evaluation with any number of micro-batches, with the chunks where they are."""
        self._check_sizes(stages, None)
        micro_batches = check_int(f"{self.name}: micro_batches", micro_batches, 1, _MAX)
        return Schedule(_core.generate_forward_only(self.schedule.chunks, micro_batches))

    def _check_sizes(self, stages: int, micro_batches: int | None) -> None:
        own = self.schedule
        if stages != own.stages or micro_batches not in (None, own.micro_batches):
            asked = f"stages={stages}" + ("" if micro_batches is None else f", micro_batches={micro_batches}")
            raise InvalidArgument(
                f"{self.name} is for stages={own.stages}, micro_batches={own.micro_batches}; asked for {asked}:"
                " change the layout or the batch, or write a schedule for them"
            )


def gpipe() -> ScheduleKind:
    """All forwards, then all backwards (Huang et al. 2019). Holds the activations of all micro-batches."""
    return ScheduleKind("gpipe")


def one_f_one_b() -> ScheduleKind:
    """One forward, one backward (Narayanan et al. 2021, 2.2.1): GPipe's bubble, fewer activations."""
    return ScheduleKind("one_f_one_b")


def interleaved(chunks: int = 2) -> ScheduleKind:
    """1F1B over several chunks per rank (Narayanan et al. 2021, 2.2.2): 1 / chunks of the bubble, more
    transfers. Needs a multiple of the stages as micro-batches.
    """
    return ScheduleKind("interleaved", chunks)


def zb_h1() -> ScheduleKind:
    """1F1B with split backwards (Qi et al. 2024, 2.1): about a third of the bubble, the same peak memory."""
    return ScheduleKind("zb_h1")


def zb_v() -> ScheduleKind:
    """Two chunks per rank in a V, split backwards (Qi et al. 2024, 6): no bubble but the start, if the three
    computations take equally long and micro_batches >= 2 * stages - 1.
    """
    return ScheduleKind("zb_v", 2)


def dual_pipe_v() -> ScheduleKind:
    """DeepSeek's DualPipeV: two chunks per rank in a V, forwards next to backwards of the other chunk, split
    backwards at the ends alone. Needs micro_batches >= 2 * stages.
    """
    return ScheduleKind("dual_pipe_v", 2)


PUBLISHED: dict[str, Callable[..., ScheduleKind]] = {
    make.__name__: make for make in (gpipe, one_f_one_b, interleaved, zb_h1, zb_v, dual_pipe_v)
}


def from_text(text: str) -> FixedSchedule:
    """A schedule in the text form, with or without transfers:

        micro_batches: 2
        0: F0 F1 B0 B1
        1: F0 B0 F1 B1

    Raises InvalidArgument with line and token.
    """
    return FixedSchedule(Schedule.from_text(text))


def from_json(text: str) -> FixedSchedule:
    """A schedule in the JSON form. Raises InvalidArgument with the place."""
    return FixedSchedule(Schedule.from_json(text))


def from_file(path: str | os.PathLike[str]) -> FixedSchedule:
    """A schedule in a file: the JSON form if its name ends in .json, else the text form.

    Raises InvalidArgument, naming the file, for what cannot be read as one, and OSError.
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InvalidArgument(f"{name}: more than {MAX_BYTES} bytes; expected a schedule of at most that")
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name}: byte {error.start} is not ASCII; a schedule is ASCII text") from None
    read = Schedule.from_json if name.endswith(".json") else Schedule.from_text
    try:
        return FixedSchedule(read(text), name)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None
