"""Pipeline schedules as data: made, written by hand, checked, timed and drawn. Nothing here needs ranks.

    schedule = pr.schedule.zb_v().build(stages=4, micro_batches=8)
    schedule.simulate().bubble           # the idle share of each rank
    schedule.peak_activations            # of each rank, in chunks of one micro-batch
    pr.schedule.from_file("mine.txt")    # a list of your own, in the text or the JSON form

A schedule is a list of actions for each rank (stage). csrc/pipeline/schedule/README.md defines the words,
the rules that `validate` proves, and the text form.
"""

from __future__ import annotations

from .kinds import (
    FixedSchedule,
    ScheduleKind,
    dual_pipe_v,
    from_file,
    from_json,
    from_text,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from .schedule import Action, Costs, Problem, Schedule, Timeline

__all__ = [
    "Action",
    "Costs",
    "FixedSchedule",
    "Problem",
    "Schedule",
    "ScheduleKind",
    "Timeline",
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
