"""`Checkpointer`: when to save, what to do when it fails, and loading."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from .. import _core
from ..checks import check_int, check_timeout, check_type
from ..environment import memory_segment
from ..errors import CheckpointCorrupt, CheckpointError, Error, InvalidArgument
from ..verification import is_verifying
from ..world import World
from . import directory as names
from .agreement import AgreedSave, agree_on_save, agree_on_settings
from .arrays import state_of
from .layout import Planner, State, require_agreement
from .peers import Peers, find_segment
from .restore import restore
from .results import CheckpointStats, Restored
from .saver import SaveJob, Staging
from .signals import SAVE_AND_END, SignalWatch

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves and loads the checkpoints of a job in one directory. Collective: every rank makes the same calls.

        with pr.Checkpointer("runs/a", every=200, keep=3) as checkpoints:
            trainer.resume(checkpoints)
            for stats in trainer.fit(data, steps=5000, checkpoints=checkpoints):
                ...

    or, with a loop and arrays of one's own,

        with pr.Checkpointer("runs/a", world=world) as checkpoints:
            restored = checkpoints.load({"w": w, "m": m})
            ...
            checkpoints.save_async({"w": w, "m": m}, step=100, extras={"epoch": 3})

    A save copies the state into memory of its own and returns; a thread writes it. It counts when every rank's
    files are durable and one rename has made it visible; until then the earlier ones are what there is. At most
    one save is in flight, and its memory is the staging memory plus nothing.

    Args:
        directory: made, with mode 0700, if it is not there; shared by all ranks. One job may write there at a time.
        world: the ranks; default: those of the trainer that uses it first.
        every: steps between two saves of `fit`, or None for its last step alone.
        memory_every: steps of `fit` between two copies into the memory of this host, or None for no copies. When a
            rank dies and the launcher starts the ranks again (`polyreme run --restarts N`, torchrun), loading takes
            the newest of copies and checkpoints. A copy is a checkpoint in a private folder in /dev/shm, which goes
            with the job: it takes the memory of up to two of them. Of several hosts each keeps another one's part
            too, in up to three copies, so that one may be lost; the next steps' collectives queue behind the sending.
        keep: complete checkpoints that stay; at least 1.
        when_busy: what a save does while one is in flight: "wait" for it, or "skip" itself, counted.
        on_error: what becomes of a save that fails, say on a full disk. It is gone on all ranks alike, with rank,
            path and errno in the log and in `stats`. "warn": nothing else; "raise": the next call raises it.
        fallback: whether loading the newest checkpoint goes on to the one before if it is damaged.
        signals: inside `with`, on the main thread: SIGUSR1 saves after the running step of `fit`; SIGTERM saves,
            waits for it, and then ends the process as it would have without. Outside of `fit` that is the end of
            `with`; a second SIGTERM ends it at once.
        timeout_s: how long the ranks wait for each other's files.
        check_replicas: before a Trainer is saved, its ranks compare what they should hold alike (see
            `Trainer.check_replicas`), so that no checkpoint has numbers which only some ranks have.

    Raises:
        CheckpointError: at the first use: the directory cannot be made, is not the same for all ranks, or another
            job writes there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        world: World | None = None,
        every: int | None = None,
        memory_every: int | None = None,
        keep: int = 3,
        when_busy: str = "wait",
        on_error: str = "warn",
        fallback: bool = True,
        signals: bool = True,
        timeout_s: float = 1800.0,
        check_replicas: bool = True,
    ) -> None:
        path = os.fspath(directory) if isinstance(directory, str | os.PathLike) else ""
        if not isinstance(path, str) or not path or "\0" in path:
            raise InvalidArgument(
                f"Checkpointer: directory={directory!r}; expected a path, as a text or a Path"
            )
        self.directory = os.path.realpath(path)  # it may be a link itself; what it holds may not
        self.every = None if every is None else check_int("Checkpointer: every", every, 1, otherwise="None")
        self.memory_every = (
            None
            if memory_every is None
            else check_int("Checkpointer: memory_every", memory_every, 1, otherwise="None")
        )
        self.keep = check_int("Checkpointer: keep", keep, 1)
        for what, value, allowed in (
            ("when_busy", when_busy, ("wait", "skip")),
            ("on_error", on_error, ("warn", "raise")),
        ):
            if value not in allowed:
                raise InvalidArgument(
                    f"Checkpointer: {what}={value!r}; expected {' or '.join(map(repr, allowed))}"
                )
        self.when_busy, self.on_error = when_busy, on_error
        self.fallback = bool(fallback)
        self.timeout_s = check_timeout("Checkpointer: timeout_s", timeout_s)
        self.stats = CheckpointStats()
        self._checks_replicas = bool(check_replicas)
        self._use_signals = bool(signals)
        self._world: World | None = None
        self._files = _core.FileOps()
        self._lock: names.DirectoryLock | None = None
        self._is_claimed = False
        self._planner = Planner()
        self._staging = Staging()
        self._job: SaveJob | None = None
        self._thread: threading.Thread | None = None
        self._unraised: Error | None = None
        self._last_step: int | None = None  # of fit
        self._signals = SignalWatch()
        self._memory: Checkpointer | None = None  # the same in shared memory
        self._segment = ""  # of a Checkpointer that is this: where, and of which job
        self._peers: Peers | None = None  # and, if there are several hosts
        self._leader = 0  # the rank that changes names in the directory
        if world is not None:
            check_type("Checkpointer: world", world, World, "the polyreme.World that polyreme.init returns")
            self._open(world)

    # ---- its life ----

    def __enter__(self) -> Checkpointer:
        if self._use_signals:
            self._signals.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Error:
            if error is None:  # otherwise that one is the cause
                raise

    def close(self) -> None:
        """Waits for a save in flight and lets the directory go. Twice is allowed.

        Raises:
            CheckpointError: with on_error="raise", the save in flight has failed.
        """
        try:
            self.wait()
        finally:
            for each in (self, self._memory):
                if each is not None and each._lock is not None:
                    each._lock.release()
                    each._lock = None
            self._signals.restore()

    def _open(self, world: World) -> _core.World:
        """Binds to the ranks at the first use. Collective."""
        if self._world is world:
            return world._core
        if self._world is not None:
            raise InvalidArgument("Checkpointer: it belongs to another world; make one for each")
        settings = {
            "directory": self.directory,
            **{
                name: getattr(self, name)
                for name in ("every", "memory_every", "keep", "when_busy", "on_error")
            },
            "fallback": self.fallback,
            "signals": self._use_signals,
            "check_replicas": self._checks_replicas,
        }
        agree_on_settings(world._core, settings)
        self._world = world
        return world._core

    def _claim(self, core: _core.World) -> None:
        """Makes the directory and takes its lock, once; before anything is saved there. Collective."""
        if self._is_claimed or is_verifying():
            return
        facts = {"error": "", "lock": ""}
        try:
            if core.rank == self._leader:
                os.makedirs(os.path.dirname(self.directory), exist_ok=True)
                self._files.make_directory(self.directory)
                self._lock = names.DirectoryLock(self.directory)
                names.clean(self._files, self.directory)
        except (Error, OSError) as error:
            facts["error"] = str(error)
        facts["lock"] = self._read_lock()
        everybody = require_agreement(core, f"checkpoints in '{self.directory}'", facts)
        lock = everybody[self._leader]["lock"]
        seen = self._read_lock()
        facts["error"] = (
            "" if seen == lock else "its directory of that name is not the one of rank 0; share it"
        )
        require_agreement(core, f"checkpoints in '{self.directory}'", facts)
        self._is_claimed = True
        if self.memory_every is not None:
            self._open_memory(core)

    def _open_memory(self, core: _core.World) -> None:
        assert self._world is not None
        peers = Peers(self._world) if len(set(core.hosts)) > 1 else None
        path = find_segment(core, peers, self.directory)
        if not path:
            return
        memory = Checkpointer(
            os.path.join(path, names.place_of(self.directory)),
            # Hosts do not commit at the same moment: what all have is the last one or the one before.
            keep=1 if peers is None else 2,
            when_busy=self.when_busy,
            signals=False,
            timeout_s=self.timeout_s,
            check_replicas=self._checks_replicas,
        )
        memory._segment, memory._peers = path, peers
        memory._leader = peers.leader if peers is not None else 0
        memory._world = self._world
        memory._claim(core)
        self._memory = memory

    def _job_name(self) -> str:
        """Of copies in memory: that of their segment; hosts have segments of different names."""
        return memory_segment.job_of(self._segment) if self._peers is None else ""

    def _copies(self) -> list[int]:
        """Of the memory: steps that may be loaded, the newest first. Collective."""
        if self._peers is not None:
            return self._peers.steps(self.directory)
        return list(reversed(names.complete_steps(self.directory)))

    @property
    def memory_stats(self) -> CheckpointStats | None:
        """The same of copies in memory (see memory_every); None without them."""
        return self._memory.stats if self._memory is not None else None

    def _read_lock(self) -> str:
        try:
            return _core.read_flat_file(self.directory, ".lock", 1000).decode("utf-8", "replace")
        except Error:
            return ""

    # ---- saving ----

    def save_async(
        self,
        state: Any,
        *,
        step: int | None = None,
        extras: Mapping[str, Any] | None = None,
        memory: bool = False,
    ) -> bool:
        """Copies the state and returns while it is being written; whether a save was started. Collective.

        Under `polyreme verify`, which runs a script several times for a few steps, nothing is saved.

        Args:
            state: a Trainer, or names to arrays (see ArrayPart for those that are cut).
            step: of arrays: the number of the checkpoint. A checkpoint of the same step is replaced.
            extras: the user's own scalars, as JSON; equal on all ranks.
            memory: into memory instead, for a loop of one's own: see memory_every. False is returned where there is
                none.

        Raises:
            InvalidArgument: names, arrays, extras that cannot be saved. Nothing was started.
            CheckpointError: the ranks do not agree; with on_error="raise", an earlier save has failed.
            NumericError: ranks of a Trainer hold different bits where they should be equal. Nothing was started.
        """
        if is_verifying():
            return False
        start = time.perf_counter()
        core = self._world_of(state)
        self._claim(core)
        if memory:
            return self._memory is not None and self._memory.save_async(state, step=step, extras=extras)
        if step is None and hasattr(state, "applied_steps"):
            step = state.applied_steps
        step = check_int("checkpoint: step", step, 0, names.MAX_STEP)
        if self.when_busy == "wait" or (self._thread is not None and not self._thread.is_alive()):
            self._finish()
        self._raise_earlier()
        agreed = agree_on_save(
            core, self._planner, state, step, dict(extras or {}), busy=self._thread is not None
        )
        if agreed.is_busy:
            self.stats = replace(self.stats, skipped=self.stats.skipped + 1)
            return False
        if self._checks_replicas and hasattr(state, "check_replicas"):
            state.check_replicas()
        self._job = self._staged(core, step, agreed)
        self._thread = self._job.start()
        self.stats = replace(
            self.stats, stall_s=time.perf_counter() - start, staging_bytes=self._staging.num_bytes
        )
        return True

    def _staged(self, core: _core.World, step: int, agreed: AgreedSave) -> SaveJob:
        """Copies what this rank writes. Collective."""
        source = agreed.source
        plan = self._planner.plan(core, source.held(), agreed.digests)
        shards = self._staging.fill(plan, source.held(), source, core.rank)
        received = self._peers.send(plan, self._staging, shards) if self._peers is not None else None
        layout = {"num_ranks": core.size, "version": _core.__version__, **source.layout()}
        if self._segment:
            layout["job"] = self._job_name()
        return SaveJob(
            world=core,
            files=self._files,
            directory=self.directory,
            step=step,
            generation=agreed.generation,
            plan=plan,
            staging=self._staging,
            shards=shards,
            layout=layout,
            scalars=agreed.scalars,
            extras=agreed.extras,
            keep=self.keep,
            timeout_s=self.timeout_s,
            segment=self._segment,
            place=f"memory-{os.path.basename(self.directory)}" if self._segment else "",
            leader=self._leader,
            kept=self._peers.kept if self._peers is not None else (),
            received=received,
        )

    def save(self, state: Any, *, step: int | None = None, extras: Mapping[str, Any] | None = None) -> None:
        """Saves and waits until it is committed. Collective.

        Raises:
            CheckpointError: it is not; whatever on_error says.
        """
        self._finish()
        self._raise_earlier()
        self.save_async(state, step=step, extras=extras)
        error = self._finish()
        if error is not None:
            self._unraised = None
            raise error

    def wait(self) -> None:
        """Waits until no save is in flight.

        Raises:
            CheckpointError: with on_error="raise", it has failed.
        """
        self._finish()
        if self._memory is not None:
            self._memory._finish()
        self._raise_earlier()

    def _finish(self) -> Error | None:
        if self._thread is None or self._job is None:
            return None
        self._thread.join()
        job, self._job, self._thread = self._job, None, None
        if job.error is None:
            self.stats = replace(
                self.stats,
                saved=self.stats.saved + 1,
                last_step=job.step,
                write_s=job.seconds,
                written_bytes=job.num_bytes,
            )
        else:
            self.stats = replace(self.stats, failed=self.stats.failed + 1, last_error=str(job.error))
            if job.world.rank == 0:
                logging.getLogger("polyreme").warning("checkpoint lost: %s", job.error)
            if self.on_error == "raise":
                self._unraised = job.error
        return job.error

    def _raise_earlier(self) -> None:
        error, self._unraised = self._unraised, None
        if error is not None:
            raise error

    def _world_of(self, state: Any) -> _core.World:
        if hasattr(state, "_checkpoint_state"):
            return self._open(state.mesh.world)
        check_type("checkpoint: state", state, Mapping, "a Trainer, or names to arrays")
        if self._world is None:
            raise InvalidArgument("Checkpointer: arrays need its world: Checkpointer(directory, world=world)")
        return self._world._core

    # ---- loading ----

    def load(
        self, state: Any, *, step: int | None = None, strict: bool = True, weights_only: bool = False
    ) -> Restored:
        """Loads a checkpoint into a Trainer, or into arrays in place, on this layout. Collective.

        Needs no more than to read the directory, where another job may go on saving.

        What is needed is read and checked first, on all ranks; then the state is changed, or nothing is.

        Args:
            state: as in save_async.
            step: which; default: the newest complete one, or an earlier one if that is damaged (see `fallback`).
            strict: False: what one side lacks is left alone and listed.
            weights_only: tensors named "model/..." alone, and no scalars: a warm start.

        Raises:
            CheckpointError: there is none; or it does not fit: all missing, unexpected and different tensors.
            CheckpointCorrupt: files that are missing, truncated or damaged.
        """
        restored = self._load(state, step, strict, weights_only)
        if restored is None:
            raise CheckpointError(
                f"no committed checkpoint in '{self.directory}'; start without one, or save first"
            )
        return restored

    def _load(self, state: Any, step: int | None, strict: bool, weights_only: bool) -> Restored | None:
        core = self._world_of(state)
        if self.memory_every is not None:
            self._claim(core)
        self._finish()
        if self._memory is not None:
            self._memory._finish()
        copies = self._memory._copies() if self._memory is not None and step is None else []
        facts: dict[str, Any] = {"found": [], "error": ""}
        if core.rank == 0 and not self._is_claimed:
            names.recover(self._files, self.directory)
        if step is not None:
            step = check_int("load: step", step, 0, names.MAX_STEP)
            facts["found"] = [("disk", step)]
            if core.rank == 0 and step not in (there := names.complete_steps(self.directory)):
                facts["error"] = f"there is no committed checkpoint of step {step}; there are {there[-8:]}"
        elif core.rank == 0:
            facts["found"] = self._candidates(copies)
        found = require_agreement(core, f"load from '{self.directory}'", facts)[0]["found"]
        target: State | Error
        try:
            target = state_of(state, writable=True)
        except Error as error:
            target = error
        for i, (source, candidate) in enumerate(found):
            owner = self._memory if source == "memory" and self._memory is not None else self
            try:
                if owner._peers is not None:
                    owner._peers.assemble(owner._files, owner.directory, candidate)
                restored = restore(
                    core,
                    target,
                    owner.directory,
                    candidate,
                    owner._staging,
                    job=owner._job_name() if owner._segment else "",
                    strict=strict,
                    weights_only=weights_only,
                )
            except CheckpointCorrupt as error:
                if i + 1 == len(found):
                    raise
                logging.getLogger("polyreme").warning(
                    "%s; going on to step %d %s",
                    error,
                    found[i + 1][1],
                    "on disk" if found[i + 1][0] == "disk" else "in memory",
                )
            else:
                return replace(restored, source=source)
        if core.rank == 0:
            logging.getLogger("polyreme").warning("no committed checkpoint in '%s'", self.directory)
        return None

    def _candidates(self, copies: list[int]) -> list[tuple[str, int]]:
        """What to load, in this order until one is undamaged: ("memory" or "disk", step)."""
        newest = names.latest_step(self.directory)
        found = []
        if newest is not None:
            steps = names.complete_steps(self.directory)
            found = [newest, *(s for s in reversed(steps) if self.fallback and s < newest)]
        from_memory = [("memory", copy) for copy in copies if newest is None or copy >= newest]
        return [*from_memory, *(("disk", s) for s in found)]

    # ---- inside fit ----

    def _after_step(self, trainer: Any, step: int, *, last: bool) -> None:
        """Saves where it is due; ends the process after a SIGTERM to any rank. Collective."""
        core = self._open(trainer.mesh.world)
        signals = self._signals.after_step(core, last=last) if self._use_signals else 0
        # A step that was skipped leaves `step` where it was: once is enough.
        is_new, self._last_step = step > 0 and step != self._last_step, step
        if is_new and self._memory is not None and self.memory_every and step % self.memory_every == 0:
            self._memory.save_async(trainer)
        due = is_new and self.every is not None and step % self.every == 0
        if last or signals or due:
            self.save_async(trainer)
        if last or signals & SAVE_AND_END:
            self.wait()
        if signals & SAVE_AND_END:
            self._signals.end_process()
            self.close()
