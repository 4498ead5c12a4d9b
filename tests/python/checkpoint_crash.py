"""Saves that are killed: run by test_checkpoint_crash.py as a process that forks, one child for each death.

    checkpoint_crash.py points FOLDER SCENARIO     dies at every point in turn; prints what it saw as JSON
    checkpoint_crash.py random FOLDER COUNT SEED   dies at COUNT random moments

Ranks are threads of the child, so a death takes all of them. Everything happens in children: a process that has
had threads must not fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time

import numpy as np
import polyreme as pr
from polyreme import _core
from polyreme.checkpoint import ArrayPart, complete_steps, latest_step
from polyreme.testing import run_ranks

RANKS = 2
SIZE = 20_000  # of a tensor: enough to go past the page cache
LARGE_SIZE = 600_000  # several writes of a file, by two threads at once


class NoExchange(_core.FileOps):
    """As on a file system that cannot exchange two names."""

    def exchange(self, directory, a, b):
        return False


def state(world, step):
    """A weight on every rank, a moment cut over the ranks; every element depends on the step."""
    own = np.arange(SIZE, dtype=np.float64) + 1e6 * step
    bounds = [SIZE * r // world.size for r in range(world.size + 1)]
    begin, end = bounds[world.rank], bounds[world.rank + 1]
    return {
        "model/w": own.astype(np.float32),
        "optimizer/m": ArrayPart(own[begin:end].copy(), (SIZE,), begin),
    }


def save(folder, steps, keep, rank, files):
    """Saves; `files` is what rank `rank` writes with."""

    def body(world):
        with pr.Checkpointer(folder, world=world, keep=keep) as checkpoints:
            if world.rank == rank:
                checkpoints._files = files
            for step in steps:
                checkpoints.save(state(world, step), step=step)

    run_ranks(RANKS, body)


def check(folder, allowed):
    """What there is loads with right bits, on another number of ranks; returns its step."""

    def body(world):
        with pr.Checkpointer(folder, world=world, fallback=False) as checkpoints:
            step = checkpoints.load(state(world, 0)).step
            assert step == latest_step(folder)
            assert step in allowed, f"latest is step {step}, expected one of {allowed}"
            for s in complete_steps(folder):
                target = state(world, 0)
                checkpoints.load(target, step=s)
                expected = state(world, s)
                np.testing.assert_array_equal(target["model/w"], expected["model/w"])
                np.testing.assert_array_equal(target["optimizer/m"].array, expected["optimizer/m"].array)
            return step

    return run_ranks(1, body)[0]


def save_and_check(folder, steps, keep):
    save(folder, steps, keep, 0, _core.FileOps())
    return check(folder, set(steps))


def in_child(function, *arguments):
    """Runs it in a fork; returns (exit status or -signal, what it has returned)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            result = json.dumps(function(*arguments)).encode()
            os.write(writer, result)
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(status)
    os.close(writer)
    return pid, reader


def result_of(child):
    pid, reader = child
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code, json.loads(text) if text else None


def require_child(function, *arguments):
    code, result = result_of(in_child(function, *arguments))
    assert code == 0, f"a check failed with status {code}"
    return result


def die_at_every_point(folder, scenario):
    seen = []
    steps, keep = ([3], 2) if scenario == "new" else ([2], 2)
    start = f"{folder}/start"
    require_child(save, start, [1, 2], keep, 0, _core.FileOps())
    for rank in range(RANKS):
        at = 1
        while True:
            place = f"{folder}/{rank}-{at}"
            shutil.copytree(start, place)
            kind = NoExchange if scenario == "replace_without_exchange" else _core.FileOps
            code, _ = result_of(in_child(save, place, steps, keep, rank, kind(at=at, kind="kill")))
            if code == 0:
                break
            assert code == -signal.SIGKILL, f"rank {rank}, point {at}: status {code}"
            step = require_child(check, place, {2, 3} if scenario == "new" else {2})
            # A later save of the same step works, and leaves nothing behind.
            require_child(save_and_check, place, steps, keep)
            left = [n for n in os.listdir(place) if n.startswith(".") and n != ".lock"]
            assert not left, f"rank {rank}, point {at}: {left}"
            seen.append([rank, at, step])
            at += 1
    return seen


def die_at_random(folder, count, seed):
    chance = random.Random(seed)
    step, deaths, longest = 0, 0, 0.02
    require_child(save, folder, [0], 2, 0, _core.FileOps())
    while deaths < count:
        child = in_child(save, folder, range(step + 1, step + 4), 2, 0, _core.FileOps())
        time.sleep(chance.random() * longest)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child[0], signal.SIGKILL)
        code, _ = result_of(child)
        if code == 0:
            longest *= 0.8
        else:
            assert code == -signal.SIGKILL, f"status {code}"
            deaths += 1
        found = require_child(check, folder, set(range(step, step + 4)))
        if found == step:
            longest *= 1.3  # nothing was committed: it was too early
        step = found
    return {"deaths": deaths, "last_step": step}


if __name__ == "__main__":
    mode, where = sys.argv[1:3]
    if mode == "points":
        print(json.dumps(die_at_every_point(where, sys.argv[3])))
    else:
        SIZE = LARGE_SIZE
        print(json.dumps(die_at_random(where, int(sys.argv[3]), int(sys.argv[4]))))
