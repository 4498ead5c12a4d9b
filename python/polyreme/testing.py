"""Ranks as threads of one process, for tests."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

from . import _core
from .world import World

__all__ = ["run_ranks"]

T = TypeVar("T")


def run_ranks(
    size: int,
    function: Callable[[World], T],
    *,
    device: str = "cpu",
    num_threads: int = 1,
    isa: str = "auto",
    executor: str = "immediate",
    schedule_seed: int = 0,
    timeout_s: float = 60.0,
) -> list[T]:
    """Calls function(world) on `size` ranks, each a thread; returns the results in order of rank.

    device: "cpu"; "cuda", a GPU for each rank and NCCL between them; "cuda:0", all on one GPU.

    A rank that raises makes the others fail too; the first exception is raised here.
    """
    cores = _core.make_local_worlds(
        size=size,
        device=device,
        num_threads=num_threads,
        isa=isa,
        executor=executor,
        schedule_seed=schedule_seed,
        timeout_s=timeout_s,
    )
    results: list[T | None] = [None] * size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = function(World(cores[rank], rank))
        except BaseException as error:  # the first one is the cause, whatever it is
            errors.append(error)
            cores[rank].abort(f"{type(error).__name__}: {error}")
            # Groups that the function has made hang on the frames that the error holds; their end
            # tells the ranks that wait in them.
            traceback.clear_frames(error.__traceback__)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
