"""Checkpoints as files of whole tensors, and compared with each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..errors import CheckpointError, InvalidArgument
from .loader import CheckpointFiles
from .manifest import ITEM_BYTES, SHARD_DTYPES, TensorRecord

__all__ = ["compare", "export_safetensors", "write_safetensors"]

_MODEL = "model/"


def export_safetensors(
    files: CheckpointFiles, out: str | os.PathLike[str], *, everything: bool = False
) -> list[str]:
    """Writes the weights as one safetensors file, under their own names; returns these.

    everything: all tensors, under their full names ("model/...", "optimizer/...").

        polyreme.checkpoint.export_safetensors(CheckpointFiles("runs/a", 100), "weights.safetensors")

    Raises:
        CheckpointError: the file exists or cannot be written; there are no weights.
    """
    tensors: dict[str, tuple[TensorRecord, NDArray[np.uint8]]] = {}
    for name, record in files.manifest.tensors.items():
        if everything or name.startswith(_MODEL):
            tensors[name if everything else name[len(_MODEL) :]] = (record, files.read_tensor(name))
    if not tensors:
        raise CheckpointError(f"'{files.path}' has no tensor named {_MODEL}...; export all of it instead")
    write_safetensors(out, tensors, {"step": str(files.manifest.step)})
    return list(tensors)


def write_safetensors(
    out: str | os.PathLike[str],
    tensors: Mapping[str, tuple[TensorRecord, NDArray[np.uint8]]],
    metadata: Mapping[str, str],
) -> None:
    """Writes tensors, given as bytes, into a new file, durable on return."""
    path = os.path.abspath(os.fspath(out))
    if os.path.lexists(path):
        raise InvalidArgument(f"'{path}' exists already; choose another name")
    # Wide items first, so that all are aligned.
    order = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name][0].dtype])
    data = np.concatenate([tensors[n][1] for n in order]) if order else np.empty(0, np.uint8)
    entries = [(n, SHARD_DTYPES[tensors[n][0].dtype], list(tensors[n][0].shape)) for n in order]
    files, parent = _core.FileOps(), os.path.dirname(path)
    files.write_shard(parent, os.path.basename(path), entries, dict(metadata), data)
    files.sync_directory(parent)


def _difference(left: Any, right: Any) -> str:
    """Of long objects the first entry that differs."""
    if not (isinstance(left, dict) and isinstance(right, dict) and len(left) > 4):
        return f"{left!r} and {right!r}"
    keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    first = keys[0]
    return f"{len(keys)} of {len({**left, **right})} entries differ, the first {first!r}: {left.get(first)!r} and {right.get(first)!r}"


def compare(a: CheckpointFiles, b: CheckpointFiles) -> list[str]:
    """What tells two checkpoints apart, one line each; empty if tensors and scalars are equal, bit by bit."""
    lines = []
    mine, other = a.manifest, b.manifest
    if mine.step != other.step:
        lines.append(f"step: {mine.step} and {other.step}")
    for key in ("state", "extras"):
        left, right = getattr(mine, key), getattr(other, key)
        lines += [
            f"{key} {name!r}: {_difference(left.get(name), right.get(name))}"
            for name in sorted({*left, *right})
            if left.get(name) != right.get(name)
        ]
    for name in sorted({*mine.tensors, *other.tensors}):
        records = mine.tensors.get(name), other.tensors.get(name)
        if records[0] is None or records[1] is None:
            lines.append(f"{name}: only in {'the second' if records[0] is None else 'the first'}")
        elif records[0] != records[1]:
            texts = [f"{r.dtype}{list(r.shape)}" for r in records if r]
            lines.append(f"{name}: {texts[0]} and {texts[1]}")
        else:
            item = ITEM_BYTES[records[0].dtype]
            left, right = (files.read_tensor(name).reshape(-1, item) for files in (a, b))
            count = int((left != right).any(axis=1).sum())
            if count:
                first = int(np.flatnonzero((left != right).any(axis=1))[0])
                lines.append(f"{name}: {count} of {len(left)} elements differ, the first at {first}")
    return lines
