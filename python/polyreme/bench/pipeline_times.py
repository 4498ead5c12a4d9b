"""What the recorder tells of a pipeline's steps: each rank's busy time, and what each chunk's computations take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schedule import Costs, Schedule

__all__ = ["bubbles", "is_of_stage", "own_times"]

_ROWS = {"forward": 0, "backward": 1, "backward_input": 1, "backward_weight": 2}


def is_of_stage(span: dict[str, Any]) -> bool:
    """Whether it is a whole computation of the schedule, whose operations have spans of their own."""
    return span["kind"] == "other" and span["name"] in _ROWS


def own_times(
    spans: Sequence[dict[str, Any]], schedule: Schedule, rank: int, steps: int
) -> NDArray[np.float64] | None:
    """A rank's part of what `bubbles` reads; None if the recorder has lost spans of these steps.

    [3 * steps + 3 * chunks]: start, end and busy seconds of each step, then of each chunk the mean seconds of a
    forward, a backward (of the input, where it is split) and a split backward of the weights.
    """
    stage = [span for span in spans if is_of_stage(span)]
    own = [action for action in schedule.actions[rank] if action.kind in _ROWS]
    if len(stage) != steps * len(own):
        return None
    num_chunks = sum(len(chunks) for chunks in schedule.chunks)
    times = np.zeros((steps, 3))
    taken, count = np.zeros((2, num_chunks, 3))
    for step in range(steps):
        these = stage[step * len(own) : (step + 1) * len(own)]
        for action, span in zip(own, these, strict=True):
            seconds = 1e-9 * (span["end_ns"] - span["start_ns"])
            taken[action.chunk, _ROWS[action.kind]] += seconds
            count[action.chunk, _ROWS[action.kind]] += 1
            times[step, 2] += seconds
        times[step, :2] = 1e-9 * these[0]["start_ns"], 1e-9 * these[-1]["end_ns"]
    return np.concatenate([times.ravel(), (taken / np.maximum(count, 1)).ravel()])


def bubbles(ranks: NDArray[np.float64], schedule: Schedule, steps: int) -> dict[str, float]:
    """From own_times of every rank, [ranks, ...], of one host, whose ranks share a clock.

    bubble: the share of the ranks' time in which they compute nothing, from the first computation of a step to its
        last one anywhere. predicted: what the schedule says for the costs that were measured. balance: the mean
        rank's busy time over the busiest one's.
    """
    times = ranks[:, : 3 * steps].reshape(len(ranks), steps, 3)
    spans = times[:, :, 1].max(axis=0) - times[:, :, 0].min(axis=0)
    busy = times[:, :, 2]
    costs = ranks[:, 3 * steps :].sum(axis=0).reshape(-1, 3)  # a chunk is on one rank
    timeline = schedule.simulate(
        Costs(
            forward=costs[:, 0].tolist(),
            backward_input=costs[:, 1].tolist(),
            backward_weight=costs[:, 2].tolist(),
        )
    )
    total = busy.sum(axis=1)
    return {
        "bubble": float(1 - busy.sum() / (len(ranks) * spans.sum())),
        "predicted": timeline.mean_bubble,
        "balance": math.fsum(total) / len(total) / float(total.max()),
    }
