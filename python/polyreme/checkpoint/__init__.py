"""Checkpoints that cannot be lost and load on any layout.

A checkpoint is a directory `step-0000000100` with

    manifest.json               tensors (shape, dtype), files (size, CRC-32C), scalars, layout
    model.00000.safetensors     what rank 0 wrote of the weights; readable by the safetensors package
    optimizer.00000.safetensors what it wrote of the optimizer's state
    ...

It is written under a hidden name and renamed when every file is durable, so a directory of that name is
complete. `latest` beside it holds the name of the newest one. Tensors are kept by global name and index,
nothing by rank.
"""

from __future__ import annotations

from .arrays import ArrayPart
from .checkpointer import Checkpointer
from .convert import export_safetensors
from .directory import complete_steps, latest_step
from .hf import export_hf, import_hf, read_hf
from .loader import CheckpointFiles
from .manifest import Manifest, read_manifest
from .results import CheckpointStats, Restored

__all__ = [
    "ArrayPart",
    "CheckpointFiles",
    "CheckpointStats",
    "Checkpointer",
    "Manifest",
    "Restored",
    "complete_steps",
    "export_hf",
    "export_safetensors",
    "import_hf",
    "latest_step",
    "read_hf",
    "read_manifest",
]
