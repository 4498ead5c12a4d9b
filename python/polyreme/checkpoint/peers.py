"""Copies in memory of a job on several hosts: each host keeps those of its ranks, and of ranks of the host before it.

A host's folder is its own, so a copy lies in parts. Every rank sends what it has staged to a rank of the next host
while the files are written, and the first rank of each host commits there. Before a load the hosts tell each other
what they have, and send what one lacks: after the death of a process all of it is there, and after the loss of a host
the next one has its part.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..environment import memory_segment
from ..errors import CheckpointCorrupt, CheckpointError, Error
from ..world import World
from .directory import MANIFEST, complete_steps, remove_tree, step_name
from .layout import WritePlan, gather, require_agreement
from .manifest import read_manifest
from .saver import Shard, Staging

if TYPE_CHECKING:
    from ..group import Work

__all__ = ["Kept", "Peers", "find_segment"]


def find_segment(core: _core.World, peers: Peers | None, directory: str) -> str:
    """The folder of this host for copies of what is saved to `directory`; empty, with a warning, if there is none on
    any host. Collective.

    Raises:
        CheckpointError: on all ranks: what is there is not private.
    """
    leaders = peers.leaders if peers is not None else [0]
    facts = {"error": "", "path": "", "why": ""}
    try:
        if core.rank in leaders:
            facts["path"], facts["why"] = memory_segment.find(os.environ)
    except Error as error:
        facts["error"] = str(error)
    everybody = require_agreement(core, "checkpoints in memory", facts)
    lacking = [everybody[leader]["why"] for leader in leaders if not everybody[leader]["path"]]
    if lacking:
        if core.rank == 0:
            logging.getLogger("polyreme").warning(
                "checkpoints in '%s': memory_every is without effect: %s", directory, lacking[0]
            )
        return ""
    path: str = everybody[peers.leader if peers is not None else 0]["path"]
    return path


@dataclass
class Kept:
    """What a rank keeps for one of another host: its files, in memory that is kept from save to save."""

    rank: int
    shards: list[Shard]
    staging: Staging = field(default_factory=Staging)


class Peers:
    """The ranks by host, and the way between them. Collective; its methods are called from the thread of the steps."""

    def __init__(self, world: World) -> None:
        from ..mesh import Mesh  # which needs the package to be there

        self._core = core = world._core
        ranks_of: dict[str, list[int]] = {}
        for rank, host in enumerate(core.hosts):
            ranks_of.setdefault(host, []).append(rank)
        hosts = list(ranks_of.values())
        self.leaders = [ranks[0] for ranks in hosts]
        own = next(i for i, ranks in enumerate(hosts) if core.rank in ranks)
        self.leader = self.leaders[own]  # of this host
        following = hosts[(own + 1) % len(hosts)]
        self._receiver = following[hosts[own].index(core.rank) % len(following)]
        before, number = hosts[own - 1], hosts[own].index(core.rank)
        self._sources = [rank for i, rank in enumerate(before) if i % len(hosts[own]) == number]
        self._group = Mesh(world)["dp"]
        self._plan: WritePlan | None = None
        self.kept: list[Kept] = []

    def send(self, plan: WritePlan, staging: Staging, shards: Sequence[Shard]) -> Work[None]:
        """Starts to send what is staged, and to receive what this rank keeps for others; see `kept`.

        The collectives of the next steps queue behind it.
        """
        if plan is not self._plan:
            own = json.dumps([[s.name, s.entries, s.begin, s.end] for s in shards]).encode()
            texts = gather(self._core, own, "copies for another host")
            self.kept = [
                Kept(
                    rank, [Shard(name, entries, [], a, b) for name, entries, a, b in json.loads(texts[rank])]
                )
                for rank in self._sources
            ]
            self._plan = plan
        sends = [(staging.memory(shards[-1].end), self._receiver)] if shards else []
        receives = [(k.staging.memory(k.shards[-1].end), k.rank) for k in self.kept if k.shards]
        work: Work[None] = self._group.exchange(sends=sends, receives=receives, wait=False)
        return work

    def steps(self, directory: str) -> list[int]:
        """What any host has, the newest first."""
        own = complete_steps(directory) if self._core.rank == self.leader else []
        texts = gather(self._core, json.dumps(own).encode(), "copies on all hosts")
        return sorted({step for text in texts for step in json.loads(text)}, reverse=True)

    def assemble(self, files: _core.FileOps, directory: str, step: int) -> None:
        """Brings to each host what it lacks of a copy.

        Raises:
            CheckpointCorrupt: on all ranks: no host has one of its files.
            CheckpointError: on all ranks: it cannot be written.
        """
        everybody = [
            json.loads(text)
            for text in gather(self._core, self._own_facts(directory, step), "copies of a step")
        ]
        moves = self._moves(everybody, f"copy of step {step}")
        path, error = os.path.join(directory, step_name(step)), ""
        try:
            if any(to == self._core.rank for _, to, _, _ in moves):
                if not everybody[self._core.rank]["generation"]:
                    remove_tree(files, directory, step_name(step))
                files.make_directory(path)
        except Error as problem:
            error = str(problem)
        for source, to, name, size in moves:
            if self._core.rank == source:
                data = np.zeros(size, np.uint8)  # if it has gone meanwhile, checksums tell
                try:
                    data[:] = np.frombuffer(_core.read_flat_file(path, name, size), np.uint8)
                except (Error, ValueError) as problem:
                    error = error or str(problem)
                self._group.exchange(sends=[(data, to)])
            elif self._core.rank == to:
                data = np.empty(size, np.uint8)
                self._group.exchange(receives=[(data, source)])
                try:
                    files.remove_file(path, name)
                    files.write_file(path, name, data.tobytes())
                except Error as problem:
                    error = error or str(problem)
        require_agreement(self._core, f"copy of step {step}", {"error": error})

    def _own_facts(self, directory: str, step: int) -> bytes:
        facts: dict[str, Any] = {"generation": "", "wanted": {}, "files": {}}
        try:
            if self._core.rank == self.leader:
                manifest = read_manifest(directory, step)
                path = os.path.join(directory, step_name(step))
                facts["files"] = {n: os.lstat(os.path.join(path, n)).st_size for n in os.listdir(path)}
                facts["wanted"] = {file.name: file.size_bytes for file in manifest.files}
                facts["generation"] = manifest.generation
        except (CheckpointError, OSError):
            pass  # as if it were not there
        return json.dumps(facts).encode()

    def _moves(self, everybody: list[dict[str, Any]], what: str) -> list[tuple[int, int, str, int]]:
        """(from, to, file, bytes): of the save that the first host with one has; the manifest comes last."""
        first = next((leader for leader in self.leaders if everybody[leader]["generation"]), None)
        if first is None:
            raise CheckpointCorrupt(f"{what}: no host has its manifest")
        generation = everybody[first]["generation"]
        wanted = {**everybody[first]["wanted"], MANIFEST: everybody[first]["files"][MANIFEST]}
        has = {}
        for leader in self.leaders:
            is_same = everybody[leader]["generation"] == generation
            has[leader] = everybody[leader]["files"] if is_same else {}
            everybody[leader]["generation"] = generation if is_same else ""
        moves = []
        for to in self.leaders:
            for name, size in wanted.items():
                if name == MANIFEST and name in has[to]:
                    continue  # its layout may name another host
                if has[to].get(name) != size:
                    source = next((leader for leader in self.leaders if has[leader].get(name) == size), None)
                    if source is None:
                        raise CheckpointCorrupt(f"{what}: no host has '{name}' of {size} bytes")
                    moves.append((source, to, name, size))
        return moves
