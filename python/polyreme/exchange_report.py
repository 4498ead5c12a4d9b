"""Of comm-report: exchanges that did not end, and who waits for whom.

The n-th tensor that rank a sends to rank b is the n-th that b receives from a, whatever calls they are in.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .journal import Journal, clean

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["StuckExchange", "find_stuck_exchanges"]


@dataclass
class StuckExchange:
    """The first exchange of a rank in a group that did not end.

    waits_for: by rank, what that one did not post ("a receive" or "a send"); empty if all of it was posted.
    circle: ranks that wait for each other in this order, this one first; empty if it is in none.
    """

    group: str
    rank: int
    sequence: int
    operation: str
    label: str
    waits_for: dict[int, str]
    circle: list[int]


def find_stuck_exchanges(
    name: str, numbers: dict[int, int], journals: dict[int, Journal]
) -> list[StuckExchange]:
    """Of one group; numbers: what each rank that has a journal calls it."""
    exchanges = {rank: _exchanges_of(journals[rank], number) for rank, number in numbers.items()}
    place = {journals[rank].groups[number].rank: rank for rank, number in numbers.items()}
    # Where a ring has lost its first operations only those that did not end can be told to be equally many.
    whole = all(journals[rank].num_operations == len(journals[rank].operations) for rank in numbers)
    posted: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])  # (from, to): sends, receives
    first: dict[int, Any] = {}
    awaited: dict[int, list[tuple[tuple[int, int], bool, int]]] = defaultdict(list)
    for rank, operations in exchanges.items():
        done = journals[rank].state("done")
        for operation in operations:
            ended = operation["state"] == done
            if not ended:
                first.setdefault(rank, operation)
            for sends, part in journals[rank].parts(operation):
                peer = place.get(part if sends else ~part)
                if peer is None or (ended and not whole):
                    continue
                pair = (rank, peer) if sends else (peer, rank)
                posted[pair][0 if sends else 1] += 1
                if not ended and operation is first[rank]:
                    awaited[rank].append((pair, sends, posted[pair][0 if sends else 1]))
    stuck = []
    for rank, operation in first.items():
        waits_for = {}
        for pair, sends, position in awaited[rank]:
            if posted[pair][1 if sends else 0] < position:
                waits_for[pair[1] if sends else pair[0]] = "a receive" if sends else "a send"
        stuck.append(
            StuckExchange(
                group=name,
                rank=rank,
                sequence=int(operation["sequence"]),
                operation=_describe(journals[rank], operation, place),
                label=clean(operation["label"]),
                waits_for=waits_for,
                circle=[],
            )
        )
    _find_circles(stuck)
    return stuck


def _exchanges_of(journal: Journal, number: int) -> NDArray[Any]:
    names = journal.names["operation"]
    kind = names.index("exchange") if "exchange" in names else -1
    operations = journal.operations
    mine: NDArray[Any] = operations[(operations["operation"] == kind) & (operations["group"] == number)]
    mine = mine[np.argsort(mine["sequence"], kind="stable")]
    return mine


def _describe(journal: Journal, operation: Any, place: dict[int, int]) -> str:
    """With the ranks of the job instead of places in the group."""
    told = []
    for sends, part in journal.parts(operation):
        at = part if sends else ~part
        who = f"rank {place[at]}" if at in place else f"member {at}"
        told.append(f"sends to {who}" if sends else f"receives from {who}")
    more = int(operation["num_parts"]) - len(told)
    return (
        "exchange that " + ", ".join(told or ["moves nothing"]) + (f", and {more} more" if more > 0 else "")
    )


def _find_circles(stuck: list[StuckExchange]) -> None:
    """A rank that waits for several is in the first circle found."""
    by_rank = {each.rank: each for each in stuck}

    def search(path: list[int]) -> list[int]:
        for peer in by_rank[path[-1]].waits_for:
            if peer == path[0]:
                return path
            if peer in by_rank and peer not in path:
                found = search([*path, peer])
                if found:
                    return found
        return []

    for each in stuck:
        each.circle = search([each.rank])
