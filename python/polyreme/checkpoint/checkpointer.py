"""`Checkpointer`: when to save, what to do when it fails, and loading."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from .. import _core
from ..checks import check_int, check_timeout, check_type
from ..errors import CheckpointCorrupt, CheckpointError, Error, InvalidArgument
from ..verification import is_verifying
from ..world import World
from . import directory as names
from .arrays import ArrayState
from .layout import Planner, State, check_names, gather, join_errors, names_everywhere, require_agreement
from .loader import CheckpointFiles, Match, match_tensors
from .manifest import ITEM_BYTES, encode_json
from .saver import SaveJob, Staging

__all__ = ["CheckpointStats", "Checkpointer", "Restored"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class CheckpointStats:
    """What a Checkpointer has done: counts of saves by outcome, and of the last one this rank's times and bytes.

    stall_s: for which save_async has held the training up. write_s: from then until it was committed.
    """

    saved: int = 0
    skipped: int = 0
    failed: int = 0
    last_step: int | None = None
    last_error: str = ""
    stall_s: float = 0.0
    write_s: float = 0.0
    written_bytes: int = 0
    staging_bytes: int = 0


@dataclass(frozen=True)
class Restored:
    """What `load` has done. missing: tensors of the state that the checkpoint lacks, left as they were;
    unexpected: tensors of the checkpoint that nobody asked for. Both empty with strict=True."""

    step: int
    extras: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


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
        keep: int = 3,
        when_busy: str = "wait",
        on_error: str = "warn",
        fallback: bool = True,
        signals: bool = True,
        timeout_s: float = 1800.0,
        check_replicas: bool = True,
    ) -> None:
        if not isinstance(directory, str | os.PathLike):
            raise InvalidArgument(f"Checkpointer: directory={directory!r}; expected a text or a Path")
        self.directory = os.path.abspath(os.fspath(directory))
        self.every = None if every is None else check_int("Checkpointer: every", every, 1, otherwise="None")
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
        self._planner = Planner()
        self._staging = Staging()
        self._job: SaveJob | None = None
        self._thread: threading.Thread | None = None
        self._unraised: Error | None = None
        self._last_due: int | None = None
        self._signalled: set[int] = set()
        self._handlers: dict[int, Any] = {}
        if world is not None:
            check_type("Checkpointer: world", world, World, "the polyreme.World that polyreme.init returns")
            self._open(world)

    # ---- its life ----

    def __enter__(self) -> Checkpointer:
        if self._use_signals and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._handlers[number] = signal.signal(number, self._on_signal)
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
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()
            if self._lock is not None:
                self._lock.release()
                self._lock = None
            if signal.SIGTERM in self._signalled:
                self._signalled.clear()
                signal.raise_signal(signal.SIGTERM)

    def _open(self, world: World) -> _core.World:
        """Binds to the ranks at the first use. Collective."""
        if self._world is world:
            return world._core
        if self._world is not None:
            raise InvalidArgument("Checkpointer: it belongs to another world; make one for each")
        core, facts = world._core, {"error": "", "lock": ""}
        try:
            if core.rank == 0:
                os.makedirs(os.path.dirname(self.directory), exist_ok=True)
                self._files.make_directory(self.directory)
                self._lock = names.DirectoryLock(self.directory)
                names.clean(self._files, self.directory)
        except (Error, OSError) as error:
            facts["error"] = str(error)
        facts["lock"] = self._read_lock()
        lock = require_agreement(core, f"checkpoints in '{self.directory}'", facts)[0]["lock"]
        seen = self._read_lock()
        facts["error"] = (
            "" if seen == lock else "its directory of that name is not the one of rank 0; share it"
        )
        require_agreement(core, f"checkpoints in '{self.directory}'", facts)
        self._world = world
        return core

    def _read_lock(self) -> str:
        try:
            return _core.read_flat_file(self.directory, ".lock", 1000).decode("utf-8", "replace")
        except Error:
            return ""

    # ---- saving ----

    def save_async(
        self, state: Any, *, step: int | None = None, extras: Mapping[str, Any] | None = None
    ) -> bool:
        """Copies the state and returns while it is being written; whether a save was started. Collective.

        Under `polyreme verify`, which runs a script several times for a few steps, nothing is saved.

        Args:
            state: a Trainer, or names to arrays (see ArrayPart for those that are cut).
            step: of arrays: the number of the checkpoint. A checkpoint of the same step is replaced.
            extras: the user's own scalars, as JSON; equal on all ranks.

        Raises:
            InvalidArgument: names, arrays, extras that cannot be saved. Nothing was started.
            CheckpointError: the ranks do not agree; with on_error="raise", an earlier save has failed.
            NumericError: ranks of a Trainer hold different bits where they should be equal. Nothing was started.
        """
        if is_verifying():
            return False
        start = time.perf_counter()
        core = self._world_of(state)
        if step is None and hasattr(state, "applied_steps"):
            step = state.applied_steps
        step = check_int("checkpoint: step", step, 0, names.MAX_STEP)
        if self.when_busy == "wait" or (self._thread is not None and not self._thread.is_alive()):
            self.wait()
        self._raise_earlier()
        document: dict[str, Any] = dict(extras or {})
        local: Error | None = None
        facts: dict[str, Any] = {"step": step, "busy": self._thread is not None, "error": ""}
        try:
            source = _state_of(core, state, writable=False)
            held, scalars = source.held(), source.scalars()
            check_names(held)
            facts["scalars"] = hashlib.sha256(
                encode_json("extras", document) + encode_json("scalars", scalars)
            ).hexdigest()
            facts["digest"] = self._planner.digest(held)
            facts["generation"] = names.new_generation()
        except Error as error:
            local = error
            facts["error"] = str(error)
        what = f"checkpoint save of step {step}"
        try:
            everybody = require_agreement(core, what, facts)
        except CheckpointError:
            if local is not None:
                raise local from None
            raise
        for key in ("step", "scalars"):
            ranks = [r for r, f in enumerate(everybody) if f[key] != everybody[0][key]]
            if ranks:
                raise CheckpointError(
                    f"{what}: rank {ranks[0]} has another {'step' if key == 'step' else 'extras'} than rank 0:"
                    f" {everybody[ranks[0]][key]} and {everybody[0][key]}; all ranks must save the same"
                )
        if any(f["busy"] for f in everybody):
            self.stats = replace(self.stats, skipped=self.stats.skipped + 1)
            return False
        if self._checks_replicas and hasattr(state, "check_replicas"):
            state.check_replicas()
        plan = self._planner.plan(core, held, [f["digest"] for f in everybody])
        shards = self._staging.fill(plan, held, source, core.rank)
        job = SaveJob(
            world=core,
            files=self._files,
            directory=self.directory,
            step=step,
            generation=everybody[0]["generation"],
            plan=plan,
            staging=self._staging,
            shards=shards,
            layout={"num_ranks": core.size, "version": _core.__version__},
            scalars=scalars,
            extras=document,
            keep=self.keep,
            timeout_s=self.timeout_s,
        )
        self._job = job
        self._thread = job.start()
        self.stats = replace(
            self.stats, stall_s=time.perf_counter() - start, staging_bytes=self._staging.num_bytes
        )
        return True

    def save(self, state: Any, *, step: int | None = None, extras: Mapping[str, Any] | None = None) -> None:
        """Saves and waits until it is committed. Collective.

        Raises:
            CheckpointError: it is not; whatever on_error says.
        """
        self.wait()
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
        self._finish()
        if step is None:
            newest = names.latest_step(self.directory) if core.rank == 0 else None
            earlier = [
                s for s in reversed(names.complete_steps(self.directory)) if newest is not None and s < newest
            ]
            steps = [] if newest is None else [newest, *(earlier if self.fallback else [])]
        else:
            steps = [check_int("load: step", step, 0, names.MAX_STEP)]
        facts = {"steps": steps, "error": ""}
        if (
            core.rank == 0
            and step is not None
            and step not in (there := names.complete_steps(self.directory))
        ):
            facts["error"] = f"there is no committed checkpoint of step {step}; there are {there[-8:]}"
        steps = require_agreement(core, f"load from '{self.directory}'", facts)[0]["steps"]
        for i, candidate in enumerate(steps):
            try:
                return self._load_step(core, state, candidate, strict, weights_only)
            except CheckpointCorrupt as error:
                if i + 1 == len(steps):
                    raise
                logging.getLogger("polyreme").warning("%s; going on to step %d", error, steps[i + 1])
        if core.rank == 0:
            logging.getLogger("polyreme").warning("no committed checkpoint in '%s'", self.directory)
        return None

    def _load_step(
        self, core: _core.World, state: Any, step: int, strict: bool, weights_only: bool
    ) -> Restored:
        """All ranks return, or all raise: CheckpointCorrupt if damage is all that speaks against it."""
        facts: dict[str, Any] = {"error": "", "corrupt": False}
        pieces: list[tuple[int, int, int]] = []
        match, data = Match(), np.empty(0, np.uint8)
        manifest = None
        try:
            source = _state_of(core, state, writable=True)
            own, refusal = [tensor.name for tensor in source.held()], None
        except Error as error:
            own, refusal = [], error
        everywhere = names_everywhere(core, own)
        try:
            if refusal is not None:
                raise refusal
            files = CheckpointFiles(self.directory, step)
            manifest, held = files.manifest, source.held()
            indices, match = match_tensors(
                held, everywhere, manifest.tensors, "model/" if weights_only else None
            )
            complaint = match.complaint(strict=strict)
            problems = [] if weights_only else source.check_scalars(manifest.state)
            if complaint or problems:
                raise CheckpointError(
                    f"'{files.path}' does not fit: {'; '.join([complaint, *problems] if complaint else problems)}"
                )
            pieces = [(i, begin, end) for i in indices for begin, end in held[i].pieces]
            size = sum((end - begin) * ITEM_BYTES[held[i].dtype] for i, begin, end in pieces)
            data = self._staging.memory(size)
            files.read([(held[i].name, held[i].slab, begin, end) for i, begin, end in pieces], data)
        except Exception as error:  # told to all ranks, whatever it is
            facts["error"] = str(error) if isinstance(error, Error) else repr(error)
            facts["corrupt"] = isinstance(error, CheckpointCorrupt)
        texts = gather(core, _encode(facts), f"load of step {step}")
        everybody = [_decode(text) for text in texts]
        errors = {rank: f["error"] for rank, f in enumerate(everybody) if f["error"]}
        if errors or manifest is None:
            damaged = all(f["corrupt"] for f in everybody if f["error"])
            kind = CheckpointCorrupt if damaged else CheckpointError
            raise kind(f"load of step {step} failed on {join_errors(errors)}")
        source.write(pieces, data)
        if not weights_only:
            source.set_scalars(manifest.state)
        return Restored(step, manifest.extras, match.missing, match.unexpected)

    # ---- inside fit ----

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and number in self._signalled:  # a second time: at once
            signal.signal(number, self._handlers.get(number, signal.SIG_DFL))
            signal.raise_signal(number)
        self._signalled.add(number)

    def _after_step(self, trainer: Any, step: int, *, last: bool) -> None:
        """Saves where it is due; ends the process after a SIGTERM to any rank. Collective."""
        core = self._open(trainer.mesh.world)
        signals = 0
        if self._use_signals:
            came = set(self._signalled)
            self._signalled -= came
            own = sum(1 << _SIGNALS.index(signal.Signals(n)) for n in came)
            for text in gather(core, bytes([own]), "checkpoints: signals"):
                signals |= text[0]
        # A step that was skipped leaves `step` where it was: once is enough.
        due = self.every is not None and step > 0 and step % self.every == 0 and step != self._last_due
        if last or signals or due:
            self._last_due = step
            self.save_async(trainer)
        if last or signals & 1:
            self.wait()
        if signals & 1:
            self._signalled.add(signal.SIGTERM)
            self.close()


def _state_of(core: _core.World, state: Any, *, writable: bool) -> State:
    if hasattr(state, "_checkpoint_state"):
        result: State = state._checkpoint_state()
        return result
    return ArrayState(core, state, writable=writable)


def _encode(facts: dict[str, Any]) -> bytes:
    return encode_json("facts", facts)


def _decode(text: bytes) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(text)
    return result
