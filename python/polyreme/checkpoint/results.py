"""What a Checkpointer tells of its work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CheckpointStats", "Restored"]


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
    """What `load` has done. source: "disk", or "memory" after a restart that found a newer copy there. missing: tensors of the state that the checkpoint lacks, left as they were;
    unexpected: tensors of the checkpoint that nobody asked for. Both empty with strict=True."""

    step: int
    extras: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    source: str = "disk"
