"""Batches of loaders that do not agree on how many they have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from ..checks import check_type
from ..world import World

__all__ = ["together"]

Batch = TypeVar("Batch")


def together(batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """This rank's batches as long as every rank has another one. Collective.

    Steps are collective: a rank that has run out of data would leave the others waiting. The ranks ask each other
    before each batch, so what a longer loader has beyond the shortest one is left out on all alike. An exception of
    the loader is this rank's, and ends the job with its text on all of them.

        for tokens, targets in pr.data.together(loader, world):
            trainer.step(tokens, targets)
    """
    check_type("together: world", world, World, "the polyreme.World that polyreme.init returns")
    iterator = iter(batches)
    while True:
        try:
            batch, has_one = [next(iterator)], True
        except StopIteration:
            batch, has_one = [], False
        everybody = world._core.all_gather_bytes(bytes([has_one]), "together: another batch")
        if not all(text == b"\1" for text in everybody):
            return
        yield batch[0]
