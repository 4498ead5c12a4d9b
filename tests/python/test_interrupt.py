"""Ctrl-C in one of several ranks that were started by hand, while it waits for another one."""

from __future__ import annotations

import re
import signal
import time

import pytest
from helpers import HANG_S, Ranks

pytestmark = pytest.mark.mp

# Rank 0 waits; the test presses Ctrl-C there. Rank 1 waits with it, rank 2 never comes.
HEAD = """
import json, signal, sys, time
import numpy as np
import polyreme as pr
from helpers import TINY, batches, local_part, make_trainer

def tell(**facts):
    print(json.dumps(facts), flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
"""
MEET = """
world = pr.init(timeout_s=60, init_timeout_s=60, num_threads=1)
group = pr.Mesh(world, dp=world.size)["dp"]
"""
WAIT = """
tell(state="waits")
try:
    wait()
except pr.CommError as error:
    tell(error=str(error))
"""
ABSENT = """
while not world.failure:
    time.sleep(0.01)
tell(failure=world.failure)
"""
WAITS = {
    "work": "work = group.all_reduce(np.ones(4), wait=False); wait = work.wait",
    "receive": "def wait(): group.receive(np.ones(4), source=world.size - 1)",
    "barrier": "wait = world.barrier",
    "step": "wait = lambda: make_trainer(world, global_batch=12)",
}


def press_ctrl_c(process):
    """Once it has waited for a while. Returns the seconds until its end."""
    time.sleep(0.3)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait(HANG_S)
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("what", "transport"),
    [*((what, "auto") for what in WAITS), ("barrier", "tcp")],
)
def test_ctrl_c_ends_a_wait_and_the_others_learn_why(what, transport):
    waiting = HEAD + MEET + WAITS[what] + WAIT
    absent = HEAD + MEET + ABSENT
    with Ranks([waiting, waiting, absent], POLYREME_TRANSPORT=transport) as ranks:
        ranks.wait_for(0, "waits")
        ranks.wait_for(1, "waits")
        seconds = press_ctrl_c(ranks.processes[0])
        code, told, errors = ranks.end(0)
        assert (code, told) == (-signal.SIGINT, []), errors
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors
        assert seconds < 10, "it waited for the others, or for a time-out"
        code, told, errors = ranks.end(1)
        assert code == 0, errors
        assert re.search("rank 0 .*KeyboardInterrupt", told[0]["error"]), told
        code, told, errors = ranks.end(2)
        assert code == 0, errors
        assert re.search("rank 0 .*KeyboardInterrupt", told[0]["failure"]), told


def test_ctrl_c_ends_the_search_for_the_others():
    with Ranks([f"{HEAD}\ntell(state='waits')\n{MEET}", ""]) as ranks:  # rank 1 never joins
        ranks.wait_for(0, "waits")
        assert press_ctrl_c(ranks.processes[0]) < 10
        code, _, errors = ranks.end(0)
        assert (code, errors.rstrip().splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt"), errors


# A script that stops in good order sets a flag in its handler, and looks at it between two steps.
def test_a_handler_that_does_not_raise_runs_while_its_rank_waits():
    handle = 'signal.signal(signal.SIGTERM, lambda number, frame: tell(state="handled"))'
    patient = (
        f"{HEAD}\n{handle}\n{MEET}\ntell(state='waits'); tell(sum=float(group.all_reduce(np.ones(1))[0]))"
    )
    late = HEAD + MEET + "tell(state='up'); sys.stdin.readline(); group.all_reduce(np.ones(1))"
    with Ranks([patient, late]) as ranks:
        ranks.wait_for(0, "waits")
        ranks.wait_for(1, "up")
        ranks.processes[0].send_signal(signal.SIGTERM)
        ranks.wait_for(0, "handled")
        ranks.processes[1].stdin.write("\n")
        ranks.processes[1].stdin.flush()
        code, told, errors = ranks.end(0)
        assert (code, told) == (0, [{"sum": 2.0}]), errors
