"""One save: staging in the thread of the steps, files and the two-phase commit in a thread of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import mmap
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..environment import memory_segment
from ..errors import CheckpointError, CommError, Error
from . import directory as names
from .layout import HeldTensor, State, WritePlan, entry_of, join_errors
from .manifest import ITEM_BYTES, SHARD_DTYPES, FileRecord, Manifest

if TYPE_CHECKING:
    from ..group import Work
    from .peers import Kept

__all__ = ["SaveJob", "Shard", "Staging"]

_GROUPS = ("model", "optimizer")  # first parts of names that have files of their own; all others: "state"
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.1
_WARN_S = 10.0
_FAREWELL_S = 30.0


def group_of(name: str) -> str:
    """The kind of file that a tensor goes to, so that weights are read without moments."""
    head, slash, _ = name.partition("/")
    return head if slash and head in _GROUPS else "state"


@dataclass
class Shard:
    """A file to write: its entries (name, dtype, shape), the pieces that they are, and their bytes in the staging
    memory."""

    name: str
    entries: list[tuple[str, str, list[int]]]
    pieces: list[tuple[int, int, int]]
    begin: int
    end: int


class Staging:
    """Memory that is kept from save to save, and what of the plan it holds in which order."""

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._plan: WritePlan | None = None
        self._shards: list[Shard] = []

    @property
    def num_bytes(self) -> int:
        """Of host memory that is held."""
        return int(self._memory.size)

    def fill(self, plan: WritePlan, held: Sequence[HeldTensor], state: State, rank: int) -> list[Shard]:
        """Copies what this rank writes; returns the files that are to be written."""
        if plan is not self._plan:
            self._arrange(plan, held, rank)
        memory = self.memory(self._shards[-1].end if self._shards else 0)
        for shard in self._shards:
            state.read(shard.pieces, memory[shard.begin : shard.end])
        return self._shards

    def memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """So much of it, for a load too: memory that was used before is there at once."""
        if self._memory.size < num_bytes:
            self._memory = np.empty(0, np.uint8)  # before the new one is there
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a hint, which saves most of the faults of the first save
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._memory = np.frombuffer(pages, np.uint8)
        return self._memory[:num_bytes]

    def bytes_of(self, shard: Shard) -> NDArray[np.uint8]:
        """The data of a file."""
        return self._memory[shard.begin : shard.end]

    def _arrange(self, plan: WritePlan, held: Sequence[HeldTensor], rank: int) -> None:
        groups = [*_GROUPS, "state"]

        def order(piece: tuple[int, int, int]) -> tuple[int, int, int, int]:
            tensor = held[piece[0]]
            # Wide items first, so that all are aligned.
            return groups.index(group_of(tensor.name)), -ITEM_BYTES[tensor.dtype], piece[0], piece[1]

        self._shards = []
        at, current = 0, ""
        for index, begin, end in sorted(plan.pieces, key=order):
            tensor = held[index]
            group = group_of(tensor.name)
            if group != current:
                at += -at % mmap.PAGESIZE  # data of a file begins with a page: see FileOps::write_large
                self._shards.append(Shard(f"{group}.{rank:05d}.safetensors", [], [], at, at))
                current = group
            entry, shape = entry_of(tensor, begin, end)
            shard = self._shards[-1]
            shard.entries.append((entry, SHARD_DTYPES[tensor.dtype], shape))
            shard.pieces.append((index, begin, end))
            at += (end - begin) * ITEM_BYTES[tensor.dtype]
            shard.end = at
        self._plan = plan


@dataclass
class SaveJob:
    """What the writing thread needs. All ranks have the same step and generation."""

    world: _core.World
    files: _core.FileOps
    directory: str
    step: int
    generation: str
    plan: WritePlan
    staging: Staging
    shards: list[Shard]
    layout: dict[str, Any]
    scalars: dict[str, Any]
    extras: dict[str, Any]
    keep: int
    timeout_s: float
    segment: str = ""  # of memory, if that is where it goes
    place: str = ""  # names the directory where hosts have different ones
    leader: int = 0  # the rank that commits on this host
    kept: Sequence[Kept] = ()  # what is written for ranks of another host, when `received` is done
    received: Work[None] | None = None
    error: Error | None = None
    seconds: float = 0.0
    num_bytes: int = 0
    deleted: list[int] | None = None

    def start(self) -> threading.Thread:
        """Not a daemon: the interpreter waits for it before it ends."""
        thread = threading.Thread(target=self.run, name=f"checkpoint-{self.step}")
        thread.start()
        return thread

    def run(self) -> None:
        """Writes, votes and commits; never raises, see `error`."""
        start = time.monotonic()
        try:
            own = self._write_or_error()
            self._tell("part", {"generation": self.generation, **own})
            if self.world.rank == 0:
                self._lead()
            result = self._await("result", "the commit by rank 0", 0)
            if result["error"]:
                self.error = CheckpointError(result["error"])
            if 0 < self.leader == self.world.rank:
                self._follow(is_committed=self.error is None)
            self._part()
        except Error as error:
            self.error = error
        except Exception as error:  # a fault of ours, which must not be lost with the thread
            self.error = CheckpointError(f"save of step {self.step}: {type(error).__name__}: {error}")
        self.seconds = time.monotonic() - start

    def _part(self) -> None:
        """Rank 0, whose process serves the store, may end after this: it goes when all know the result."""
        if self.world.rank > 0:
            self._tell("known", {"generation": self.generation})
            return
        try:
            for rank in range(1, self.world.size):
                self._await("known", "the farewell", rank, limit_s=_FAREWELL_S)
        except Error as error:  # it is committed all the same
            logging.getLogger("polyreme").info("%s", error)

    # ---- this rank's files ----

    def _write_or_error(self) -> dict[str, Any]:
        try:
            return {"files": self._write(), "error": ""}
        except Exception as error:  # told to all ranks
            host = f"{socket.gethostname()}, pid {os.getpid()}"
            return {
                "files": [],
                "error": f"({host}) {error}" if isinstance(error, Error) else f"({host}) {error!r}",
            }

    def _write(self) -> list[tuple[str, int, int]]:
        if self.segment:
            self._check_room()
        path = os.path.join(self.directory, names.hidden_name("tmp", self.step, self.generation))
        if self.shards or any(kept.shards for kept in self.kept):
            self.files.make_directory(path)
        written = self._write_shards(path, self.world.rank, self.shards, self.staging)
        if self.received is not None:
            self.received.wait()
            for kept in self.kept:  # the very files that its rank writes on its host
                self._write_shards(path, kept.rank, kept.shards, kept.staging)
        return written

    def _write_shards(
        self, path: str, rank: int, shards: Sequence[Shard], staging: Staging
    ) -> list[tuple[str, int, int]]:
        written = []
        for shard in shards:
            size, checksum = self.files.write_shard(
                path,
                shard.name,
                shard.entries,
                {"generation": self.generation, "rank": str(rank), "step": str(self.step)},
                staging.bytes_of(shard),
            )
            written.append((shard.name, size, checksum))
            self.num_bytes += size
        if shards:
            self.files.sync_directory(path)
        return written

    def _check_room(self) -> None:
        """Memory that is not there would be taken from the training, or end it."""
        needed, free = sum(self.plan.bytes_of_rank), memory_segment.free_bytes(self.segment)
        if needed > free:
            raise CheckpointError(
                f"a copy in memory takes {needed} bytes; {free} are free in '{self.segment}': make /dev/shm larger, or"
                " leave memory_every out"
            )

    # ---- the commit ----

    def _lead(self) -> None:
        """Rank 0: waits for all parts; all of them or nothing."""
        error = ""
        try:
            parts = self._parts()
            errors = {rank: part["error"] for rank, part in enumerate(parts) if part["error"]}
            if errors:
                raise CheckpointError(f"save of step {self.step} failed on {join_errors(errors)}")
            self._commit(parts)
        except Exception as problem:
            error = str(problem) if isinstance(problem, Error) else repr(problem)
        self._tell("result", {"generation": self.generation, "error": error})
        self._clean_up(is_committed=not error)

    def _parts(self) -> list[dict[str, Any]]:
        return [self._await("part", "the files", rank) for rank in range(self.world.size)]

    def _follow(self, is_committed: bool) -> None:
        """The first rank of another host: the same there, after rank 0 has decided."""
        if is_committed:
            self._commit(self._parts())
        self._clean_up(is_committed=is_committed)

    def _clean_up(self, *, is_committed: bool) -> None:
        try:
            if is_committed:
                self.deleted = names.retain(self.files, self.directory, self.keep, self.step)
            else:
                names.remove_tree(
                    self.files, self.directory, names.hidden_name("tmp", self.step, self.generation)
                )
        except Error as problem:  # the checkpoint itself is there, or has failed anyway
            logging.getLogger("polyreme").warning("checkpoints in '%s': %s", self.directory, problem)

    def _commit(self, parts: list[dict[str, Any]]) -> None:
        path = os.path.join(self.directory, names.hidden_name("tmp", self.step, self.generation))
        records = [
            FileRecord(name, size, checksum, rank)
            for rank, part in enumerate(parts)
            for name, size, checksum in part["files"]
        ]
        manifest = Manifest(
            step=self.step,
            generation=self.generation,
            tensors=self.plan.tensors,
            files=records,
            layout=self.layout,
            state=self.scalars,
            extras=self.extras,
        )
        self.files.make_directory(path)
        self.files.write_file(path, names.MANIFEST, manifest.encode())
        self.files.sync_directory(path)
        names.commit(self.files, self.directory, self.step, self.generation)

    # ---- messages: the store keeps one value for each rank, whatever the number of saves ----

    def _key(self, what: str, rank: int) -> str:
        place = self.place or names.place_of(self.directory)
        return f"checkpoint/{place}/{what}/{rank}"

    def _tell(self, what: str, message: dict[str, Any]) -> None:
        rank = 0 if what == "result" else self.world.rank
        self.world.store_set(self._key(what, rank), json.dumps(message))

    def _await(self, what: str, meaning: str, rank: int, limit_s: float = math.inf) -> dict[str, Any]:
        """Polls: a rank that waits inside the store would keep its other calls waiting."""
        start = time.monotonic()
        poll, warn = _FIRST_POLL_S, _WARN_S
        while True:
            text = self.world.store_get(self._key(what, rank))
            if text:
                message: dict[str, Any] = json.loads(text)
                if message["generation"] == self.generation:
                    return message
            waited = time.monotonic() - start
            about = f"save of step {self.step}: {meaning} of rank {rank} did not come"
            if self.world.failure:
                raise CommError(f"{about}: {self.world.failure}")
            if waited > min(self.timeout_s, limit_s):
                raise CheckpointError(
                    f"{about} in {self.timeout_s:g} s; raise timeout_s, or look at its storage"
                )
            if waited > warn and self.world.rank == 0:
                logging.getLogger("polyreme").warning("%s yet, after %.0f s", about, waited)
                warn *= 2
            time.sleep(poll)
            poll = min(poll * 1.5, _LAST_POLL_S)
