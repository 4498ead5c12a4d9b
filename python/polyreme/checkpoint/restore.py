"""Bringing one checkpoint back into a state: all of it on all ranks, or nothing."""

from __future__ import annotations

import json

from .. import _core
from ..errors import CheckpointCorrupt, CheckpointError, Error
from .layout import State, gather, join_errors, names_everywhere
from .loader import CheckpointFiles, Match, match_tensors
from .manifest import ITEM_BYTES, encode_json
from .results import Restored
from .saver import Staging

__all__ = ["restore"]


def restore(
    core: _core.World,
    source: State | Error,
    directory: str,
    step: int,
    staging: Staging,
    *,
    job: str = "",
    strict: bool = True,
    weights_only: bool = False,
) -> Restored:
    """Loads a step into a state; an error instead of one is told to all. Collective: all ranks return, or all
    raise and have the state that they had.

    staging: what is read waits there until all ranks have theirs. job: that a copy in memory must be of.

    Raises:
        CheckpointCorrupt: damage is all that speaks against it.
        CheckpointError: it does not fit, or cannot be read.
    """
    own = [] if isinstance(source, Error) else [tensor.name for tensor in source.held()]
    everywhere = names_everywhere(core, own)
    error: Exception | None = None
    try:
        if isinstance(source, Error):
            raise source
        is_alone = core.hosts.count(core.hosts[core.rank]) == 1
        files = CheckpointFiles(directory, step, is_alone=is_alone)
        if job and files.manifest.layout.get("job") != job:
            raise CheckpointCorrupt(f"'{files.path}' is a copy of another job")
        indices, match = _check_fit(files, source, everywhere, strict, weights_only)
        held = source.held()
        pieces = [(i, begin, end) for i in indices for begin, end in held[i].pieces]
        data = staging.memory(sum((end - begin) * ITEM_BYTES[held[i].dtype] for i, begin, end in pieces))
        files.read([(held[i].name, held[i].slab, begin, end) for i, begin, end in pieces], data)
    except Exception as problem:  # told to all ranks, whatever it is
        error = problem
    _require_success(core, f"load of step {step}", error)
    assert not isinstance(source, Error)
    source.write(pieces, data)
    if not weights_only:
        source.set_scalars(files.manifest.state)
    return Restored(step, files.manifest.extras, match.missing, match.unexpected)


def _check_fit(
    files: CheckpointFiles, state: State, everywhere: set[str], strict: bool, weights_only: bool
) -> tuple[list[int], Match]:
    """See match_tensors. Raises CheckpointError with all that speaks against loading."""
    manifest = files.manifest
    prefix = "model/" if weights_only else None
    indices, match = match_tensors(state.held(), everywhere, manifest.tensors, prefix)
    complaint = match.complaint(strict=strict)
    problems = [] if weights_only else state.check_scalars(manifest.state)
    if complaint or problems:
        text = "; ".join([complaint, *problems] if complaint else problems)
        raise CheckpointError(f"'{files.path}' does not fit: {text}")
    return indices, match


def _require_success(core: _core.World, what: str, error: Exception | None) -> None:
    """Raises on all ranks if one has an error. Collective."""
    text = "" if error is None else str(error) if isinstance(error, Error) else repr(error)
    own = encode_json("facts", {"error": text, "corrupt": isinstance(error, CheckpointCorrupt)})
    everybody = [json.loads(facts) for facts in gather(core, own, what)]
    errors = {rank: f["error"] for rank, f in enumerate(everybody) if f["error"]}
    if errors:
        kind = CheckpointCorrupt if all(f["corrupt"] for f in everybody if f["error"]) else CheckpointError
        raise kind(f"{what} failed on {join_errors(errors)}")
